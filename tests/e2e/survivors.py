"""What survived of a run's journal: the audit that killed runs have to pass."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import parquet

from tests.ledger_audit import verify

Place = tuple[int, int]
"""(epoch, row)"""


@dataclass(frozen=True)
class Survivors:
    """Each prompt that survived, by its place."""

    step: dict[Place, int]
    """That trained it."""
    lengths: dict[Place, list[int]]
    """Of the responses to it, by sample."""
    dropped: dict[Place, str]
    """Why it was dropped."""
    ages: dict[Place, int]
    """Its staleness where it was trained."""


def records(folder: Path) -> list[dict[str, Any]]:
    """Those that no rollback took back."""
    held: list[tuple[int, dict[str, Any]]] = []
    offset = 0
    for line in (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True):
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


def audit(folder: Path, max_staleness: int, places: set[Place]) -> Survivors:
    """Every prompt of `places` was trained exactly once or dropped with a reason, none staler than
    `max_staleness`, and the samples say the same as the ledger, whose moves are possible ones."""
    verify(folder / "ledger.jsonl")
    place = dict[int, Place]()
    version = dict[int, int]()
    dropped = dict[int, str]()
    step_of = dict[int, int]()
    ages = dict[Place, int]()
    for record in records(folder):
        number = record.get("group_id")
        if record["kind"] == "issued":
            place[number] = (record["epoch"], record["row"])
        if record["kind"] in ("issued", "complete"):
            version[number] = record["version"]
        if record["kind"] == "dropped":
            dropped[number] = record["reason"]

        if record["kind"] == "consumed":
            for trained in record["group_ids"]:
                assert trained not in step_of, f"group {trained} was trained twice"
                step_of[trained] = record["step"]
                ages[place[trained]] = record["step"] - 1 - version[trained]

    assert sorted(place.values()) == sorted(places)
    assert not step_of.keys() & dropped.keys()
    lost = place.keys() - step_of.keys() - dropped.keys()
    assert not lost, f"lost: {sorted(lost)}"
    assert all(0 <= age <= max_staleness for age in ages.values()) and all(dropped.values())
    lengths = _lengths(folder, step_of, max_staleness)

    return Survivors(
        {place[number]: step for number, step in step_of.items()},
        {place[number]: own for number, own in lengths.items()},
        {place[number]: reason for number, reason in dropped.items()},
        ages,
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
