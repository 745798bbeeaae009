"""The commands of `distflow`, one a file: `add_arguments(parser)` and `run(arguments) -> exit status`.

Importing one is cheap: what is heavy is imported in `run`, once the config is known to be sound.
"""
