"""`distflow config`: the resolved config, one key of it explained, or its program drawn."""

import argparse

from distflow.commands.config_arguments import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--explain", metavar="KEY", help="what one key means, its default and where it was set")
    parser.add_argument("--graph", action="store_true", help="the program as a Mermaid flowchart")


def run(arguments: argparse.Namespace) -> int:
    from distflow.config import explain, load_config

    loaded = load_config(arguments.preset, arguments.overrides, complete=False)
    if arguments.explain:
        print(explain(arguments.explain, loaded))
    elif arguments.graph:
        from distflow.pipelines.spec import bind

        print(bind(loaded.config).to_mermaid())
    else:
        print(loaded.text, end="")
    return 0
