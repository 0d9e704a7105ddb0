"""What the benchmarks share: paired measurements, estimates, states, result lines, tables."""
