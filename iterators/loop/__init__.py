"""The training loop over an iterator: passes, boundaries, the cursor, and what the log says."""
