"""What survived of a run's journal, read by nothing of the package: the audit that killed runs have
to pass."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import parquet

Place = tuple[int, int]
"""(epoch, row)"""


@dataclass(frozen=True)
class Survivors:
    """step: that trained each prompt. lengths: of the responses to each, by sample. dropped: why
    each was.
    ages: staleness of each trained prompt. attempts: how often each was begun."""

    step: dict[Place, int]
    lengths: dict[Place, list[int]]
    dropped: dict[Place, str]
    ages: dict[Place, int]
    attempts: dict[Place, int]


def records(folder: Path, until: int | None = None) -> list[dict[str, Any]]:
    """Those that no rollback took back. until: a byte offset, of a checkpoint's cut."""
    held: list[tuple[int, dict[str, Any]]] = []
    offset = 0
    for line in (folder / "ledger.jsonl").read_bytes()[:until].splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill
            record = None
        if record and record["kind"] == "rolled_back":
            held = [(position, kept) for position, kept in held if position < record["to"]]
        if record:
            held.append((offset, record))
        offset += len(line)
    return [record for _, record in held]


def audit(
    folder: Path, max_staleness: int, places: set[Place], before: Sequence[dict[str, Any]] = ()
) -> Survivors:
    """Every prompt of `places` was trained exactly once or dropped with a reason, none staler than
    `max_staleness` or what the plan in force allowed, versions never went backwards, and the
    samples say the same as the ledger.

    before: the records of the run in another folder that this one goes on from.
    """
    place: dict[int, Place] = {}
    version = dict[int, int]()
    done = dict[int, str]()
    step_of = dict[int, int]()
    ages = dict[int, int]()
    attempts = Counter[int]()
    restart = -1
    served = 0
    next_step = 0
    weights = 0
    bound = max_staleness
    first_step = sum(record["kind"] == "consumed" for record in before)
    for record in [*before, *records(folder)]:
        if record["restart"] != restart:
            assert record["restart"] > restart
            restart = record["restart"]
            served = 0
        kind = record["kind"]
        prompt_group = record.get("group_id")
        if kind == "plan":
            bound = min(record["max_staleness"], max_staleness)
        elif kind == "issued":
            where = (record["epoch"], record["row"])
            assert place.setdefault(prompt_group, where) == where, (
                f"group {prompt_group} changed its row"
            )
            assert prompt_group not in done and record["attempt"] >= attempts[prompt_group]
            assert served <= record["version"] <= next_step, (
                f"{record} after version {served}, step {next_step}"
            )
            served = record["version"]
            version[prompt_group] = record["version"]
            attempts[prompt_group] = record["attempt"] + 1
        elif kind == "complete":
            assert prompt_group not in done
            assert version[prompt_group] <= record["version"], "no token is older than its group"
            assert record["version"] <= next_step + 1, (
                "engines get a step's weights before it is released, none newer"
            )
            version[prompt_group] = record["version"]
        elif kind == "dropped":
            assert prompt_group not in done and record["reason"]
            done[prompt_group] = record["reason"]
        elif kind == "consumed":
            next_step += 1
            assert record["step"] == next_step
            for number in record["group_ids"]:
                assert number not in done, f"group {number} was trained after it was {done[number]}"
                done[number] = "trained"
                step_of[number] = record["step"]
                ages[number] = record["step"] - 1 - version[number]
                assert 0 <= ages[number] <= bound, f"group {number} was {ages[number]} steps stale"
        elif kind == "version":
            assert record["step"] == next_step and weights <= record["weights"] <= next_step
            weights = record["weights"]
    assert len(set(place.values())) == len(place), "a row went out as two groups"
    assert done.keys() == place.keys(), f"lost: {sorted(place.keys() - done.keys())}"
    assert set(place.values()) == places
    lengths = _lengths(
        folder, {n: step for n, step in step_of.items() if step > first_step}, max_staleness
    )
    return Survivors(
        {place[number]: step for number, step in step_of.items()},
        {place[number]: own for number, own in lengths.items()},
        {place[number]: reason for number, reason in done.items() if reason != "trained"},
        {place[number]: age for number, age in ages.items()},
        {place[number]: count for number, count in attempts.items()},
    )


def _lengths(folder: Path, step_of: dict[int, int], max_staleness: int) -> dict[int, list[int]]:
    """Of the samples that are kept of each step, which are those of the ledger, and no staler."""
    found: dict[int, list[int]] = {}
    for step in sorted(set(step_of.values())):
        for row in parquet.read_table(folder / "samples" / f"{step:06d}.parquet").to_pylist():
            number = int(row["uid"].split("-")[0])
            assert step_of[number] == step, (
                f"{row['uid']} was trained at step {step}, says the samples' file"
            )
            assert all(
                step - 1 - max_staleness <= made < step for made in json.loads(row["versions"])
            )
            found.setdefault(number, []).append(row["response_length"])
    assert found.keys() == step_of.keys()
    return found
