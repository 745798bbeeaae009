"""`distflow why`: the groups of a step, how each was generated, and the groups dropped since the
previous step, from the ledger and the samples; or one sample."""

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distflow.commands.arguments import add_run_argument, at_least
from distflow.commands.find_run import LEDGER, find_run
from distflow.commands.printing import aligned, as_json
from distflow.commands.sample import print_sample
from distflow.errors import UserError, count_of
from distflow.launch.run_folders.groups_of_step import StepLineage, step_lineage
from distflow.observe.crash_safe_files import to_number
from distflow.observe.ledger_groups import Group
from distflow.observe.sanitized_output import escape_control

if TYPE_CHECKING:
    from distflow.observe.crash_safe_files import JSON

    Responses = Sequence[Mapping[str, JSON]]

MAX_TEXT = 80
_MAX_SAMPLE_BYTES = 64 * 2**20
_short = partial(escape_control, limit=MAX_TEXT, one_line=True)


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument(
        "step", nargs="?", metavar="STEP", help="number of the step, counted from 1"
    )
    parser.add_argument(
        "--sample",
        metavar="UID",
        help="show one sample instead, such as 27570-2: group 27570, response 2; that of STEP, "
        "if one is named",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


class StepContent(NamedTuple):
    """What a step was made of."""

    lineage: StepLineage

    responses: Mapping[int, "Responses"]
    """By group id."""

    waits: list[dict[str, Any]]
    """Seconds by who waits for whom."""

    head: list[str]
    """Sentences."""

    slowest: str
    """The uid of the longest response of the group that was done last."""

    damage: list[str]
    """Of the samples' files."""

    def groups(self) -> list[dict[str, str]]:
        """A row of a table for each."""
        rows = []
        for group in self.lineage.groups:
            own = self.responses.get(group.group_id, ())
            rows.append(_group_row(group, self.lineage, own))
        return rows

    def dropped(self) -> tuple[str, list[dict[str, str]]]:
        """The title and the rows of a table."""
        reasons = Counter(_short(group.reason or "") for group in self.lineage.dropped)
        counts = [f"{count} {reason}" for reason, count in reasons.most_common()]
        rows = [_group_row(group, self.lineage, ()) for group in self.lineage.dropped]
        return f"dropped meanwhile: {', '.join(counts) or 'none'}", rows


def step_content(run_dir: Path, step: int) -> StepContent:
    """Raises UserError if the ledger has no such step."""
    from distflow.observe.report.activity import read_activity
    from distflow.observe.report.step_times import step_times, times_lines
    from distflow.observe.run_reader import MAX_BYTES, read_metrics, read_samples
    from distflow.observe.sample_files import SAMPLES, sample_file_name

    lineage = step_lineage(run_dir / LEDGER, step)
    damage: list[str] = []
    responses = _by_group(read_samples(run_dir, step, max_bytes=_MAX_SAMPLE_BYTES, damage=damage))
    last, slowest = _last_done(lineage, responses)

    head = [*_head(lineage, run_dir), *last]
    waits = []
    try:
        times = step_times(read_activity(run_dir, MAX_BYTES), read_metrics(run_dir))
        for (who, waits_for), seconds in times.waits([step]).items():
            waits.append({"who": who, "waits_for": waits_for, "seconds": seconds})
        head += [escape_control(line, one_line=True) for line in times_lines(times, step)]
    except UserError as error:
        damage.append(f"where its time went is unknown: {error}")

    if lineage.consumed_at is not None and not responses:
        name = f"{SAMPLES}/{sample_file_name(step, 'train')}"
        head.append(f"scores are missing: {name} is missing, empty or rolled back")

    head += [_short(each, limit=400) for each in damage]
    return StepContent(lineage, responses, waits, head, slowest, damage)


def step_page(run_dir: Path, step: int) -> dict[str, Any]:
    """The same for a page, of which nothing but a sentence is there if the ledger has no such
    step."""
    try:
        found = step_content(run_dir, step)
    except UserError as error:
        head = [str(error)]
        return {"head": head, "slowest": "", "groups": [], "dropped_note": "", "dropped": []}

    note, dropped = found.dropped()
    return {
        "head": found.head,
        "slowest": found.slowest,
        "groups": found.groups(),
        "dropped_note": note,
        "dropped": dropped,
    }


def _run_and_step(arguments: argparse.Namespace) -> tuple[str | None, int | None]:
    """One word alone is the step, unless a sample is asked for, which needs none."""
    run_dir = arguments.run_dir
    word = arguments.step
    if word is None:
        if arguments.sample is not None:
            return run_dir, None
        if run_dir is None:
            raise UserError("name a step, counted from 1, or a sample: `distflow why RUN STEP`")
        word = run_dir
        run_dir = None

    if run_dir is None and Path(word).is_dir():
        raise UserError(f"name a step of {word}, counted from 1: `distflow why RUN STEP`")

    try:
        return run_dir, at_least(0 if arguments.sample else 1, word)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"STEP {error}") from None


