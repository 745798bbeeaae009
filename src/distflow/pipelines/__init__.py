"""The built-in pipelines and their nodes."""
