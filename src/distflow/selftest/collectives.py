"""Collectives of the process group that training uses on a device, tried on as many ranks as there are devices: this
module runs in a process for each rank."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

_MOST_RANKS: Final = 8
_NUMBERS: Final = 2**20
_DEADLINE_S: Final = 60.0


def check_collectives(device: str, folder: Path) -> str:
    """What was tried, in words. Raises RuntimeError with the message of a rank that failed, or that does not end."""
    num_ranks, store = min(torch.accelerator.device_count(), _MOST_RANKS), folder / "meeting"
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, device, str(rank), str(num_ranks), str(store)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(num_ranks)
    ]
    try:
        said = [_outcome(process, rank) for rank, process in enumerate(ranks)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return said[0]


def _outcome(process: "subprocess.Popen[str]", rank: int) -> str:
    """Its last line."""
    try:
        out, _ = process.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"rank {rank} did not finish within {_DEADLINE_S:.0f} s") from None
    last = (out.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1]
    if process.returncode:
        raise RuntimeError(f"rank {rank}: {last}")
    return last


def _try_all(device: str, rank: int, num_ranks: int, store: str) -> str:
    backend = dist.get_default_backend_for_device(device)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        f"cpu:gloo,{device}:{backend}",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=_DEADLINE_S),
    )
    here = torch.device(device, rank)
    own = torch.full((_NUMBERS,), float(rank + 1), device=here)
    total, received = own.clone(), own.clone()
    dist.all_reduce(total)
    dist.broadcast(received, 0)
    gathered = own.new_empty(num_ranks * _NUMBERS)
    dist.all_gather_into_tensor(gathered, own)
    part = own.new_empty(_NUMBERS)
    dist.reduce_scatter_tensor(part, gathered)
    everyone = [*range(1, num_ranks + 1)]
    expected = {
        "all_reduce": (total, [sum(everyone)]),
        "broadcast": (received, [1]),
        "all_gather": (gathered, everyone),
        "reduce_scatter": (part, [num_ranks * (rank + 1)]),
    }
    for name, (tensor, numbers) in expected.items():
        exact = torch.tensor(numbers, dtype=torch.float32).repeat_interleave(_NUMBERS)
        if not torch.equal(tensor.cpu(), exact):
            raise RuntimeError(f"{name} over {backend} gives wrong numbers")
    torch.accelerator.synchronize()
    start = time.perf_counter()
    dist.all_reduce(total)
    torch.accelerator.synchronize()
    rate = total.nbytes / (time.perf_counter() - start) / 1e9
    dist.destroy_process_group()
    if num_ranks == 1:
        return f"{backend} starts; there is one device, so nothing was sent"
    return f"{', '.join(expected)} over {backend} on {num_ranks} ranks; a sum at {rate:.1f} GB/s"


if __name__ == "__main__":
    print(_try_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
