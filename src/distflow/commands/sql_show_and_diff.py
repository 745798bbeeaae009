"""`distflow sql`: one SQL query over the folders of runs. `distflow show`: one sample. `distflow diff`: two runs.
`distflow watch`: a run as its terminal shows it."""

import argparse
import csv
import io
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distflow.commands.arguments_and_run_folders import LEDGER, add_run_argument, at_least, find_run
from distflow.errors import UserError, count_of
from distflow.observe.crash_safe_files import JSON, read_object, to_json
from distflow.observe.metrics import headline_names
from distflow.observe.report.summary_sentences import PROBLEM_KINDS, status
from distflow.observe.run_reader import (
    PRESET,
    Group,
    config_sources,
    flat_config,
    fold_groups,
    in_short,
    read_events,
    read_metrics,
    read_samples,
    read_timeline,
    sample_splits,
    sample_steps,
)
from distflow.observe.sample_files import DROPPED
from distflow.observe.sanitized_output import escape_control
from distflow.untrusted_files import check_file

if TYPE_CHECKING:
    from distflow.commands.run_sql import Answer
    from distflow.observe.report.run_rules import RunRecords

_MAX_CELL, _MAX_SHOWN = 60, 40


def add_sql_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", nargs="+", metavar="RUN", help="the folders of runs")
    parser.add_argument("query", metavar="SELECT", help='one statement, such as "select * from metrics limit 5"')
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list of objects, whole texts included")
    form.add_argument("--csv", action="store_true", help="print CSV, whole texts included")
    parser.add_argument("--rows", type=lambda text: at_least(1, text), default=10_000, help="limit of rows (10000)")
    parser.add_argument("--seconds", type=lambda text: at_least(1, text), default=5, help="time limit (5)")


def run_sql(arguments: argparse.Namespace) -> int:
    from distflow.commands.run_sql import query_runs

    runs = [find_run(run_dir) for run_dir in arguments.run_dirs]
    answer = query_runs(runs, arguments.query, arguments.rows, arguments.seconds)
    if arguments.json:
        print(as_json(answer.records()))
    elif arguments.csv:
        print(_as_csv(answer), end="")
    else:
        print("\n".join(_as_table(answer)))
    for said in answer.damage:
        print(escape_control(said, one_line=True), file=sys.stderr)
    if answer.is_cut:
        print(f"only the first {count_of(arguments.rows, 'row')} of more: --rows raises this", file=sys.stderr)
    return 0


def as_json(value: object) -> str:
    """JSON in ASCII, which no terminal obeys. NaN and infinities are texts, as in a run's files."""
    return json.dumps(to_json(value), indent=1)


def _as_csv(answer: "Answer") -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([answer.columns, *answer.rows])
    return text.getvalue()


def _as_table(answer: "Answer") -> list[str]:
    """The first rows, with long texts cut."""
    cells = [[_cell(value) for value in row] for row in answer.rows[:_MAX_SHOWN]]
    kinds = [all(isinstance(row[i], int | float | None) for row in answer.rows) for i in range(len(answer.columns))]
    lines = _aligned([[_cell(name) for name in answer.columns], *cells], {i for i, right in enumerate(kinds) if right})
    left = len(answer.rows) - len(cells)
    return [*lines, *([f"and {left:,} more rows: --json or --csv prints all"] if left else [])]


