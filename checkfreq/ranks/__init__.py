"""One rank or many: how ranks talk, who writes what, how they decide and restore together.

``coordinator`` is what a session asks for, in a run of one rank or (``multi_rank``) of many.
``meetings`` is the transport, over the store of torch.distributed; ``roles`` and ``voting`` are
what ranks agree on over it, ``joint_restore`` is their restore. All of it belongs to the training
thread, except the calls to the store (``store_thread``).
"""
