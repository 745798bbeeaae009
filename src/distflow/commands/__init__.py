"""The commands of `distflow`, by subject: each NAME has `add_NAME_arguments(parser)` and
`run_NAME(arguments) -> exit status` in the module that `cli.COMMANDS` names.

Importing a module is cheap: `run_NAME` imports heavy modules once the config is known to be valid.
"""
