"""How speed and memory follow the work: no cliff, and memory bounded by the config.

    python benchmarks/curves.py [--tokens 8192] [--plot docs/images/curves.png]

A `distflow train grpo` each, as it ships, over the random decoder of 1 M parameters in float32:

    slots    tokens/s of the rollout at `actor_rollout_ref.rollout.max_num_seqs` from 1 to 512;
    responses of 64 tokens,
             twice as many as slots, eight at least
    length   tokens/s of the rollout at responses of 64 to 4,096 tokens, eight together
    micro    tokens/s of the update at `actor_rollout_ref.actor.ppo_max_token_len_per_gpu` from 512
    to 32,768; 512
             responses of 64 tokens behind prompts of 16

The first step of a run is not counted; of the others there are as many as make `--tokens` tokens,
eight at most. A cliff is told where speed falls by more than a quarter while slots or the
micro-batch double, or by more than half while responses do (attention over what stands before costs
no more than that); each tells how it fell. `--plot` draws the curves (`pip install matplotlib`).
All of it takes about 5 minutes on two cores.
"""

import argparse
import math
import os
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from workload import PROMPT_TOKENS, WORKS, Step, Work, train, write_work

GB = 1e9
Point = tuple[int, float, float]
"""Of the axis, tokens/s, GB at the peak."""

SLOTS = "actor_rollout_ref.rollout.max_num_seqs"
MICRO = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
AXES = {
    "slots": "sequences decoded together",
    "length": "tokens of a response",
    "micro": "tokens of a micro-batch",
}
LEAST_OF_DOUBLE = {"slots": 0.75, "length": 0.5, "micro": 0.75}
"""What may be left of the speed where the axis doubles."""
MOST_STEPS = 8


def works(axis: str) -> dict[int, tuple[Work, str]]:
    """What is run at each value of the axis, and its option."""
    base = WORKS["fixed-1m"]
    if axis == "slots":
        return {
            slots: (replace(base, prompts=max(1, slots // 4)), f"{SLOTS}={slots}")
            for slots in (1, 4, 16, 64, 128, 256, 512)
        }
    if axis == "length":
        return {
            length: (Work(base.shape, length, prompts=1), f"{SLOTS}=8")
            for length in (64, 256, 512, 1024, 2048, 4096)
        }

    return {
        tokens: (replace(base, prompts=64), f"{MICRO}={tokens}")
        for tokens in (512, 1024, 2048, 4096, 8192, 16384, 32768)
    }


def measure(folder: Path, axis: str, num_tokens: int) -> list[Point]:
    points: list[Point] = []
    for value, (work, option) in works(axis).items():
        num_steps = min(MOST_STEPS, max(1, num_tokens // (work.prompts * 8 * work.longest)))
        steps = train(folder, f"{axis}{value}", work, 1 + num_steps, option)
        rate = _update_rate(steps, work) if axis == "micro" else _rollout_rate(steps)
        points.append((value, rate, max(step.memory for step in steps) / GB))
        print(f"| {axis} | {value:,} | {rate:,.0f} | {points[-1][2]:.2f} |", flush=True)

    return points


def cliffs(axis: str, points: list[Point]) -> list[str]:
    """Where speed falls by more than it may, one line each."""
    found = []
    for (value, rate, _), (more, after, _) in pairwise(points):
        left = (after / rate) ** (1 / math.log2(more / value))
        if left < LEAST_OF_DOUBLE[axis]:
            found.append(
                f"cliff: {axis} {value:,} to {more:,}, {left:.2f} of the speed is left each time "
                "it doubles"
            )

    return found


def _rollout_rate(steps: list[Step]) -> float:
    return sum(step.tokens for step in steps) / sum(step.rollout for step in steps)


def _update_rate(steps: list[Step], work: Work) -> float:
    num_tokens = sum(step.tokens + work.prompts * 8 * PROMPT_TOKENS for step in steps)
    return num_tokens / sum(step.update for step in steps)


def plot(curves: dict[str, list[Point]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.4), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        values, rates, memory = zip(*points, strict=True)
        axes.plot(values, rates, "o-", color="tab:blue")
        axes.set(
            xscale="log",
            xlabel=AXES[name],
            ylim=(0, None),
            title="update" if name == "micro" else "rollout",
        )
        axes.set_xticks(values, [f"{value:,}" for value in values], rotation=45)
        axes.minorticks_off()
        axes.set_ylabel("tokens/s", color="tab:blue")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        other = axes.twinx()
        other.plot(values, memory, "s--", color="tab:gray")
        other.set(ylim=(0, None))
        other.set_ylabel("peak memory of the process, GB", color="tab:gray")

    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, default=8192, help="that a run answers and that are counted"
    )
    parser.add_argument("--axis", nargs="+", default=list(AXES), choices=AXES)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}\n")
    print("| axis | value | tokens/s | peak memory, GB |\n|---|---|---|---|")

    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_work(folder, WORKS["fixed-1m"].shape)
        curves = {axis: measure(folder, axis, arguments.tokens) for axis in arguments.axis}

    told = [line for axis, points in curves.items() for line in cliffs(axis, points)]
    print("\n" + "\n".join(told or ["no cliff"]))
    if arguments.plot:
        plot(curves, arguments.plot)


if __name__ == "__main__":
    main()
