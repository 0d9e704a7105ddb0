"""Other libraries' interfaces to checkfreq's directories. Each module needs its library."""
