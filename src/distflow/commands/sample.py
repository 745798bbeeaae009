"""One sample of a run, with its group, scores and texts: `distflow why RUN --sample UID`."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from distflow.commands.find_run import LEDGER
from distflow.commands.printing import as_json
from distflow.errors import UserError, count_of
from distflow.launch.run_folders.groups_of_step import ledger_groups
from distflow.observe.crash_safe_files import JSON
from distflow.observe.ledger_groups import GROUP_COLUMNS, Group
from distflow.observe.reward_remarks import remarks
from distflow.observe.run_reader import read_samples, read_timeline, sample_splits, sample_steps
from distflow.observe.sample_files import DROPPED
from distflow.observe.sanitized_output import escape_control


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


def print_sample(run_dir: Path, uid: str, known_step: int | None, is_json: bool) -> None:
    step, split, row, group, rows = find_sample(run_dir, uid, known_step)
    if is_json:
        known = None if group is None else dict(zip(GROUP_COLUMNS, group.values(), strict=True))
        print(
            as_json(
                {"run": str(run_dir), "step": step, "split": split, "sample": row, "group": known}
            )
        )
        return
    lines = [f"sample {uid} of {run_dir}: step {step}, {split}"]
    if group is not None:
        reason = f" ({group.reason})" if group.reason else ""
        attempts = count_of(group.attempts, "attempt")
        row_of = f"row {group.row} of epoch {group.epoch}"
        lines.append(f"group     {row_of}, {attempts}, {group.state}{reason}")
    lengths = f"prompt {row.get('prompt_length')}, response {row.get('response_length')}"
    versions = f"versions {row.get('versions')}"
    lines.append(f"tokens    {lengths}, {row.get('finish_reason')}, {versions}")
    parts = row.get("reward_parts") or ""
    lines.append(f"score     {row.get('score')} {parts}, advantage {row.get('advantage')}")
    scores = ", ".join(str(each.get("score")) for each in rows)
    lines.append(f"group has {count_of(len(rows), 'sample')}: scores {scores}")
    for part, said in remarks(row).items():
        lines.append(f"reports   {part}: {said}")
    if errors := row.get("errors"):
        lines.append(f"errors    {errors}")
    texts = {name: row.get(name, "") for name in ("prompt", "response", "ground_truth")}
    turns = row.get("conversation")
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, Mapping):
            drawn = "drawn" if turn.get("owner") == "policy" else "given"
            fork = turn.get("fork") or ""
            lines += ["", f"{turn.get('agent') or ''} {turn.get('owner')} {fork} ({drawn})".strip()]
            lines += [f"  {line}" for line in str(turn.get("text")).splitlines()]
            texts["response"] = ""
    for name, text in texts.items():
        if text:
            lines += ["", name, *(f"  {line}" for line in str(text).splitlines())]
    print("\n".join(escape_control(line, one_line=True) for line in lines))
