"""Train an image classifier with checkfreq: the script that people copy."""
