"""What checkpoints of a fine-tune with a frozen base cost, beside those of its trained part."""
