"""The checks of every step of a run, by subject; `step_invariants.py` runs them."""
