"""Faults planted into real runs, where a node's columns pass from one hand to the next."""

from collections.abc import Callable
from typing import Any

import pytest

from distflow.data.batch import Batch
from distflow.runtime.group import Group
from distflow.runtime.step import Step


def plant_in_learning(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Batch], object], *, after: str | None = None
) -> None:
    """`change(batch)` after each node of the learning plane that writes the column `after`; None: after every node."""
    original = Step.__call__

    def planted(self: Step, batch: Batch, ctx: Any) -> Any:
        out, metrics = original(self, batch, ctx)
        if after is None or after in self.node.contract.writes:
            change(out)
        return out, metrics

    monkeypatch.setattr(Step, "__call__", planted)


def plant_in_group(monkeypatch: pytest.MonkeyPatch, change: Callable[[Batch], object]) -> None:
    """`change(batch)` whenever columns are made of an answered group's samples."""
    original = Group.batch

    def planted(self: Group) -> Batch:
        batch = original(self)
        if self.samples:
            change(batch)
        return batch

    monkeypatch.setattr(Group, "batch", planted)
