"""Policy losses; `builtin_names.py` lists them."""
