"""Policy losses; `builtin_names.toml` lists them."""
