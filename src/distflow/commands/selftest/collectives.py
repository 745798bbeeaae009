"""Tests the collectives that training uses on a device, on as many ranks as there are devices; this
module runs in one process per rank."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

_MOST_RANKS: Final = 8
_NUMBERS: Final = 2**20
_DEADLINE_S: Final = 60.0
_LINES: Final = 20


def check_collectives(device: str, folder: Path) -> str:
    """What was tested, in words. Raises RuntimeError with the message of a rank that failed or does
    not end."""
    size = min(torch.accelerator.device_count(), _MOST_RANKS)
    store = folder / "meeting"
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # no pipes: NCCL_DEBUG=INFO would fill them
    logs = [folder / f"rank-{rank}.log" for rank in range(size)]
    ranks = list[subprocess.Popen[bytes]]()
    try:
        for rank, log in enumerate(logs):
            command = [
                sys.executable,
                "-P",
                "-m",
                __name__,
                device,
                str(rank),
                str(size),
                str(store),
            ]
            env = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
            with log.open("wb") as out:
                ranks.append(
                    subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
                )
        for rank, (process, log) in enumerate(zip(ranks, logs, strict=True)):
            try:
                status = process.wait(_DEADLINE_S)
            except subprocess.TimeoutExpired:
                raise RuntimeError(
                    f"rank {rank} did not finish within {_DEADLINE_S:.0f} s{_end(log)}"
                ) from None
            if status:
                raise RuntimeError(f"rank {rank} ended with status {status}{_end(log)}")
        return _end(logs[0], 1).strip()
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _end(log: Path, num_lines: int = _LINES) -> str:
    """The last lines that a rank wrote, each on its own line."""
    return "".join(
        f"\n  {line}" for line in log.read_text("utf-8", "replace").splitlines()[-num_lines:]
    )


def _try_all(device: str, rank: int, size: int, store: str) -> str:
    backend = dist.get_default_backend_for_device(device)
    timeout = timedelta(seconds=_DEADLINE_S)
    torch.accelerator.set_device_index(rank)
    meeting = dist.FileStore(store, size)
    backends = f"cpu:gloo,{device}:{backend}"
    dist.init_process_group(backends, timeout=timeout, world_size=size, rank=rank, store=meeting)
    own = torch.full((_NUMBERS,), float(rank + 1), device=torch.device(device, rank))
    total = own.clone()
    received = own.clone()
    part = own.clone()
    gathered = own.repeat(size)
    dist.all_reduce(total)
    dist.broadcast(received, 0)
    dist.all_gather_into_tensor(gathered, own)
    dist.reduce_scatter_tensor(part, gathered)
    everyone = [*range(1, size + 1)]
    expected = {
        "all_reduce": (total, [sum(everyone)]),
        "broadcast": (received, [1]),
        "all_gather": (gathered, everyone),
        "reduce_scatter": (part, [size * (rank + 1)]),
    }
    for name, (tensor, numbers) in expected.items():
        if not torch.equal(tensor.cpu(), torch.tensor(numbers).float().repeat_interleave(_NUMBERS)):
            raise RuntimeError(f"{name} over {backend} gives wrong numbers")
    dist.destroy_process_group()
    return f"{', '.join(expected)} over {backend} on {size} rank(s)"


if __name__ == "__main__":
    print(_try_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
