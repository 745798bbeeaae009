"""Advantage estimators, one a file; `registry.py` lists them."""
