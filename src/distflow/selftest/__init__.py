"""What `distflow selftest` proves: the same numbers, to a tolerance or to the bit, on the paths that must give them."""
