"""Policy losses, one a file; `config/names.py` lists them."""
