"""Samples put and got per second through the exchange, beside siiRL 0.2.0's own DataCoordinator on the same Ray.

    pip install --no-deps --target SIIRL siirl==0.2.0 tensordict==0.9.1 loguru pyvers
    python benchmarks/coordinator.py --siirl SIIRL [--rounds 5 --workers 1 2 4 8 --samples 128 1024]

A step of samples of 1,024 tokens (ten columns, 51 kB each) is written by all workers and read again by all workers,
even by tokens. Of siiRL its `data_coordinator` runs as it is, called as its worker calls it (`put_data_to_buffers`,
`get_data_from_buffers` of `dagworker.py`): one object a sample, a filter in the queue's name, `Samples2Dict` at the
end. Between turns its cache is emptied, which its own reset would only do together with its queue; then the machine
rests, so that neither side pays for what Ray frees of the other: without that a turn of ours with eight workers takes
206 ms instead of 110, a thousand objects of siiRL being let go meanwhile. Ours is `RayReshard`: one object a worker.
Both run in the same worker processes and take turns within each round, the first one alternating. The object store's
memory is touched before, and two rounds are not counted. After each get, outside the clock, every sample is compared
with what was written by a checksum over its columns, and none may be missing or there twice.

The queue holds further samples, of another edge: in siiRL one reference each, here a put of 16 samples each.

Printed, medians over the rounds: samples put and got per second, of both; the rounds' ratios; milliseconds of all
workers' puts, of all their gets, and of the slowest worker's question to the coordinator within its get.

Where the time goes at 1,024 samples and one worker, by cProfile: ours in two copies, into shared memory at the put
(57 of 70 ms) and out of it at the get (8 of 16 ms); the two or three questions to the actor take 2 to 4 ms each. siiRL
in 1,024 `ray.put` of a pydantic object with ten arrays (1.3 of 1.7 s) and in making those objects (0.3 s); at the get
in unpickling them (0.4 of 0.8 s) and in `Samples2Dict` (0.36 s).
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorHandle

from distflow.cluster.reshard_columns import RayReshard, ReshardActor
from distflow.data.batch import Batch
from distflow.graph.fields import Axis, Field
from distflow.runtime.wait_log import Wait, Waits
from distflow.scheduling.reshard_columns import Key, Metas, Readers

PROMPT, RESPONSE = 256, 768
# What siiRL calls each column, what it is called here, where it belongs. 51 kB a sample.
COLUMNS = (
    ("prompts", "prompt_ids", "int64", Axis.PROMPT),
    ("responses", "response_ids", "int64", Axis.RESPONSE),
    ("response_mask", "response_mask", "int64", Axis.RESPONSE),
    ("input_ids", "input_ids", "int64", Axis.SEQUENCE),
    ("attention_mask", "attention_mask", "int64", Axis.SEQUENCE),
    ("position_ids", "position_ids", "int64", Axis.SEQUENCE),
    ("old_log_probs", "old_log_probs", "float32", Axis.RESPONSE),
    ("ref_log_prob", "ref_log_prob", "float32", Axis.RESPONSE),
    ("advantages", "advantages", "float32", Axis.RESPONSE),
    ("returns", "returns", "float32", Axis.RESPONSE),
)
STORE_BYTES, WARM_UP, REST_S = 2_000_000_000, 2, 0.5
WIDTHS = {Axis.PROMPT: PROMPT, Axis.RESPONSE: RESPONSE, Axis.SEQUENCE: PROMPT + RESPONSE}
Checksums = dict[int, int]  # by the first token of the prompt, which is another in each sample


@ray.remote(num_cpus=0)
class Worker:
    """Writes and reads its share on either side."""

    def __init__(self, rank: int) -> None:
        import siirl.data_coordinator as siirl
        from tensordict import TensorDict

        torch.set_num_threads(1)
        self._rank, self._siirl, self._tensor_dict = rank, siirl, TensorDict

    def make(self, num_samples: int, num_workers: int) -> Checksums:
        """This worker's share of a step."""
        rng = np.random.default_rng(self._rank)
        first = self._rank * num_samples
        self._columns: dict[str, torch.Tensor] = {}
        for name, _, dtype, axis in COLUMNS:
            values = rng.integers(0, 100_000, (num_samples, WIDTHS[axis])).astype(dtype)
            self._columns[name] = torch.from_numpy(values)
        self._columns["prompts"][:, 0] = torch.arange(first, first + num_samples)
        self._columns["attention_mask"].fill_(1)
        self._num_workers, self._num_samples = num_workers, num_samples
        self._uids = torch.arange(first, first + num_samples)
        return checksums({name: self._columns[name].numpy() for name, *_ in COLUMNS})

    def join(self, exchange: ActorHandle, coordinator: ActorHandle) -> None:
        self._port, self._coordinator = RayReshard(exchange, Waits(self._asked)), coordinator

    def put_ours(self, step: int) -> None:
        lengths = [torch.full((self._num_samples,), length) for length in (PROMPT, RESPONSE)]
        columns = [(Field(name, dtype, axis), self._columns[of].reshape(-1)) for of, name, dtype, axis in COLUMNS]
        batch = Batch.from_columns(lengths[0], lengths[1], columns)
        batch["uid"] = [str(uid) for uid in self._uids.tolist()]
        batch["group_index"] = self._uids // 8
        self._port.put(Key("queue", step, 0), batch, self._rank, self._num_workers)

    def get_ours(self, step: int) -> float:
        """Seconds of the question alone."""
        self._got = self._port.get(Key("queue", step, 0), self._rank, Readers(self._num_workers, whole_groups=False))
        return self._asking_s

    def _asked(self, wait: Wait, ended: float) -> None:
        self._asking_s = ended - wait.since

    def got_ours(self) -> Checksums:
        return checksums({of: self._got[name].numpy() for of, name, *_ in COLUMNS})

    def put_siirl(self, step: int) -> None:
        data = self._tensor_dict({**self._columns, "uid": self._uids}, batch_size=self._num_samples)
        samples = self._siirl.Dict2Samples(data)
        for sample in samples:
            sample.uid = str(int(sample.uid))  # as its type says: a tensor, as its loader makes it, pickles slowly
        infos = [
            self._siirl.SampleInfo(
                sum_tokens=int(sample.attention_mask.sum()),
                uid=sample.uid,
                dict_info={"key": "queue", "source_dp_size": self._num_workers},
            )
            for sample in samples
        ]
        self._refs = [ray.put(sample) for sample in samples]
        node_id = ray.get_runtime_context().get_node_id()
        ray.get(self._coordinator.put_batch.remote(infos, self._refs, node_id))

    def get_siirl(self, step: int) -> float:
        """Seconds of the question alone."""
        began = time.time()
        refs = ray.get(
            self._coordinator.get_batch.remote(
                self._num_samples,
                self._rank,
                filter_plugin=lambda info: info.dict_info.get("key") == "queue",
                balance_partitions=self._num_workers,
            )
        )
        asking_s = time.time() - began
        self._got = self._siirl.Samples2Dict(ray.get(refs))
        return asking_s

    def got_siirl(self) -> Checksums:
        return checksums({name: self._got[name].numpy() for name, *_ in COLUMNS})

    def forget(self) -> None:
        self._got = self._refs = None


