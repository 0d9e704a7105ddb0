"""Where a training loop stands in its data: the cursor, counted batches, and epoch tails."""
