"""`distflow diff`: what differs between two runs."""

import argparse
import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.commands.find_run import LEDGER, find_run
from distflow.commands.printing import aligned, as_json
from distflow.errors import UserError, count_of
from distflow.launch.run_folders.groups_of_step import ledger_groups
from distflow.observe.crash_safe_files import JSON, encode, read_object
from distflow.observe.metrics import headline_names
from distflow.observe.report.metric_differences import LAST
from distflow.observe.run_reader import (
    PRESET,
    config_sources,
    flat_config,
    read_samples,
    sample_steps,
)
from distflow.observe.sanitized_output import escape_control
from distflow.untrusted_files import check_file

if TYPE_CHECKING:
    from distflow.observe.run_records import RunRecords

_FINGERPRINTS = (
    "data_fingerprint",
    "tokenizer_fingerprint",
    "model_fingerprint",
    "distflow",
    "torch",
    "device",
)


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = (
        "the folder of {}, or a quoted pattern such as 'runs/{}-*' for runs of one config with "
        "several seeds"
    )
    parser.add_argument("first", metavar="A", help=help_text.format("a run", "base"))
    parser.add_argument("second", metavar="B", help=help_text.format("another", "other"))
    parser.add_argument("--json", action="store_true", help="print JSON, with all metrics")


def run_diff(arguments: argparse.Namespace) -> int:
    from distflow.observe.run_records import RunRecords

    a, b = ([*map(RunRecords, _seeds(name))] for name in (arguments.first, arguments.second))
    content = differences(a, b)
    if arguments.json:
        print(as_json(content))
    else:
        print("\n".join(escape_control(line, one_line=True) for line in _diff_lines(a, b, content)))
    return 0


def _seeds(name: str) -> list[Path]:
    """The run of that name, or those whose folders fit the pattern. Raises UserError if there is
    none."""
    if Path(name).expanduser().exists() or not any(sign in name for sign in "*?["):
        return [find_run(name)]
    found = [
        path
        for path in sorted(glob.glob(os.path.expanduser(name)))
        if (Path(path) / "events.jsonl").is_file()
    ]
    if not found:
        raise UserError(f"no run's folder fits {name!r}: a run's folder has a file events.jsonl")
    return list(map(Path, found))


def differences(a: "Sequence[RunRecords]", b: "Sequence[RunRecords]") -> dict[str, Any]:
    """What differs between two runs, or the runs of two configs with several seeds, as JSON data.
    The first difference is of the first runs."""
    from distflow.observe.findings.doctor import examine
    from distflow.observe.report.metric_differences import compared_metrics

    sides = [a, b]
    facts = []
    rules = []
    for side in sides:
        facts.append([read_object(run.run_dir / "run.json", run.run_dir) for run in side])
        rules.append({found.rule for run in side for found in examine(run).problems()})
    same = []
    different = []
    for name in _FINGERPRINTS:
        first, second = ({encode(each.get(name)) for each in side} for side in facts)
        if first != second:
            different.append(name)
        elif len(first - {b"null"}) == 1:
            same.append(name)
    folders = [[run.run_dir for run in side] for side in sides]
    return {
        "num_runs": [len(a), len(b)],
        "config": _config_changes(folders[0], folders[1], facts),
        "same": same,
        "different": different,
        "first_difference": _first_difference(a[0], b[0]),
        "metrics": compared_metrics([run.steps for run in a], [run.steps for run in b]),
        "findings": {"only_a": sorted(rules[0] - rules[1]), "only_b": sorted(rules[1] - rules[0])},
    }


def _config_changes(
    a: Sequence[Path], b: Sequence[Path], facts: Sequence[Sequence[Mapping[str, JSON]]]
) -> list[dict[str, str]]:
    """The keys that differ, with the values of both sides and where each was set. Several seeds
    have several values."""
    sides = []
    for paths, own in zip((a, b), facts, strict=True):
        values = list(map(flat_config, paths))
        sources = list(map(config_sources, own))
        side: dict[str, tuple[str, str]] = {}
        for key in {key for each in values for key in each}:
            shown = {each.get(key, "missing") for each in values}
            origins = {each.get(key, PRESET) for each in sources}
            side[key] = (" | ".join(sorted(shown)), " | ".join(sorted(origins)))
        sides.append(side)
    missing = ("missing", PRESET)
    changes = []
    for key in sorted({*sides[0], *sides[1]}):
        first, of_first = sides[0].get(key, missing)
        second, of_second = sides[1].get(key, missing)
        if first != second:
            change = {"key": key, "a": first, "b": second}
            changes.append({**change, "a_source": of_first, "b_source": of_second})
    return changes


def _first_difference(a: "RunRecords", b: "RunRecords") -> str:
    """The first group with another row; if there is none, the first sample with another response,
    and the first tensor."""
    groups = [ledger_groups(run.run_dir / LEDGER) for run in (a, b)]
    for group_id in sorted({*groups[0]} & {*groups[1]}):
        first, second = (each[group_id] for each in groups)
        if (first.epoch, first.row) != (second.epoch, second.row):
            return f"group {group_id} holds row {first.row} in A, {second.row} in B"
    found = (_first_response(a, b), _first_tensor(a.run_dir, b.run_dir))
    return (
        "; ".join(filter(None, found))
        or "none in the groups, responses and checkpoints that both have"
    )


