"""Starts a training again that crashed or was killed: ``checkfreq run``. No torch.

``supervise`` is the loop: start the script, wait, judge its end, pause. What managers tell it, by
a piece of shared memory, is in ``board``; their side of it is ``reporter``. ``standby`` keeps a
process ready that becomes the script at the next start, in ``becoming``.
"""
