"""What the benchmarks measure with: windows, estimates, states, result lines."""
