"""A worker of the exchange's tests: it writes and reads steps of its own making, each in a process
of Ray's."""

import os

import ray
import torch
from ray.actor import ActorHandle

from distflow.cluster.reshard_through_object_store import RayReshard
from distflow.data.batch import Batch
from distflow.observe.writing.timing import Waits
from distflow.scheduling.reshard_writers_to_readers import Key


def made(first_group: int, num_groups: int, samples: int = 3) -> Batch:
    """Groups of samples whose lengths, tokens and texts tell which they are."""
    places = [
        (first_group + group, index) for group in range(num_groups) for index in range(samples)
    ]
    responses = torch.tensor([1 + (7 * group + index) % 5 for group, index in places])
    batch = Batch(torch.tensor([2] * len(places)), responses)
    batch["uid"] = [f"{group}-{index}" for group, index in places]
    batch["group_index"] = torch.tensor([group for group, _ in places])
    batch["response_ids"] = torch.cat(
        [
            torch.arange(length) + 100 * group
            for (group, _), length in zip(places, responses.tolist(), strict=True)
        ]
    )
    batch["scores"] = torch.tensor([float(index) for _, index in places])
    batch["notes of the user"] = [{"group": group, "text": "é" * index} for group, index in places]

    return batch


@ray.remote(num_cpus=0, max_concurrency=2)
class Peer:
    """Holds what it last made or read, so that it can put it."""

    def join(self, exchange: ActorHandle) -> None:
        self._waits = Waits()
        self._port = RayReshard(exchange, self._waits)

    def make(self, first_group: int, num_groups: int) -> None:
        self._batch = made(first_group, num_groups)

    def put(self, key: Key, writer: int, num_writers: int) -> None:
        self._port.put(key, self._batch, writer, num_writers)

    def pick(self, key: Key, rank: int, num_ranks: int, uids: list[str]) -> Batch:
        self._batch = self._port.pick(key, rank, num_ranks, uids)
        return self._batch

    def waiting(self) -> list[str]:
        return [str(wait) for wait in self._waits.now()]

    def pid(self) -> int:
        return os.getpid()
