"""checkfreq's directories behind other libraries' interfaces; each module needs its library."""
