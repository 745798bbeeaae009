"""Faults planted into real runs, where columns pass from one hand to the next."""

from collections.abc import Callable
from typing import Any

import pytest

from distflow.checks.checker import Checker
from distflow.data.batch import Batch
from distflow.runtime.compiled_node import Step
from distflow.runtime.rollout_loop.group import Group


def plant_before_update(monkeypatch: pytest.MonkeyPatch, change: Callable[[Batch], object]) -> None:
    """`change(batch)` in each step, when every node has scored it and before the policy is trained
    on it."""
    original = Step.__call__

    def planted(self: Step, batch: Batch, ctx: Any) -> Any:
        if self.node.node_id == "actor_train":
            batch = batch.only(batch.names)
            change(batch)
        return original(self, batch, ctx)

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


def plant_from(
    monkeypatch: pytest.MonkeyPatch, begin: int, plant: Callable[[pytest.MonkeyPatch], object]
) -> list[int]:
    """`plant(monkeypatch)` when step number `begin`, from 0, is taken. Returns the steps taken,
    which grow."""
    steps = list[int]()
    original = Checker.step_taken

    def step_taken(self: Checker, step: int, *more: Any) -> None:
        if step >= begin and all(other < begin for other in steps):
            plant(monkeypatch)
        steps.append(step)
        original(self, step, *more)

    monkeypatch.setattr(Checker, "step_taken", step_taken)
    return steps


def plant_behind(
    node_id: str, change: Callable[[Batch], object]
) -> Callable[[pytest.MonkeyPatch], None]:
    """`change` the batch behind a node of the training loop."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Step.__call__

        def planted(self: Step, batch: Batch, ctx: Any) -> Any:
            out, measured = original(self, batch, ctx)
            if self.node.node_id == node_id:
                out = out.only(out.names)
                change(out)
            return out, measured

        patch.setattr(Step, "__call__", planted)

    return plant
