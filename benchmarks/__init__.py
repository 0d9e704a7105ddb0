"""Scripts that train, kill and measure. Run them from the checkout: ``python -m benchmarks.demo``."""
