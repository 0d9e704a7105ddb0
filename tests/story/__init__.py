"""The story of a directory, the report and the live view."""
