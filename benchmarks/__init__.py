"""Programs that train, kill and measure. Run from the checkout: ``python -m benchmarks.demo``."""
