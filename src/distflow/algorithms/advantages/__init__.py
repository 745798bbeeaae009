"""Advantage estimators; `builtin_names.toml` lists them."""