def _aligned(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """right: the columns of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)] for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in padded]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else escape_control(str(value), _MAX_CELL, one_line=True)


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="the run's folder")
    parser.add_argument("uid", metavar="UID", help="of a sample, such as 27570-2: group 27570, response 2")
    parser.add_argument("--step", type=lambda text: at_least(0, text), help="default: the one that trained the group")
    parser.add_argument("--json", action="store_true", help="print JSON")


class FoundSample(NamedTuple):
    """group: in the ledger, if it is there. rows: all samples of the group in this step."""

    step: int
    split: str
    row: dict[str, JSON]
    group: Group | None
    rows: list[dict[str, JSON]]


def find_sample(run_dir: Path, uid: str, step: int | None) -> FoundSample:
    """step: None if it is not known. Raises UserError if there is no such sample."""
    group = _ledger_groups(run_dir).get(uid.partition("-")[0])
    steps = [step] if step is not None else [group.step] if group and group.step else None
    found, split, rows = _find_samples(run_dir, uid, steps)
    return FoundSample(found, split, next(row for row in rows if row.get("uid") == uid), group, rows)


def run_show(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run_dir)
    step, split, row, group, rows = find_sample(run_dir, str(arguments.uid), arguments.step)
    if arguments.json:
        known = None if group is None else group._asdict()
        print(as_json({"run": str(run_dir), "step": step, "split": split, "sample": row, "group": known}))
        return 0
    lines = [f"sample {arguments.uid} of {run_dir}: step {step}, {split}", *_facts_of(row, group, rows)]
    for name in ("prompt", "response", "ground_truth"):
        lines += ["", name, *(f"  {line}" for line in str(row.get(name, "")).splitlines())]
    print("\n".join(escape_control(line, one_line=True) for line in lines))
    return 0


def _ledger_groups(run_dir: Path) -> dict[str, Group]:
    from distflow.scheduling.ledger import timeline

    path = run_dir / LEDGER
    records = (record for _, record in timeline(path)) if path.is_file() else ()
    return {str(group.group_id): group for group in fold_groups(records)}


def _find_samples(run_dir: Path, uid: str, steps: list[int] | None) -> tuple[int, str, list[dict[str, JSON]]]:
    """The step and split of a sample, and the samples of its group there. Raises UserError if there is none."""
    known = read_timeline(run_dir)
    for split in (*sample_splits(run_dir), DROPPED):
        for step in reversed(sample_steps(run_dir, split)) if steps is None or split != "train" else steps:
            rows = read_samples(run_dir, step, split, known, None)
            if any(row.get("uid") == uid for row in rows):
                return step, split, [row for row in rows if _group_of(row) == uid.partition("-")[0]]
    raise UserError(f"{run_dir} has no sample {uid}: `distflow why RUN STEP` lists groups, and samples/ has the files")


def _group_of(row: Mapping[str, JSON]) -> str:
    return str(row.get("uid")).partition("-")[0]


def _facts_of(row: Mapping[str, JSON], group: Group | None, rows: Sequence[Mapping[str, JSON]]) -> list[str]:
    versions = [v for v in found if isinstance(v, int)] if isinstance(found := row.get("versions"), list) else []
    lines = []
    if group is not None:
        started = "" if group.started is None else time.strftime(", started %H:%M:%S", time.localtime(group.started))
        tried = f", {count_of(group.attempts, 'attempt')}" if group.attempts > 1 else ""
        reason = f" ({group.reason})" if group.reason else ""
        lines.append(f"group     row {group.row} of epoch {group.epoch}{started}{tried}, {group.state}{reason}")
    lengths = f"prompt {row.get('prompt_length')}, response {row.get('response_length')}, {row.get('finish_reason')}"
    span = f", versions {min(versions)} to {max(versions)}" if versions else ""
    lines.append(f"tokens    {lengths}{span}")
    parts = row.get("reward_parts")
    each = ", ".join(f"{name} {value}" for name, value in parts.items()) if isinstance(parts, Mapping) else ""
    lines.append(f"score     {row.get('score')}{f' ({each})' if each else ''}, advantage {row.get('advantage')}")
    lines.append(f"group has {count_of(len(rows), 'sample')}: scores {', '.join(str(r.get('score')) for r in rows)}")
    if remark := in_short(row):
        lines.append(f"reports   {remark}")
    return lines


_WATCH_EVERY_S = 2.0
_LAST, _DRAWS, _BLOCKS = 50, 1000, 4
_WIDTH = 2.447 * math.sqrt(_BLOCKS / (_BLOCKS - 1))
"""Standard errors of half an interval of 95 %: t of 4 blocks on each side, which estimate the spread themselves."""
_FINGERPRINTS = ("data_fingerprint", "tokenizer_fingerprint", "model_fingerprint", "distflow", "torch", "device")


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="the folder of a run")
    parser.add_argument("second", metavar="B", help="the folder of another")
    parser.add_argument("--json", action="store_true", help="print JSON, with all metrics")


def run_diff(arguments: argparse.Namespace) -> int:
    from distflow.observe.report.doctor import records_of

    a, b = (records_of(find_run(name)) for name in (arguments.first, arguments.second))
    content = differences(a, b)
    if arguments.json:
        print(as_json(content))
    else:
        print("\n".join(escape_control(line, one_line=True) for line in _diff_lines(a, b, content)))
    return 0


def differences(a: "RunRecords", b: "RunRecords") -> dict[str, Any]:
    """What differs between two runs, as JSON data."""
    from distflow.observe.report.doctor import examine

    facts = [read_object(run.run_dir / "run.json", run.run_dir) for run in (a, b)]
    same = [name for name in _FINGERPRINTS if name in facts[0] and facts[0][name] == facts[1].get(name)]
    rules = [{found.rule for found in examine(run).problems()} for run in (a, b)]
    return {
        "config": _config_changes(a.run_dir, b.run_dir, facts),
        "same": same,
        "different": [name for name in _FINGERPRINTS if name not in same and any(name in each for each in facts)],
        "first_difference": _first_difference(a, b),
        "metrics": compared_metrics(a, b),
        "findings": {"only_a": sorted(rules[0] - rules[1]), "only_b": sorted(rules[1] - rules[0])},
    }


def _config_changes(a: Path, b: Path, facts: Sequence[Mapping[str, JSON]]) -> list[dict[str, str]]:
    """The keys that differ, with both values and where each was set."""
    first, second = flat_config(a), flat_config(b)
    origins = [config_sources(each) for each in facts]
    return [
        {
            "key": key,
            "a": first.get(key, "missing"),
            "b": second.get(key, "missing"),
            "a_source": origins[0].get(key, PRESET),
            "b_source": origins[1].get(key, PRESET),
        }
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key)
    ]


def _first_difference(a: "RunRecords", b: "RunRecords") -> str:
    """The first group with another row, else the first sample with another response, else the first tensor."""
    groups = [_ledger_groups(run.run_dir) for run in (a, b)]
    for group_id in sorted({*groups[0]} & {*groups[1]}, key=int):
        first, second = (each[group_id] for each in groups)
        if (first.epoch, first.row) != (second.epoch, second.row):
            return f"group {group_id} holds row {first.row} in A, {second.row} in B"
    for step in sorted({*sample_steps(a.run_dir)} & {*sample_steps(b.run_dir)}):
        rows = [
            {str(row.get("uid")): row for row in read_samples(r.run_dir, step, "train", r.timeline)} for r in (a, b)
        ]
        for uid in (uid for uid in rows[0] if uid in rows[1]):
            texts = [str(each[uid].get("response")) for each in rows]
            if texts[0] != texts[1]:
                where = len(os.path.commonprefix(texts))
                return (
                    f"step {step}: the responses of sample {uid} differ from character {where}{_token(a, b, step, uid)}"
                )
    return _first_tensor(a.run_dir, b.run_dir) or "none in the groups, responses and checkpoints that both have"


def _token(a: "RunRecords", b: "RunRecords", step: int, uid: str) -> str:
    """The first token that differs, with its log-probs, if both runs saved the step's tokens."""
    from distflow.commands.run_sql import saved_tokens

    first, second = ([row for row in saved_tokens(run.run_dir, step) if row[1] == uid] for run in (a, b))
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
                for key in (key for key in first.keys() if key in shared):  # noqa: SIM118  no mapping
                    if not first.get_tensor(key).equal(second.get_tensor(key)):
                        return f"{name}: the tensor {key} differs"
        except (OSError, SafetensorError) as error:
            return f"unknown: the weights of {name} cannot be compared: {getattr(error, 'strerror', None) or error}"
    return ""


def compared_metrics(a: "RunRecords", b: "RunRecords") -> list[dict[str, Any]]:
    """The metrics that both have, over their last common steps."""
    steps = sorted({*a.steps} & {*b.steps})
    return [
        {"metric": name, **found}
        for name in sorted(a.metrics & b.metrics)
        if (found := _difference(*([run.steps[s][name] for s in steps if name in run.steps[s]] for run in (a, b))))
    ]


def _difference(first: Sequence[float], second: Sequence[float]) -> dict[str, Any] | None:
    """The means of the last values, and whether noise explains their difference: by drawing blocks, each a quarter of
    the values, since neighbours are correlated."""
    import numpy as np

    a, b = (np.array([v for v in values if math.isfinite(v)][-_LAST:]) for values in (first, second))
    if not len(a) or not len(b):
        return None
    moved = float(b.mean() - a.mean())
    found = {"a": float(a.mean()), "b": float(b.mean()), "difference": moved, "values": min(len(a), len(b))}
    if found["values"] < 3 * _BLOCKS:
        return {**found, "low": None, "high": None, "differs": None}
    means, draw = [], np.random.default_rng(0)
    for values in (a, b):
        block = -(-len(values) // _BLOCKS)
        starts = draw.integers(0, len(values), (_DRAWS, _BLOCKS, 1))
        means.append(values[(starts + np.arange(block)) % len(values)].mean((1, 2)))
    half = _WIDTH * float((means[1] - means[0]).std())
    return {**found, "low": moved - half, "high": moved + half, "differs": abs(moved) > half}


def _diff_lines(a: "RunRecords", b: "RunRecords", content: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{name} {run.run_dir}: {count_of(max(run.steps, default=0), 'step')}" for name, run in (("A", a), ("B", b))
    ]
    lines += ["", f"config, different: {count_of(len(content['config']), 'key')}"]
    lines += [f"  {c['key']}: {c['a']} ({c['a_source']}) -> {c['b']} ({c['b_source']})" for c in content["config"]]
    for word in ("same", "different"):
        lines.append(f"{word}: {', '.join(content[word]) or 'nothing known'}")
    lines += [f"first difference: {content['first_difference']}", ""]
    shown = headline_names()
    words = {True: "yes, in this pair", False: "no", None: "too few steps"}
    rows = [["metric", "A", "B", "B - A", "95 % interval", "can one tell?"]]
    for found in (found for found in content["metrics"] if found["metric"] in shown):
        interval = "" if found["low"] is None else f"{found['low']:+.4g} .. {found['high']:+.4g}"
        numbers = [f"{found[name]:.4g}" for name in ("a", "b")]
        rows.append([found["metric"], *numbers, f"{found['difference']:+.4g}", interval, words[found["differs"]]])
    lines += _aligned(rows, set(range(1, 5)))
    lines.append(f"One run each, their last {_LAST} common values: by block bootstrap. Other seeds may differ by more.")
    for name, key in (("A", "only_a"), ("B", "only_b")):
        lines.append(f"findings only in {name}: {', '.join(content['findings'][key]) or 'none'}")
    return lines


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--once", action="store_true", help="show the run as it is now, and end")


def run_watch(arguments: argparse.Namespace) -> int:
    """Show a run that another process writes, until its end."""
    from distflow.observe.writing.terminal_view import TerminalView

    run_dir = find_run(arguments.run_dir)
    run, num_events = read_object(run_dir / "run.json", run_dir), 0
    total, title = run.get("total_steps"), str(run.get("experiment") or run_dir)
    records, shown = read_metrics(run_dir), set[tuple[int, str]]()
    now = [records[0].t if records else time.time()]  # of the record that is shown; what comes later happens now
    ranks = read_object(run_dir / "plan.json", run_dir).get("ranks")
    generates = not isinstance(ranks, list) or '"rollout"' in json.dumps(ranks)
    num_steps = total if isinstance(total, int) else 0
    view = TerminalView(title, num_steps, clock=lambda: now[0] or time.time(), generates=generates)
    try:
        while True:
            for record in (record for record in records if (record.step, record.kind) not in shown):
                now[0] = record.t if now[0] else 0.0
                shown.add((record.step, record.kind))
                view.log(record.step, record.values)
            events = read_events(run_dir)
            for event in events[num_events:]:
                if event.kind in PROBLEM_KINDS and not event.rolled_back:
                    view.note(event.kind, event.message)
            if arguments.once or status(events)["word"] != "no end yet":
                return 0
            num_events, now[0] = len(events), 0.0
            time.sleep(_WATCH_EVERY_S)
            records = read_metrics(run_dir)
    finally:
        view.close()
