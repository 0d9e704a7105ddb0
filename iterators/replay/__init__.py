"""The last resort: any iterable, resumed by running it up to the place."""
