"""Recorded runs under real loads, and policies replayed over them."""
