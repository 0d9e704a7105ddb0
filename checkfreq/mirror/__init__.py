"""Copies of committed checkpoints in an object store: the layout there, and the writing side."""
