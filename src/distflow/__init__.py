"""distflow: RL post-training of language models as a typed dataflow graph. Importing it loads neither torch nor Ray."""

__version__ = "0.1.0"
