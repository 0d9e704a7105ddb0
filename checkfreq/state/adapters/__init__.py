"""One adapter per kind of tracked object: how it is read, compared and restored."""
