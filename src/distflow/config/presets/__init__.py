"""Presets: YAML files that hold an algorithm."""
