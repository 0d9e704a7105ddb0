"""The training state: what is tracked, how it is read at a boundary, and how it is encoded."""
