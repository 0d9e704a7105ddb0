"""Checkpoints on disk: file operations, the manifest, and the store. No torch."""
