"""`distflow train`: a run by a preset or a YAML file."""

import argparse

from distflow import __version__
from distflow.commands.config_arguments import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_resume_arguments(parser)


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", metavar="auto|never|PATH", help="where to go on from (default: auto)")
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY", help="may differ on resume")


def say(line: str) -> None:
    """At once, also where standard output is a file."""
    print(line, flush=True)


def run(arguments: argparse.Namespace) -> int:
    from distflow.config import describe, load_config

    say(f"distflow {__version__} · {arguments.preset}")
    loaded = load_config(arguments.preset, arguments.overrides)
    for line in describe(loaded.config):
        say(line)
    from distflow.pipelines.launch import launcher_of
    from distflow.pipelines.spec import make_spec

    spec = make_spec(loaded, say=say)
    outcome = launcher_of(spec)(
        spec, resume=arguments.resume, allow_change=tuple(arguments.allow_change), say=say
    )
    if outcome.accuracy_before is not None and outcome.accuracy_after is not None:
        print(f"accuracy before RL: {outcome.accuracy_before:.2f}")
        print(f"accuracy after RL: {outcome.accuracy_after:.2f}")
    print(f"report: {outcome.report}")
    return 0
