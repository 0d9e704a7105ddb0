"""Recorded runs and simulated ones."""
