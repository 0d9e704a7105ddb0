"""What happened in a checkpoint directory, from its events: a report, a live view. No torch.

``reading`` reads ``events.jsonl`` and ``events.1.jsonl``; ``model`` makes a story of the events,
run by run, and ``figures`` says from it how things are now. Those two are pure.
"""
