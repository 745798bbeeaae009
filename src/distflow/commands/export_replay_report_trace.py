"""`distflow export`, `replay`, `report` and `trace`: outputs from a run's folder."""

import argparse
from pathlib import Path

from distflow.commands.arguments_and_run_folders import add_trust_argument, not_a_run


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="RUN|CHECKPOINT", help="a run's folder, or one of its checkpoints"
    )
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="a folder that is empty or does not exist"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="write only the LoRA adapter, as a PEFT folder"
    )
    add_trust_argument(parser, "came with the model")


def run_export(arguments: argparse.Namespace) -> int:
    from distflow.launch.run_folders.export_checkpoint import export_checkpoint

    source = Path(arguments.checkpoint)
    target = Path(arguments.to)
    export_checkpoint(
        source, target, trust_code=arguments.trust_code, say=print, adapter=arguments.adapter
    )
    return 0


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="folder of the saved update, below RUN/bundles"
    )
    add_trust_argument(parser, "the run imported, or that came with its model")


def run_replay(arguments: argparse.Namespace) -> int:
    from distflow.launch.run_folders.replay_nonfinite_update import replay_bundle

    for line in replay_bundle(Path(arguments.bundle), trust_code=arguments.trust_code):
        print(line)
    return 0


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="the run's folder")


def run_report(arguments: argparse.Namespace) -> int:
    from distflow.observe.report.build import write_report

    run_dir = Path(arguments.run_dir)
    if run_dir.is_dir() and not (run_dir / "events.jsonl").is_file():
        raise not_a_run(run_dir)
    print(f"report: {write_report(run_dir)}")
    return 0


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="the run's folder")
    parser.add_argument(
        "steps", nargs="?", metavar="STEPS", help="such as 12 or 10-14; default: the last five"
    )
    parser.add_argument(
        "--to", metavar="FILE", help="file to write; default: trace.json in the run's folder"
    )


def run_trace(arguments: argparse.Namespace) -> int:
    from distflow.observe.report.graph_and_timelines import write_trace

    target = Path(arguments.to or Path(arguments.run_dir) / "trace.json")
    first, last = write_trace(Path(arguments.run_dir), arguments.steps, target)
    print(
        f"steps {first} to {last}: {target}\nopen it at https://ui.perfetto.dev, or in Chrome at "
        "chrome://tracing"
    )
    return 0
