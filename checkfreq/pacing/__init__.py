"""Measuring a run while it trains: clocks, costs, and what they depend on."""
