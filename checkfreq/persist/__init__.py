"""Phase two: a separate process turns snapshots into checkpoints.

``persistence`` is what the rest of the trainer calls; it talks to the ``worker`` process through
``client``, in the messages of ``protocol``. ``commit`` is how the worker carries out a persist.
The worker imports no torch and never touches an accelerator.
"""
