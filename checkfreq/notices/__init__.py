"""Who says that a run ends, and when: a deadline, SLURM's time limit, a cloud's spot notices.

No torch: the worker asks them (`persist/worker.py`), the training thread only reads what it said.
"""
