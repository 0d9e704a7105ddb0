"""Phase one: reading the training state, laying it out as files, and putting it back."""
