"""The last resort: resume any iterable by running it up to the saved place."""
