"""Which sample comes where, and everything that this depends on."""