def _first_response(a: "RunRecords", b: "RunRecords") -> str:
    for step in sorted({*sample_steps(a.run_dir)} & {*sample_steps(b.run_dir)}):
        rows = [
            {str(row.get("uid")): row for row in read_samples(r.run_dir, step, "train", r.timeline)}
            for r in (a, b)
        ]
        for uid in (uid for uid in rows[0] if uid in rows[1]):
            texts = [str(each[uid].get("response")) for each in rows]
            if texts[0] != texts[1]:
                where = len(os.path.commonprefix(texts))
                token = _token(a, b, step, uid)
                return (
                    f"step {step}: the responses of sample {uid} differ from character "
                    f"{where}{token}"
                )
    return ""


def _token(a: "RunRecords", b: "RunRecords", step: int, uid: str) -> str:
    """The first token that differs, with its log-probs, if both runs saved the step's tokens."""
    from distflow.launch.run_folders.saved_tokens import saved_tokens

    first, second = (
        [row for row in saved_tokens(run.run_dir, step) if row[1] == uid] for run in (a, b)
    )
    differing = (pair for pair in zip(first, second, strict=False) if pair[0][3] != pair[1][3])
    if (pair := next(differing, None)) is None:
        return ""
    (_, _, position, x, _, p, *_), (_, _, _, y, _, q, *_) = pair
    return f": token {position} is {x} (log-prob {p}) in A, {y} ({q}) in B"


def _first_tensor(a: Path, b: Path) -> str:
    from safetensors import SafetensorError, safe_open

    folders = ({path.name for path in (run / "checkpoints").glob("step-*")} for run in (a, b))
    for name in sorted(set.intersection(*folders)):
        files = [run / "checkpoints" / name / "actor.safetensors" for run in (a, b)]
        try:
            paths = [check_file(file, run) for file, run in zip(files, (a, b), strict=True)]
            with safe_open(paths[0], "pt") as first, safe_open(paths[1], "pt") as second:
                shared = {*second.keys()}
                # no mapping
                for key in (key for key in first.keys() if key in shared):  # noqa: SIM118
                    if not first.get_tensor(key).equal(second.get_tensor(key)):
                        return f"{name}: the tensor {key} differs"
        except (OSError, SafetensorError) as error:
            return (
                f"unknown: the weights of {name} cannot be compared: "
                f"{getattr(error, 'strerror', None) or error}"
            )
    return ""


def _diff_lines(
    a: "Sequence[RunRecords]", b: "Sequence[RunRecords]", content: Mapping[str, Any]
) -> list[str]:
    lines = []
    for name, side in (("A", a), ("B", b)):
        for run in side:
            lines.append(f"{name} {run.run_dir}: {count_of(max(run.steps, default=0), 'step')}")
    lines += ["", f"config, different: {count_of(len(content['config']), 'key')}"]
    for c in content["config"]:
        lines.append(f"  {c['key']}: {c['a']} ({c['a_source']}) -> {c['b']} ({c['b_source']})")
    for word in ("same", "different"):
        lines.append(f"{word}: {', '.join(content[word]) or 'nothing known'}")
    lines += [f"first difference: {content['first_difference']}", ""]
    is_pair = content["num_runs"] == [1, 1]
    lines += _metric_table(content["metrics"], is_pair)
    if is_pair:
        lines.append(
            f"One run each, their last {LAST} common values: by block bootstrap. Other seeds may "
            "differ by more."
        )
    else:
        of_a, of_b = (count_of(number, "run") for number in content["num_runs"])
        lines.append(
            f"{of_a} of A, {of_b} of B: by the spread of their means over the last {LAST} common "
            "values."
        )
    for name, key in (("A", "only_a"), ("B", "only_b")):
        lines.append(f"findings only in {name}: {', '.join(content['findings'][key]) or 'none'}")
    return lines


def _metric_table(metrics: Sequence[Mapping[str, Any]], is_pair: bool) -> list[str]:
    """The headline metrics."""
    shown = headline_names()
    words = {True: "yes, in this pair" if is_pair else "yes", False: "no", None: "too few steps"}
    rows = [["metric", "A", "B", "B - A", "95 % interval", "can one tell?"]]
    for found in metrics:
        if found["metric"] not in shown:
            continue
        interval = ""
        if found["low"] is not None:
            interval = f"{found['low']:+.4g} .. {found['high']:+.4g}"
        rows.append(
            [
                found["metric"],
                f"{found['a']:.4g}",
                f"{found['b']:.4g}",
                f"{found['difference']:+.4g}",
                interval,
                words[found["differs"]],
            ]
        )
    return aligned(rows, set(range(1, 5)))
