"""`distflow sql`: one SQL query over the folders of runs. `distflow show`: one sample.
`distflow diff`: two runs."""

import argparse
import csv
import glob
import io
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distflow.commands.arguments_and_run_folders import LEDGER, at_least, find_run
from distflow.errors import UserError, count_of
from distflow.launch.run_folders.groups_of_step import ledger_groups
from distflow.observe.crash_safe_files import JSON, encode, read_object, to_json
from distflow.observe.metrics import headline_names
from distflow.observe.report.metric_differences import LAST
from distflow.observe.run_reader import (
    GROUP_COLUMNS,
    PRESET,
    Group,
    config_sources,
    flat_config,
    in_short,
    read_samples,
    read_timeline,
    sample_splits,
    sample_steps,
)
from distflow.observe.sample_files import DROPPED
from distflow.observe.sanitized_output import escape_control
from distflow.untrusted_files import check_file

if TYPE_CHECKING:
    from distflow.launch.run_folders.sql_over_runs import Answer
    from distflow.observe.report.doctor_run_rules import RunRecords

_MAX_CELL = 60
_MAX_SHOWN = 40


def add_sql_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", nargs="+", metavar="RUN", help="one or several runs' folders")
    parser.add_argument(
        "query",
        metavar="SELECT",
        help='a statement, such as "select * from metrics limit 5", or a word',
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print a JSON list of objects, whole texts included"
    )
    form.add_argument("--csv", action="store_true", help="print CSV, whole texts included")
    parser.add_argument(
        "--rows",
        type=partial(at_least, 1, most=10**9),
        default=10_000,
        help="maximum number of rows",
    )
    parser.add_argument(
        "--seconds", type=partial(at_least, 1, most=10**6), default=5, help="time limit in seconds"
    )


def run_sql(arguments: argparse.Namespace) -> int:
    from distflow.launch.run_folders.sql_over_runs import query_runs

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
        print(
            f"only the first {count_of(arguments.rows, 'row')} of more: --rows raises this",
            file=sys.stderr,
        )
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
    kinds = [
        all(isinstance(row[i], int | float | None) for row in answer.rows)
        for i in range(len(answer.columns))
    ]
    lines = aligned(
        [[_cell(name) for name in answer.columns], *cells],
        {i for i, right in enumerate(kinds) if right},
    )
    left = len(answer.rows) - len(cells)
    return [*lines, *([f"and {left:,} more rows: --json or --csv prints all"] if left else [])]


