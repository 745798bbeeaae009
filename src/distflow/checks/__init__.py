"""Checks of every step of a run, each file one: `live.py` makes them."""
