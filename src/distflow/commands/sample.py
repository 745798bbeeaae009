"""One sample of a run, with its group, scores and texts: `distflow why RUN --sample UID`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from distflow.commands.find_run import LEDGER
from distflow.commands.printing import as_json, print_escaped
from distflow.errors import UserError, count_of
from distflow.launch.run_folders.groups_of_step import ledger_groups
from distflow.observe.crash_safe_files import JSON
from distflow.observe.ledger_groups import GROUP_COLUMNS, Group
from distflow.observe.reward_remarks import remarks
from distflow.observe.run_reader import read_samples, read_timeline, sample_splits, sample_steps
from distflow.observe.sample_files import DROPPED


class FoundSample(NamedTuple):
    step: int
    split: str
    row: dict[str, JSON]

    group: Group | None
    """In the ledger, if it is there."""

    rows: list[dict[str, JSON]]
    """All samples of the group in this step."""


def find_sample(run_dir: Path, uid: str, step: int | None) -> FoundSample:
    """step: the only one to look at; None if it is not known. Raises UserError if there is no such
    sample."""
    name = uid.partition("-")[0]
    number = int(name) if name.isdecimal() and len(name) < 19 else -1
    group = ledger_groups(run_dir / LEDGER).get(number)
    timeline = read_timeline(run_dir)

    for split in (*sample_splits(run_dir), DROPPED):
        wanted = step
        if step is None and group is not None and split == "train":
            wanted = group.step
        steps = sorted(sample_steps(run_dir, split), reverse=True)
        if wanted is not None:
            steps = [each for each in steps if each == wanted]

        for found in steps:
            samples = read_samples(run_dir, found, split, timeline, None)
            rows = [row for row in samples if str(row.get("uid")).partition("-")[0] == name]
            for row in rows:
                if row.get("uid") == uid:
                    return FoundSample(found, split, row, group, rows)

    where = "" if step is None else f" in step {step}"
    raise UserError(
        f"{run_dir} has no sample {uid}{where}: `distflow why RUN STEP` lists groups, and samples/ "
        "has the files"
    )


def print_sample(run_dir: Path, uid: str, known_step: int | None, is_json: bool) -> None:
    found = find_sample(run_dir, uid, known_step)
    group = found.group

    if is_json:
        content: dict[str, Any] = {
            "run": str(run_dir),
            "step": found.step,
            "split": found.split,
            "sample": found.row,
            "group": None,
        }
        if group is not None:
            content["group"] = dict(zip(GROUP_COLUMNS, group.values(), strict=True))
        print(as_json(content))
        return

    lines = [f"sample {uid} of {run_dir}: step {found.step}, {found.split}"]
    if group is not None:
        reason = f" ({group.reason})" if group.reason else ""
        attempts = count_of(group.attempts, "attempt")
        row_of = f"row {group.row} of epoch {group.epoch}"
        lines.append(f"group     {row_of}, {attempts}, {group.state}{reason}")

    scores = ", ".join(str(each.get("score")) for each in found.rows)
    lines += _facts(found.row)
    lines.append(f"group has {count_of(len(found.rows), 'sample')}: scores {scores}")
    for title, text in _texts(found.row):
        lines += ["", title, *(f"  {line}" for line in text.splitlines())]
    print_escaped(lines)


def _facts(row: Mapping[str, JSON]) -> Iterator[str]:
    lengths = f"prompt {row.get('prompt_length')}, response {row.get('response_length')}"
    yield f"tokens    {lengths}, {row.get('finish_reason')}, versions {row.get('versions')}"
    parts = row.get("reward_parts") or ""
    changed = f", net reward {row['reward']}" if "reward" in row else ""
    yield f"score     {row.get('score')} {parts}{changed}, advantage {row.get('advantage')}"
    for part, said in remarks(row).items():
        yield f"reports   {part}: {said}"
    if row.get("errors"):
        yield f"errors    {row['errors']}"


def _texts(row: Mapping[str, JSON]) -> Iterator[tuple[str, str]]:
    """Each with a title: the turns of an episode, else its response, and what it answers."""
    listed = row.get("conversation")
    if isinstance(listed, list):
        turns = [turn for turn in listed if isinstance(turn, dict)]
    else:
        turns = []

    for turn in turns:
        drawn = "drawn" if turn.get("owner") == "policy" else "given"
        words = f"{turn.get('agent') or ''} {turn.get('owner')} {turn.get('fork') or ''} ({drawn})"
        yield words.strip(), str(turn.get("text"))

    for name in ("prompt", "response", "ground_truth"):
        if row.get(name) and not (turns and name == "response"):
            yield name, str(row[name])
