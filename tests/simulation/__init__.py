"""Recorded runs: reading them, taking them apart, replaying policies over them."""
