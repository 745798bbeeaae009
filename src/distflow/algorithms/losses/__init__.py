"""Policy losses, one a file; `registry.py` lists them."""
