"""What this machine gives a run: storage, memory, accelerators, SLURM, an object store. No torch.

Each module finds one section; ``findings`` is what all of them return, and ``page`` writes what may
be sent to others. What needs torch runs in a process of its own (checkfreq/snapshot/probe.py).
"""
