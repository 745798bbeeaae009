"""Whether the processes of a run answer, and what is said of one that does not."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

ANSWERS_WITHIN_S = 60.0
ENDS_WITHIN_S = 20.0
COORDINATOR = -1
"""In place of a rank."""


class Pulse:
    """Whether processes answer, asked one question after another on a thread that does nothing else."""

    def __init__(self, actors: Mapping[int, Any]) -> None:
        """actors: by rank."""
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, tuple[Any, float]] = {}
        for rank, actor in actors.items():
            self.follow(rank, actor)

    def follow(self, rank: int, actor: Any) -> None:
        """It is asked from now on."""
        self._actors[rank] = actor
        self._asked[rank] = (actor.alive.remote(), time.monotonic())

    def forget(self, rank: int) -> None:
        """It is asked no more."""
        self._actors.pop(rank, None)
        self._asked.pop(rank, None)

    def silent(self) -> int | None:
        """The rank of one that has not answered for `ANSWERS_WITHIN_S`, if there is one."""
        for rank, (ref, since) in list(self._asked.items()):
            if ray.wait([ref], timeout=0)[0]:
                self.follow(rank, self._actors[rank])
            elif time.monotonic() - since > ANSWERS_WITHIN_S:
                return rank
        return None

    def told(self, silent: int, stacks: Path) -> str:
        """What is said of one that is silent, once every worker that still answers has written to `stacks` what its
        threads are at."""
        asked = [
            actor.write_stacks.remote(stacks)
            for rank, actor in self._actors.items()
            if rank not in (silent, COORDINATOR)
        ]
        ray.wait(asked, num_returns=len(asked), timeout=ENDS_WITHIN_S)
        name = "the coordinator" if silent == COORDINATOR else f"worker {silent}"
        return (
            f"{name} has not answered for {ANSWERS_WITHIN_S:g} s: its process is stopped, hangs in native code, or "
            f"its machine is gone. What the others were at stands in {stacks}."
        )
