"""Small whole programs to copy from, one idea each; ``docs/recipes`` explains them.

Each makes its own data, trains for a few seconds on a CPU, and prints a digest of the final state.
Kill one at any time and start it again: it prints the same digest.

    python -m checkfreq.examples.minimal chk/
"""
