"""`distflow new`: a folder to start from, with a config, a reward function and data.
`distflow list`: presets, built-in models, and the runs of a folder."""

import argparse
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from distflow.commands.arguments_and_run_folders import RUNS, importing
from distflow.errors import UserError
from distflow.observe.crash_safe_files import empty_folder
from distflow.observe.sanitized_output import escape_control
from distflow.observe.writing.run_folder import EARLIER

CONFIG = Path(__file__).with_name("new_config.yaml")
REWARD = '''\
"""Test it: distflow reward check {folder}/reward.py --data {folder}/problems.jsonl"""


def compute_score(solution_str, ground_truth):
    """The share of characters that are right; `acc` says whether the response is correct."""
    given = solution_str.strip()
    same = sum(a == b for a, b in zip(given, ground_truth))
    return {{"score": same / max(len(given), len(ground_truth)), "acc": given == ground_truth}}
'''
FILES = {"problems": "problems.jsonl", "validation": "validation.jsonl", "reward": "reward.py"}
NUM_VALIDATION = 100


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", help="folder to write into; it must be empty or not exist"
    )


def run_new(arguments: argparse.Namespace) -> int:
    """Write a config, a reward function and problems that are ready to train."""
    folder = empty_folder(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    sums = []
    for a in range(10, 50):
        for b in range(10, 50):
            sums.append({"prompt": f"{a}+{b}=", "answer": str(a + b)})
    Random(0).shuffle(sums)
    for name, rows in (("problems", sums[NUM_VALIDATION:]), ("validation", sums[:NUM_VALIDATION])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {name: str(folder / file) for name, file in FILES.items()}
    quoted = {
        key: json.dumps(text, ensure_ascii=False)
        for key, text in {"name": folder.resolve().name, **files}.items()
    }
    (folder / "config.yaml").write_text(
        CONFIG.read_text("utf-8").format(folder=folder, **quoted), "utf-8"
    )
    (folder / "reward.py").write_text(REWARD.format(folder=folder))
    name = escape_control(str(folder), one_line=True)
    print(f"{name}: config.yaml, reward.py, problems.jsonl, validation.jsonl")
    config, reward, data = (
        shlex.quote(f"{name}/{file}") for file in ("config.yaml", "reward.py", "problems.jsonl")
    )
    for command in (
        f"data check {config}",
        f"reward check {reward} --data {data}",
        f"train {config}",
    ):
        print(f"  distflow {command}")
    return 0


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["presets", "models", "runs"],
        metavar="presets|models|runs",
        help="what to list",
    )
    parser.add_argument(
        "folder", nargs="?", default=RUNS, type=Path, metavar="DIR", help="folder of the runs"
    )


def run_list(arguments: argparse.Namespace) -> int:
    lines = {"presets": _presets, "models": _models, "runs": lambda: _runs(arguments.folder)}[
        arguments.what
    ]
    rows = list(lines())
    width = max((len(name) for name, _ in rows), default=0)
    for name, what in rows:
        print(f"{name:<{width}}  {what}")
    return 0


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
