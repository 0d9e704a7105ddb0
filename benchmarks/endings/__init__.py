"""The table of `tests/slurm/test_endings.py`: how runs with a mirror end, and what they leave."""
