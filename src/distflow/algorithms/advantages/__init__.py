"""Advantage estimators; `builtin_names.py` lists them."""
