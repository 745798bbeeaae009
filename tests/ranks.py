"""Runs a module of the tests as several real gloo ranks, each a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def run_ranks(module: str, num_ranks: int, folder: Path) -> None:
    """`python -m module` on every rank, which calls `run_as_rank`; fails with what a rank wrote where one fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(num_ranks), str(folder)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        errors = [worker.communicate(timeout=180)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * num_ranks, "\n".join(errors)


def run_as_rank(main: Callable[[int, Path], None]) -> None:
    """Join the group that the command line names, and call `main(rank, folder)`."""
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=num_ranks)
    main(rank, folder)
    dist.destroy_process_group()
