"""Checks of every step of a run, one a file; `live.py` runs them."""