def aligned(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """right: the columns of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in padded]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return (
        f"{value:.10g}"
        if isinstance(value, float)
        else escape_control(str(value), _MAX_CELL, one_line=True)
    )


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="the run's folder")
    parser.add_argument(
        "uid", metavar="UID", help="a sample's uid, such as 27570-2: group 27570, response 2"
    )
    parser.add_argument(
        "--step", type=partial(at_least, 0), help="default: the one that trained its group"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


class FoundSample(NamedTuple):
    """group: in the ledger, if it is there. rows: all samples of the group in this step."""

    step: int
    split: str
    row: dict[str, JSON]
    group: Group | None
    rows: list[dict[str, JSON]]


def find_sample(run_dir: Path, uid: str, step: int | None) -> FoundSample:
    """step: the only one to look at; None if it is not known. Raises UserError if there is no such
    sample."""
    name = uid.partition("-")[0]
    known = read_timeline(run_dir)
    group = ledger_groups(run_dir / LEDGER).get(
        int(name) if name.isdecimal() and len(name) < 19 else -1
    )
    for split in (*sample_splits(run_dir), DROPPED):
        steps = sorted(sample_steps(run_dir, split), reverse=True)
        wanted = step if step is not None else group.step if group and split == "train" else None
        for found in steps if wanted is None else [wanted] * (wanted in steps):
            all_rows = read_samples(run_dir, found, split, known, None)
            rows = [row for row in all_rows if str(row.get("uid")).partition("-")[0] == name]
            if (row := next((row for row in rows if row.get("uid") == uid), None)) is not None:
                return FoundSample(found, split, row, group, rows)
    where = "" if step is None else f" in step {step}"
    raise UserError(
        f"{run_dir} has no sample {uid}{where}: `distflow why RUN STEP` lists groups, and samples/ "
        "has the files"
    )


def run_show(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run_dir)
    step, split, row, group, rows = find_sample(run_dir, str(arguments.uid), arguments.step)
    if arguments.json:
        known = None if group is None else dict(zip(GROUP_COLUMNS, group.values(), strict=True))
        print(
            as_json(
                {"run": str(run_dir), "step": step, "split": split, "sample": row, "group": known}
            )
        )
        return 0
    lines = [
        f"sample {arguments.uid} of {run_dir}: step {step}, {split}",
        *_facts_of(row, group, rows),
    ]
    for name in ("prompt", "response", "ground_truth"):
        lines += ["", name, *(f"  {line}" for line in str(row.get(name, "")).splitlines())]
    print("\n".join(escape_control(line, one_line=True) for line in lines))
    return 0


def _facts_of(
    row: Mapping[str, JSON], group: Group | None, rows: Sequence[Mapping[str, JSON]]
) -> list[str]:
    versions = (
        [v for v in found if isinstance(v, int)]
        if isinstance(found := row.get("versions"), list)
        else []
    )
    lines = []
    if group is not None:
        started = (
            ""
            if group.started is None
            else time.strftime(", started %H:%M:%S", time.localtime(group.started))
        )
        tried = f", {count_of(len(group.attempts), 'attempt')}" if len(group.attempts) > 1 else ""
        reason = f" ({group.reason})" if group.reason else ""
        lines.append(
            f"group     row {group.row} of epoch {group.epoch}{started}{tried}, "
            f"{group.state}{reason}"
        )
    lengths = (
        f"prompt {row.get('prompt_length')}, response {row.get('response_length')}, "
        f"{row.get('finish_reason')}"
    )
    span = f", versions {min(versions)} to {max(versions)}" if versions else ""
    lines.append(f"tokens    {lengths}{span}")
    parts = row.get("reward_parts")
    each = (
        ", ".join(f"{name} {value}" for name, value in parts.items())
        if isinstance(parts, Mapping)
        else ""
    )
    lines.append(
        f"score     {row.get('score')}{f' ({each})' if each else ''}, advantage "
        f"{row.get('advantage')}"
    )
    lines.append(
        f"group has {count_of(len(rows), 'sample')}: scores "
        f"{', '.join(str(r.get('score')) for r in rows)}"
    )
    if remark := in_short(row):
        lines.append(f"reports   {remark}")
    return lines


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
    from distflow.observe.report.doctor_run_rules import RunRecords

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
    from distflow.observe.report.doctor import examine
    from distflow.observe.report.metric_differences import compared_metrics

    facts = [
        [read_object(run.run_dir / "run.json", run.run_dir) for run in side] for side in (a, b)
    ]
    own = {
        name: [{encode(each.get(name)) for each in side} for side in facts]
        for name in _FINGERPRINTS
    }
    same = [
        name
        for name, sides in own.items()
        if len({*sides[0], *sides[1]} - {b"null"}) == 1 and sides[0] == sides[1]
    ]
    rules = [{found.rule for run in side for found in examine(run).problems()} for side in (a, b)]
    return {
        "num_runs": [len(a), len(b)],
        "config": _config_changes([run.run_dir for run in a], [run.run_dir for run in b], facts),
        "same": same,
        "different": [name for name, (first, second) in own.items() if first != second],
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
        keys = {key for each in values for key in each}
        sides.append(
            {
                key: (
                    " | ".join(sorted({each.get(key, "missing") for each in values})),
                    " | ".join(sorted({each.get(key, PRESET) for each in sources})),
                )
                for key in keys
            }
        )
    missing = ("missing", PRESET)
    pairs = {
        key: [side.get(key, missing) for side in sides] for key in sorted({*sides[0], *sides[1]})
    }
    return [
        {"key": key, "a": first, "b": second, "a_source": of_first, "b_source": of_second}
        for key, ((first, of_first), (second, of_second)) in pairs.items()
        if first != second
    ]


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
    from distflow.launch.run_folders.sql_over_runs import saved_tokens

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
    lines = [
        f"{name} {run.run_dir}: {count_of(max(run.steps, default=0), 'step')}"
        for name, side in (("A", a), ("B", b))
        for run in side
    ]
    lines += ["", f"config, different: {count_of(len(content['config']), 'key')}"]
    lines += [
        f"  {c['key']}: {c['a']} ({c['a_source']}) -> {c['b']} ({c['b_source']})"
        for c in content["config"]
    ]
    for word in ("same", "different"):
        lines.append(f"{word}: {', '.join(content[word]) or 'nothing known'}")
    lines += [f"first difference: {content['first_difference']}", ""]
    shown = headline_names()
    is_pair = content["num_runs"] == [1, 1]
    words = {True: "yes, in this pair" if is_pair else "yes", False: "no", None: "too few steps"}
    rows = [["metric", "A", "B", "B - A", "95 % interval", "can one tell?"]]
    for found in (found for found in content["metrics"] if found["metric"] in shown):
        interval = "" if found["low"] is None else f"{found['low']:+.4g} .. {found['high']:+.4g}"
        numbers = [f"{found[name]:.4g}" for name in ("a", "b")]
        rows.append(
            [
                found["metric"],
                *numbers,
                f"{found['difference']:+.4g}",
                interval,
                words[found["differs"]],
            ]
        )
    lines += aligned(rows, set(range(1, 5)))
    how = (
        f"One run each, their last {LAST} common values: by block bootstrap. Other seeds may "
        "differ by more."
    )
    if not is_pair:
        numbers = [count_of(number, "run") for number in content["num_runs"]]
        how = (
            f"{numbers[0]} of A, {numbers[1]} of B: by the spread of their means over the last "
            f"{LAST} common values."
        )
    lines.append(how)
    for name, key in (("A", "only_a"), ("B", "only_b")):
        lines.append(f"findings only in {name}: {', '.join(content['findings'][key]) or 'none'}")
    return lines