def checksums(columns: dict[str, np.ndarray]) -> Checksums:
    found: Checksums = {}
    for row, first in enumerate(columns["prompts"][:, 0].tolist()):
        assert first not in found, "a sample is there twice"
        found[first] = 0
        for name, *_ in COLUMNS:
            found[first] = zlib.crc32(columns[name][row], found[first])
    return found


@dataclass(frozen=True)
class Turn:
    """Seconds: all workers' puts, all their gets, and the slowest one's question within its get."""

    put_s: float
    get_s: float
    asking_s: float


class Setting:
    """Both coordinators, their queues filled, and the workers that use them."""

    def __init__(self, workers: Sequence[ActorHandle], num_samples: int, queued: int) -> None:
        from siirl.data_coordinator.data_buffer import DataCoordinator

        self._workers, self._num_turns = workers, 0
        self._exchange = ReshardActor.remote(10**12)
        self._coordinator = DataCoordinator.remote(1, num_samples, len(workers))
        fill_ours(self._exchange, queued)
        fill_siirl(self._coordinator, queued)
        ray.get([worker.join.remote(self._exchange, self._coordinator) for worker in workers])
        share = num_samples // len(workers)
        made = ray.get([worker.make.remote(share, len(workers)) for worker in workers])
        self._written = together(made)

    def turn(self, side: str) -> Turn:
        """One step through one side, verified."""
        self._num_turns += 1
        began = time.perf_counter()
        self._all(f"put_{side}", self._num_turns)
        put = time.perf_counter()
        asking_s = self._all(f"get_{side}", self._num_turns)
        got = time.perf_counter()
        assert together(self._all(f"got_{side}")) == self._written, f"{side}: not what was written"
        self._all("forget")
        ray.get(self._coordinator.__ray_call__.remote(lambda coordinator: coordinator._cache.clear()))
        time.sleep(REST_S)
        return Turn(put - began, got - put, max(asking_s))

    def end(self) -> None:
        for actor in (self._exchange, self._coordinator):
            ray.kill(actor)

    def _all(self, method: str, *args: object) -> list[Any]:
        return ray.get([getattr(worker, method).remote(*args) for worker in self._workers])


