"""`distflow diff`: what differs between two runs."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.commands.find_run import find_run
from distflow.commands.printing import aligned, as_json, print_escaped
from distflow.errors import count_of
from distflow.observe.crash_safe_files import read_object
from distflow.observe.metrics import headline_names
from distflow.observe.report.metric_differences import LAST
from distflow.observe.run_reader import flat_config, sample_steps

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
        print_escaped(_diff_lines(a, b, content))

    return 0


def differences(a: "RunRecords", b: "RunRecords") -> dict[str, Any]:
    """What differs between two runs, as JSON data."""
    from distflow.observe.findings.doctor import examine
    from distflow.observe.report.metric_differences import compared_metrics

    facts_a = read_object(a.run_dir / "run.json", a.run_dir)
    facts_b = read_object(b.run_dir / "run.json", b.run_dir)

    same = []
    different = []
    for name in _FINGERPRINTS:
        fingerprint = facts_a.get(name)
        if fingerprint != facts_b.get(name):
            different.append(name)
        elif fingerprint is not None:
            same.append(name)

    rules_a = {found.rule for found in examine(a).problems()}
    rules_b = {found.rule for found in examine(b).problems()}

    return {
        "config": _config_changes(a.run_dir, b.run_dir),
        "same": same,
        "different": different,
        "first_difference": _first_difference(a, b),
        "metrics": compared_metrics(a.steps, b.steps),
        "findings": {"only_a": sorted(rules_a - rules_b), "only_b": sorted(rules_b - rules_a)},
    }


def _config_changes(a: Path, b: Path) -> list[dict[str, str]]:
    """The keys that differ, with the values of both sides."""
    first = flat_config(a)
    second = flat_config(b)

    changes = []
    for key in sorted({*first, *second}):
        change = {"key": key, "a": first.get(key, "missing"), "b": second.get(key, "missing")}
        if change["a"] != change["b"]:
            changes.append(change)

    return changes


def _first_difference(a: "RunRecords", b: "RunRecords") -> str:
    """The first sample with another prompt or response, by the first character that differs."""
    for step in sorted({*sample_steps(a.run_dir)} & {*sample_steps(b.run_dir)}):
        theirs = {row.get("uid"): row for row in b.samples(step)}
        for row in a.samples(step):
            other = theirs.get(row.get("uid"), row)
            for name in ("prompt", "response"):
                texts = [str(row.get(name)), str(other.get(name))]
                if texts[0] != texts[1]:
                    where = len(os.path.commonprefix(texts))
                    return (
                        f"step {step}: the {name}s of sample {row.get('uid')} differ from "
                        f"character {where}"
                    )

    return "none in the samples that both have"


def _diff_lines(a: "RunRecords", b: "RunRecords", content: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, run in (("A", a), ("B", b)):
        lines.append(f"{name} {run.run_dir}: {count_of(max(run.steps, default=0), 'step')}")
    lines += ["", f"config, different: {count_of(len(content['config']), 'key')}"]
    for c in content["config"]:
        lines.append(f"  {c['key']}: {c['a']} -> {c['b']}")
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
