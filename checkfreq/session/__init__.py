"""One run in this process: what it is made of, and how it updates, restores and ends.

``CFManager`` is the face of a `Session`; everything here belongs to the training thread.
"""
