"""`distflow diff`: what differs between two runs."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.commands.find_run import LEDGER, find_run
from distflow.commands.printing import aligned, as_json
from distflow.errors import count_of
from distflow.launch.run_folders.groups_of_step import ledger_groups
from distflow.observe.crash_safe_files import JSON, read_object
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
    parser.add_argument("first", metavar="A", help="the folder of a run")
    parser.add_argument("second", metavar="B", help="the folder of another")
    parser.add_argument("--json", action="store_true", help="print JSON, with all metrics")


def run_diff(arguments: argparse.Namespace) -> int:
    from distflow.observe.run_records import RunRecords

    a = RunRecords(find_run(arguments.first))
    b = RunRecords(find_run(arguments.second))
    content = differences(a, b)
    if arguments.json:
        print(as_json(content))
    else:
        print("\n".join(escape_control(line, one_line=True) for line in _diff_lines(a, b, content)))
    return 0


def differences(a: "RunRecords", b: "RunRecords") -> dict[str, Any]:
    """What differs between two runs, as JSON data."""
    from distflow.observe.findings.doctor import examine
    from distflow.observe.report.metric_differences import compared_metrics

    facts = [read_object(run.run_dir / "run.json", run.run_dir) for run in (a, b)]
    rules = [{found.rule for found in examine(run).problems()} for run in (a, b)]
    same = []
    different = []
    for name in _FINGERPRINTS:
        first, second = (each.get(name) for each in facts)
        if first != second:
            different.append(name)
        elif first is not None:
            same.append(name)
    return {
        "config": _config_changes(a.run_dir, b.run_dir, facts),
        "same": same,
        "different": different,
        "first_difference": _first_difference(a, b),
        "metrics": compared_metrics(a.steps, b.steps),
        "findings": {"only_a": sorted(rules[0] - rules[1]), "only_b": sorted(rules[1] - rules[0])},
    }


def _config_changes(a: Path, b: Path, facts: Sequence[Mapping[str, JSON]]) -> list[dict[str, str]]:
    """The keys that differ, with the values of both sides and where each was set."""
    values = [flat_config(a), flat_config(b)]
    sources = [config_sources(each) for each in facts]
    changes = []
    for key in sorted({*values[0], *values[1]}):
        first, second = (each.get(key, "missing") for each in values)
        if first != second:
            of_a, of_b = (each.get(key, PRESET) for each in sources)
            change = {"key": key, "a": first, "b": second, "a_source": of_a, "b_source": of_b}
            changes.append(change)
    return changes


def _first_difference(a: "RunRecords", b: "RunRecords") -> str:
    """The first group with another row; if there is none, the first sample with another
    response."""
    groups = [ledger_groups(run.run_dir / LEDGER) for run in (a, b)]
    for group_id in sorted({*groups[0]} & {*groups[1]}):
        first, second = (each[group_id] for each in groups)
        if (first.epoch, first.row) != (second.epoch, second.row):
            return f"group {group_id} holds row {first.row} in A, {second.row} in B"
    return _first_response(a, b) or "none in the groups and responses that both have"


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

    pairs = zip(
        saved_tokens(a.run_dir, step, uid), saved_tokens(b.run_dir, step, uid), strict=False
    )
    for position, (x, y) in enumerate(pairs):
        if x["id"] != y["id"]:
            return (
                f": token {position} is {x['id']} (log-prob {x['log_prob']}) in A, "
                f"{y['id']} ({y['log_prob']}) in B"
            )
    return ""


def _diff_lines(a: "RunRecords", b: "RunRecords", content: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, run in (("A", a), ("B", b)):
        lines.append(f"{name} {run.run_dir}: {count_of(max(run.steps, default=0), 'step')}")
    lines += ["", f"config, different: {count_of(len(content['config']), 'key')}"]
    for c in content["config"]:
        lines.append(f"  {c['key']}: {c['a']} ({c['a_source']}) -> {c['b']} ({c['b_source']})")
    for word in ("same", "different"):
        lines.append(f"{word}: {', '.join(content[word]) or 'nothing known'}")
    lines += [f"first difference: {content['first_difference']}", ""]
    lines += _metric_table(content["metrics"])
    lines.append(
        f"One run each, their last {LAST} common values: by means of blocks. Other seeds may "
        "differ by more."
    )
    for name, key in (("A", "only_a"), ("B", "only_b")):
        lines.append(f"findings only in {name}: {', '.join(content['findings'][key]) or 'none'}")
    return lines


def _metric_table(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """The headline metrics."""
    shown = headline_names()
    words = {True: "yes, in this pair", False: "no", None: "too few steps"}
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
