"""``checkfreq watch``: the figures of a run as text, as a page on this machine, for Prometheus."""
