"""The built-in pipelines and their nodes, and the assembly of a run from a config: where everything meets."""
