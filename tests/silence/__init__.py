"""Scripts of ordinary shape that once ended with other bits, silently: now exact, or warned of."""
