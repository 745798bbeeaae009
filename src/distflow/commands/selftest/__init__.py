"""`distflow selftest`: proves that different paths give the same numbers, to a tolerance or to the
bit."""
