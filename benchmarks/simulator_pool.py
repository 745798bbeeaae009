"""What the workers of simulators lose between env steps: seconds, against those that their steps
take.

    python benchmarks/simulator_pool.py [--workers 2] [--episodes 16] [--steps 40] [--rounds 3]

A simulator sleeps 0 to 10 ms for each step (5 ms ± 5), so that load on the machine matters little,
and returns an image of 20 x 20 pixels. Each episode's chunks follow one another at once, as if the
policy took no time. The ideal is the sum of all sleeps, measured where they happen, divided by the
number of workers.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np

from distflow.acting.simulator import ChunkResult, Observation
from distflow.acting.worker_pool import SimulatorPool


class Sleeper:
    """Its rewards are the seconds that its steps took."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps

    async def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.draws = Random(seed)
        self.num_steps = 0
        return self.seen()

    async def step(self, chunk: Any) -> ChunkResult:
        rewards = []
        for _ in chunk:
            began = time.perf_counter()
            time.sleep(self.draws.uniform(0.0, 0.01))
            rewards.append(time.perf_counter() - began)

        self.num_steps += len(chunk)
        ends = [False] * (len(chunk) - 1) + [self.num_steps >= self.max_steps]
        return ChunkResult(rewards, ends, [False] * len(chunk), ends, self.seen())

    def seen(self) -> Observation:
        return Observation(
            {"image": np.full((20, 20, 3), self.num_steps, np.uint8)},
            np.zeros(0, np.float32),
            "sleep",
        )


async def played(pool: SimulatorPool, seed: int, chunk: int) -> float:
    """The seconds of an episode's steps."""
    episode = await pool.begin(seed, {})
    seconds = 0.0
    while True:
        result = await episode.step([[0.0]] * chunk)
        seconds += sum(result["rewards"])
        if result["terminated"][-1]:
            episode.close()
            return seconds


async def share_of_ideal(
    pool: SimulatorPool, args: argparse.Namespace, chunk: int
) -> tuple[float, float]:
    """The ideal over the seconds that all episodes took, and the env steps a second."""
    # the processes start
    await asyncio.gather(*(played(pool, seed, args.steps) for seed in range(args.workers)))
    began = time.perf_counter()
    slept = await asyncio.gather(*(played(pool, seed, chunk) for seed in range(args.episodes)))
    took = time.perf_counter() - began
    return sum(slept) / args.workers / took, args.episodes * args.steps / took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("workers", 2), ("episodes", 16), ("steps", 40), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    pool = SimulatorPool(f"{__file__}:Sleeper", {"max_steps": args.steps}, args.workers, 30.0)
    print(f"{args.episodes} episodes of {args.steps} steps of 5 ms ± 5, {args.workers} workers")

    for chunk in (1, 4, 8):
        found = [asyncio.run(share_of_ideal(pool, args, chunk)) for _ in range(args.rounds)]
        shares = ", ".join(f"{share:.3f}" for share, _ in found)
        print(
            f"chunks of {chunk}: {shares} of the ideal; {max(rate for _, rate in found):.0f} env "
            "steps/s"
        )

    pool.close()


if __name__ == "__main__":
    main()
