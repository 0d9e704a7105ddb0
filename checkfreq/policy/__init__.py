"""Decisions as pure functions: numbers in, a decision out. No torch, no clock, no I/O."""
