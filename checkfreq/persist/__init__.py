"""Phase two: a separate process turns snapshots into checkpoints.

``client`` is the trainer's handle, ``worker`` the process, ``commit`` what it does with a
snapshot, ``protocol`` what they say to each other. Nothing here imports torch, and the worker
never touches an accelerator.
"""
