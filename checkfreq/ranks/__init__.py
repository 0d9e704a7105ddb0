"""Many ranks: how they talk, who writes what, what they decide together, and how they restore.

``meetings`` is the transport, ``roles`` and ``collective`` what is agreed over it,
``joint_restore`` the restore. All of it on the training thread.
"""
