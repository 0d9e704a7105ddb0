"""Restore: find the newest checkpoint that validates, verify all of it, load it in place."""
