"""Advantage estimators, one a file; `config/names.py` lists them."""
