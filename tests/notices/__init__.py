"""Tests of `checkfreq/notices`: sources against real servers and commands, and the watch."""