def together(parts: Sequence[Checksums]) -> Checksums:
    found = {first: checksum for part in parts for first, checksum in part.items()}
    assert len(found) == sum(map(len, parts)), "a sample is there twice"
    return found


def fill_ours(exchange: ActorHandle, queued: int) -> None:
    lengths = np.full(16, 512, np.int32)
    ref = ray.put(b"")
    for start in range(0, queued, 1_000):  # no more at once than Ray takes without a word
        keys = [Key("another edge", first, 0) for first in range(start, min(start + 1_000, queued), 16)]
        ray.get([exchange.reserve.remote(key, 0, 1, 1) for key in keys])
        metas = [Metas(lengths, lengths, np.full(16, key.step), tuple(map(str, range(16)))) for key in keys]
        ray.get([exchange.put.remote(key, 0, meta, [ref]) for key, meta in zip(keys, metas, strict=True)])


def fill_siirl(coordinator: ActorHandle, queued: int) -> None:
    from siirl.data_coordinator import SampleInfo

    for start in range(0, queued, 500):
        infos = [SampleInfo(sum_tokens=1024, uid=str(i), dict_info={"key": "other"}) for i in range(start, start + 500)]
        refs = [ray.put(b"") for _ in infos]
        ray.get(coordinator.put_batch.remote(infos, refs, "node"))


def row(workers: Sequence[ActorHandle], num_samples: int, queued: int, rounds: int) -> str:
    setting = Setting(workers, num_samples, queued)
    turns: dict[str, list[Turn]] = {"ours": [], "siirl": []}
    for number in range(rounds + WARM_UP):
        for side in ("ours", "siirl") if number % 2 else ("siirl", "ours"):
            turns[side].append(setting.turn(side))
    setting.end()
    rates = {side: [num_samples / (turn.put_s + turn.get_s) for turn in made[WARM_UP:]] for side, made in turns.items()}
    ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["ours"], rates["siirl"], strict=True))

    def ms(side: str, part: str) -> str:
        return f"{1000 * statistics.median(getattr(turn, part) for turn in turns[side][WARM_UP:]):.1f}"

    return (
        f"| {len(workers)} | {num_samples:,} | {queued:,} | {statistics.median(rates['ours']):,.0f} | "
        f"{statistics.median(rates['siirl']):,.0f} | {ratio:.1f} | {ms('ours', 'put_s')} | {ms('ours', 'get_s')} | "
        f"{ms('ours', 'asking_s')} | {ms('siirl', 'put_s')} | {ms('siirl', 'get_s')} | {ms('siirl', 'asking_s')} |"
    )


def touch_memory(num_bytes: int) -> None:
    """The object store's pages, once, so that no round pays for them."""
    held = [ray.put(np.ones(num_bytes // 8, np.uint8)) for _ in range(7)]
    del held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--siirl", required=True, help="the folder where siirl 0.2.0 was installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--queued", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    options = parser.parse_args()
    siirl = str(Path(options.siirl).resolve())
    sys.path.append(siirl)
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), siirl])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # siiRL writes logs where it stands
        compare(options)


def compare(options: argparse.Namespace) -> None:
    ray.init(
        "local",
        num_cpus=2,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    touch_memory(STORE_BYTES)
    workers = [Worker.remote(rank) for rank in range(max(options.workers))]
    print("samples/s, put and got                                    ms, all workers")
    print("| workers | samples | queued | ours | siiRL | ratio | put | get | asking | siiRL put | get | asking |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for num_samples in options.samples:
        for num_workers in options.workers:
            print(row(workers[:num_workers], num_samples, options.queued[0], options.rounds), flush=True)
    for queued in options.queued[1:]:
        print(row(workers[:1], options.samples[-1], queued, options.rounds), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
