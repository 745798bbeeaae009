"""`distflow config`: the resolved config, one key of it explained, or its program drawn."""

import argparse
import sys

from distflow.commands.config_arguments import add_config_arguments, add_trust_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--explain", metavar="KEY", help="what one key means, its default and where it was set")
    parser.add_argument("--graph", action="store_true", help="the program, drawn in text")
    parser.add_argument("--mermaid", action="store_true", help="the program as a Mermaid flowchart")
    add_trust_argument(parser, "the config names, where it has groups or a program of its own")


def run(arguments: argparse.Namespace) -> int:
    from distflow.config import explain, load_config

    trusted = arguments.trust_code
    loaded = load_config(arguments.preset, arguments.overrides, complete=False, trust_code=trusted)
    if arguments.explain:
        print(explain(arguments.explain, loaded))
    elif arguments.graph or arguments.mermaid:
        from distflow.pipelines.code import only_if_trusted, program_code
        from distflow.pipelines.spec import bind, import_user_modules

        only_if_trusted(program_code(loaded.config), trusted, say=lambda line: print(line, file=sys.stderr))
        import_user_modules(loaded.config)
        program = bind(loaded.config)
        print(program.to_mermaid() if arguments.mermaid else program.to_text(), end="")
    else:
        print(loaded.text, end="")
    return 0
