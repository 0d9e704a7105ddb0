"""``checkfreq report``: charts (matplotlib) and one HTML page, or PNG files, of a story."""
