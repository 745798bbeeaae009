"""Runs a module of the tests as several real gloo ranks, each a process of its own."""

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from tests.forks import forks


def run_ranks(
    module: str, num_ranks: int, folder: Path, exit_codes: Sequence[int] | None = None
) -> None:
    """`main(rank, folder)` of the module on every rank of one group; fails with what a rank wrote
    where one fails.

    exit_codes: how they are to end, by rank; all well without it.
    """
    workers = [
        forks.Process(target=_be_rank, args=(module, rank, num_ranks, folder))
        for rank in range(num_ranks)
    ]
    for worker in workers:
        worker.start()

    try:
        for worker in workers:
            worker.join(500)
        errors = [
            _errors(folder, rank).read_text()
            for rank in range(num_ranks)
            if _errors(folder, rank).exists()
        ]
        ended = [worker.exitcode for worker in workers]
        assert ended == list(exit_codes or [0] * num_ranks), "\n".join(
            (f"exit codes {ended}", *errors)
        )
    finally:
        for worker in workers:
            worker.kill()


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.err"


def _be_rank(module: str, rank: int, num_ranks: int, folder: Path) -> None:
    with _errors(folder, rank).open("w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=num_ranks
    )
    import_module(module).main(rank, folder)
    dist.destroy_process_group()
