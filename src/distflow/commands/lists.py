"""`distflow list`: presets and built-in models. `distflow runs`: the runs of a folder."""

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from distflow.commands.arguments_and_run_folders import RUNS, importing
from distflow.errors import UserError
from distflow.observe.sanitized_output import escape_control
from distflow.observe.writing.run_folder import EARLIER


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["presets", "models"],
        metavar="presets|models",
        help="what to list",
    )


def run_list(arguments: argparse.Namespace) -> int:
    _print_rows(_presets() if arguments.what == "presets" else _models())
    return 0


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", default=RUNS, type=Path, metavar="DIR", help="folder of the runs"
    )


def run_runs(arguments: argparse.Namespace) -> int:
    _print_rows(_runs(arguments.folder))
    return 0


def _print_rows(found: Iterable[tuple[str, str]]) -> None:
    rows = list(found)
    width = max((len(name) for name, _ in rows), default=0)
    for name, what in rows:
        print(f"{name:<{width}}  {what}")


def _presets() -> Iterator[tuple[str, str]]:
    """Each preset with the first sentence of its head comment."""
    from distflow.config.compose.setting_origins import PRESETS, preset_names

    for name in preset_names():
        lines = (PRESETS / f"{name}.yaml").read_text("utf-8").splitlines()
        head = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))
        yield name, head.partition(". ")[0].rstrip(".")


def _models() -> Iterator[tuple[str, str]]:
    with importing():
        from distflow.launch.configured_models import builtin_models
    for path, config, has_weights in builtin_models():
        size = (
            f"{config['model_type']}, {config['num_hidden_layers']} layers of width "
            f"{config['hidden_size']}"
        )
        yield (
            path,
            size
            if has_weights
            else f"{size}; without weights: actor_rollout_ref.model.init=random",
        )


def _runs(folder: Path) -> Iterator[tuple[str, str]]:
    """The runs, most recently written first. Raises UserError if there is no such folder."""
    from distflow.observe.report.summary_sentences import accuracies, status
    from distflow.observe.run_reader import read_events, read_metrics

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name the folder that contains the runs")
    found = {
        path.parent: path.lstat().st_mtime
        for path in folder.glob("**/events.jsonl")
        if EARLIER not in path.relative_to(folder).parts
    }
    for run, written in sorted(found.items(), key=lambda each: -each[1]):
        try:
            records = read_metrics(run)
            before, after = accuracies(records, read_events(run))
            step = max((record.step for record in records), default=0)
            word = status(read_events(run))["word"]
            first = "" if before is None else f"{before:.2f} → "
            said = f"{word}, step {step}" + (
                f", accuracy {first}{after:.2f}" if after is not None else ""
            )
        except UserError as error:  # of one run, which should not hide the others
            said = escape_control(f"unreadable: {error}", one_line=True)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
        yield escape_control(str(run), one_line=True), f"{when}  {said}"
