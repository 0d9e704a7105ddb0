"""Phase one: laying the state out as files, and copying it into a slot of shared memory."""
