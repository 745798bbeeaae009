"""Seconds of a weight sync to workers of other processes: `store`, `disk` and `collective`, in
turns.

    python benchmarks/weight_sync.py [--mib 512] [--workers 1 2] [--rounds 5]

A trainer's process sends tensors of 16 MiB of float32 to workers on a Ray of this machine, with all
that a sync does: buckets of 256 MiB, their hashes on both sides, the load into the worker's copy,
and receipts. Each round sends the same weights by each mode; the first counts for nothing. Beside
them is what no mode can do without: the hashes of all bytes, once (`hash_of`).
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from distflow.cluster.collective_weight_transport import Pairs
from distflow.cluster.weights_to_workers import RayWeights, WeightReceivers, put_in_store
from distflow.observe.writing.timing import Waits
from distflow.rollout.engine import WeightReceipt
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.weight_sync.bucket_files import Carry, hash_of, pack, write_bucket
from distflow.runtime.weight_sync.receiver import IncomingWeights
from distflow.runtime.weight_sync.same_process_weights import LocalWeights
from distflow.runtime.weight_sync.sender import WeightSender
from distflow.scheduling.group_states import Version

TENSOR_MIB = 16
TIMEOUT_S = 300.0


class Holder:
    """A worker that has an engine's copy of the weights, and generates nothing."""

    def __init__(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._incoming = IncomingWeights()
        self._copy = dict[str, Tensor]()
        self._incoming.attach(self)

    def __call__(self, version: Version, weights: Any) -> WeightReceipt:
        for name, tensor in weights:
            self._copy.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        return WeightReceipt(version, stripe_hashes(self._copy.items()))

    def start(self, version: Version, weights: Any) -> "Future[WeightReceipt]":
        raise AssertionError("a version that came from elsewhere is whole")

    def receive(self, *bucket: Any) -> str | None:
        return self._incoming.receive(*bucket)

    def load(self, *version: Any) -> WeightReceipt:
        return self._incoming.load(*version)


class Trainer:
    def __init__(self, mib: int) -> None:
        generator = torch.Generator().manual_seed(0)
        size = TENSOR_MIB * 2**18
        self._weights = [
            (f"layer.{i}", torch.randn(size, generator=generator)) for i in range(mib // TENSOR_MIB)
        ]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights


def carries(run_dir: Path) -> dict[str, Carry]:
    return {
        "store": put_in_store,
        "disk": partial(write_bucket, run_dir),
        "collective": Pairs(run_dir, "gloo", TIMEOUT_S, print),
    }


def measure(mib: int, num_workers: int, rounds: int, run_dir: Path) -> dict[str, list[float]]:
    workers = [
        ray.remote(Holder).options(num_cpus=0, max_concurrency=4).remote()
        for _ in range(num_workers)
    ]
    members = WeightReceivers(print)
    for rank, worker in enumerate(workers):
        members.join(rank, worker)
    trainer, steps, session = Trainer(mib), count(1), None
    taken: dict[str, list[float]] = {"hashes alone": []}
    modes = carries(run_dir)

    for number in range(1 + rounds):
        round_s = {"hashes alone": timed(lambda: hash_of(pack(list(trainer.weights()))))}
        for mode, carry in modes.items():
            port = RayWeights(LocalWeights(Waits()), members, carry, TIMEOUT_S, Waits())
            sender = WeightSender(
                trainer, port, torch.float32, sends=True, canary=None, session=session
            )  # type: ignore[arg-type]
            round_s[mode] = timed(partial(sender.sync, Version(0, next(steps))))

        for name, seconds in round_s.items() if number else ():
            taken.setdefault(name, []).append(seconds)

    for worker in workers:
        ray.kill(worker)
    return taken


def timed(what: Any) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="seconds of a weight sync by each mode")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    room = 3 * 2**28  # for two buckets and more
    ray.init(
        "local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=room,
    )
    print("| mode | workers | median s | largest s | MiB/s |\n|---|---|---|---|---|")

    with tempfile.TemporaryDirectory(prefix="weight-sync-") as folder:
        for num_workers in arguments.workers:
            taken = measure(arguments.mib, num_workers, arguments.rounds, Path(folder))
            for name, seconds in taken.items():
                median = statistics.median(seconds)
                rate = arguments.mib / median
                print(
                    f"| {name} | {num_workers} | {median:.2f} | {max(seconds):.2f} | {rate:.0f} |",
                    flush=True,
                )

    ray.shutdown()


if __name__ == "__main__":
    main()
