"""The order of the samples, and everything that it depends on."""