def run_why(arguments: argparse.Namespace) -> int:
    name, step = _run_and_step(arguments)
    run_dir = find_run(name)
    if arguments.sample is not None:
        print_sample(run_dir, arguments.sample, step, arguments.json)
        return 0

    assert step is not None
    content = step_content(run_dir, step)
    lineage = content.lineage

    if arguments.json:
        found: dict[str, Any] = {"step": lineage.step}
        for kind, groups in (("groups", lineage.groups), ("dropped", lineage.dropped)):
            found[kind] = [_json_row(group, content.responses) for group in groups]
        print(as_json({**found, "waits": content.waits, "damage": content.damage}))
        return 0

    lines = [*content.head, *_table("groups", content.groups()), *_table(*content.dropped())]
    if lineage.aborted:
        group_ids = ", ".join(map(str, lineage.aborted))
        lines += ["", f"aborted when the step was full, and generated later: groups {group_ids}"]

    print("\n".join(lines))
    return 0


def _head(lineage: StepLineage, run_dir: Path) -> list[str]:
    name = f"step {lineage.step} of {escape_control(str(run_dir), one_line=True)}"
    if lineage.consumed_at is None:
        counts = Counter(group.state for group in lineage.groups)
        states = ", ".join(f"{count} {state}" for state, count in counts.most_common()) or "none"
        return [f"{name} is not finished; states of its groups at the end of the ledger: {states}"]

    tokens = sum(group.tokens or 0 for group in lineage.groups)
    bound = ""
    if lineage.max_staleness is not None:
        bound = f", staleness at most {lineage.max_staleness}"

    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lineage.consumed_at))
    made = f"it made version {lineage.step} of the weights"
    if lineage.weights is None:
        made = f"the ledger ends before its version {lineage.step}"
    elif lineage.weights != lineage.step:
        made = f"no weights were sent, the engines kept those of step {lineage.weights}"

    return [
        f"{name}: {count_of(len(lineage.groups), 'group')}, {tokens:,} tokens{bound}",
        f"consumed {when} by restart {lineage.restart}; {made}",
    ]


def _last_done(lineage: StepLineage, responses: Mapping[int, "Responses"]) -> tuple[list[str], str]:
    """A sentence on the group for which the step waited, and the uid of its longest response."""
    timed = [group for group in lineage.groups if group.completed and group.started]
    if len(timed) < 2:
        return [], ""

    last = max(timed, key=lambda group: group.completed or 0.0)
    took = (last.completed or 0.0) - (last.started or 0.0)
    said = f"the last group to be done was {last.group_id}, {took:.3g} s after its start"
    lengths: dict[str, float] = {}
    for response in responses.get(last.group_id, ()):
        lengths[str(response.get("uid"))] = to_number(response.get("response_length")) or 0.0
    if not lengths:
        return [said], ""

    longest = max(lengths, key=lengths.__getitem__)
    tokens = ""
    if lengths[longest]:
        tokens = f" of {lengths[longest]:,.0f} tokens"

    return [f"{said}; its longest response is {_short(longest)}{tokens}"], longest


def _group_row(group: Group, lineage: StepLineage, own: "Responses") -> dict[str, str]:
    """own: its responses. The row is unknown if it began in another run's folder."""
    scored = [response for response in own if not response.get("errors")]
    is_dropped = group.state == "dropped"
    version = group.engine_version if is_dropped else group.version

    stale = None
    if version is not None and lineage.consumed_at is not None and not is_dropped:
        stale = lineage.step - 1 - version

    shown = {
        "group": group.group_id,
        "domain": _short(group.domain or ""),
        "epoch": "?" if group.epoch is None else group.epoch,
        "row": "?" if group.row is None else group.row,
        "state": "" if group.state in ("trained", "dropped") else group.state,
        "version": version,
        "stale": stale,
        "worker": _short(group.worker or ""),
        "attempts": group.attempts if group.attempts > 1 else "",
        "tokens": "" if group.tokens is None or is_dropped else f"{group.tokens:,}",
        "samples": len(own) or "",
        "reward errors": len(own) - len(scored) or "",
        "score": _mean(response.get("score") for response in scored),
        "reason": _short(group.reason or ""),
    }

    return {name: "" if value is None else str(value) for name, value in shown.items()}


def _json_row(group: Group, responses: Mapping[int, "Responses"]) -> dict[str, object]:
    fields = ("group_id", "state", "domain", "epoch", "row", "version", "tokens", "reason")
    row: dict[str, object] = {name: getattr(group, name) for name in fields}
    responses_of_group = responses.get(group.group_id, ())
    row["scores"] = [to_number(response.get("score")) for response in responses_of_group]
    return row


def _mean(values: Iterable[object]) -> str:
    numbers = []
    for value in values:
        number = to_number(value)
        if number is not None:
            numbers.append(number)
    return f"{sum(numbers) / len(numbers):.3f}" if numbers else ""


def _by_group(rows: "Responses") -> dict[int, list[Mapping[str, "JSON"]]]:
    """Responses by group id: a sample's uid is GROUP-NUMBER."""
    responses: dict[int, list[Mapping[str, JSON]]] = {}
    for row in rows:
        group_id = str(row.get("uid", "")).partition("-")[0]
        if group_id.isdecimal() and len(group_id) < 19:
            responses.setdefault(int(group_id), []).append(row)
    return responses


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A table without columns that are empty in every row. Numbers are right-aligned; the last
    column, a text, is left-aligned. Only the title if there are no rows."""
    if not rows:
        return ["", title]

    names = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = [names]
    for row in rows:
        cells.append([row[name] for name in names])

    lines = aligned(cells, set(range(len(names) - 1)))
    return ["", title, *(f"  {line}" for line in lines)]
