"""The way back: find the newest checkpoint that validates, check it whole, load it in place."""
