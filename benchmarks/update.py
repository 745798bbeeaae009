"""Seconds of the update of a GRPO step on ragged lengths, against a padded loop over transformers.

    python benchmarks/update.py [--rounds 3 --steps 4 --work long-1m]

Ours is `timing_s/train_step` of a `distflow train grpo` as it ships: forward, backward, clipping
and optimizer of the packed trainer, which pays attention to what prompts share, gives entropies,
and is watched by the run's checks. The peer (`peers/hf_update.py`) gets the same answers with the
same advantages, token for token, and the same weights, in a process of its own; its tokens and the
norms of its gradients must be ours. It is there twice: with answers as they come, as trainers that
pad have them, and sorted by their lengths, which padding alone can hardly better. For each it is
tried before the rounds on a step at micro-batches of 8 to 64 answers, and the best of these with an
attention mask too; the fastest is run again, and the output says what the others took. The first
step of a run warms up. Lengths are `long`: after each token an answer ends with a chance of one in
sixty-four, and at 512. `busy beside`: cores that processes other than ours and the peer's kept busy
meanwhile, in the worst round. Three rounds take about 6 minutes on two cores.

What profiling found is in `train_step.py`, whose step is mostly this.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fairness import Beside, worth_it
from workload import WORKS, Work, ids_of, run_peer, train, write_work

from distflow.observe.run_reader import read_samples

PEER = Path(__file__).resolve().parent / "peers/hf_update.py"
MICRO_BATCHES = (8, 16, 32, 64)
HARDLY_ANY_LR = 1e-9
"""The peer begins with the weights that ours had a step before: by more, gradients would differ for
that alone."""
NORMS_AGREE = {"float32": 1e-4, "bfloat16": 0.05}

Sample = tuple[list[int], list[int], float]
"""Prompt ids, answer ids, advantage."""


@dataclass(frozen=True)
class Setting:
    """Of the peer; see there."""

    micro_batch: int
    by_length: bool
    mask: bool = False

    def __str__(self) -> str:
        sorting = "sorted" if self.by_length else "as they come"
        mask = ", with a mask" if self.mask else ""
        return f"padded, {self.micro_batch} at a time, {sorting}{mask}"


@dataclass(frozen=True)
class Updates:
    """Of each step: seconds, the gradient's norm, trained tokens."""

    seconds: list[float]
    norms: list[float]
    tokens: list[float]


def ours(folder: Path, name: str, work: Work, num_steps: int) -> tuple[Updates, list[list[Sample]]]:
    """Of all steps but the first, and what was trained in these."""
    found = train(
        folder, name, work, num_steps, f"actor_rollout_ref.actor.optim.lr={HARDLY_ANY_LR}"
    )
    steps = [_trained(folder / name, step) for step in range(2, num_steps + 1)]
    return Updates(
        [s.update for s in found], [s.norm for s in found], [s.tokens for s in found]
    ), steps


def _trained(run_dir: Path, step: int) -> list[Sample]:
    """An answer that was not cut off ends with a token that its text does not show."""
    samples = []
    for sample in read_samples(run_dir, step):
        answer = ids_of(sample["response"])
        answer += [1] * (int(str(sample["response_length"])) - len(answer))
        samples.append((ids_of(sample["prompt"]), answer, float(str(sample["advantage"]))))
    return samples


def padded(folder: Path, work: Work, steps: list[list[Sample]], setting: Setting) -> Updates:
    """The first of the steps is made once more before, to warm up."""
    job = {
        "steps": [steps[0], *steps],
        "bfloat16": work.shape.dtype == "bfloat16",
        **asdict(setting),
    }
    found = run_peer([sys.executable, str(PEER), str(folder)], folder, job)[1:]
    return Updates(*([step[name] for step in found] for name in ("seconds", "norm", "tokens")))


def best_of_peer(
    name: str, folder: Path, work: Work, step: list[Sample], by_length: bool
) -> Setting:
    def cost(setting: Setting) -> float:
        return padded(folder, work, [step], setting).seconds[0]

    taken = {
        setting: cost(setting) for setting in (Setting(size, by_length) for size in MICRO_BATCHES)
    }
    masked = replace(min(taken, key=lambda setting: taken[setting]), mask=True)
    taken[masked] = cost(masked)
    (kept,) = worth_it(name, {str(setting): seconds for setting, seconds in taken.items()}, most=1)

    return next(setting for setting in taken if str(setting) == kept)


def check_same(own: Updates, theirs: Updates, dtype: str) -> None:
    """Raises SystemExit where the two did not train on the same."""
    if own.tokens != theirs.tokens:
        raise SystemExit(f"tokens differ: {own.tokens}, {theirs.tokens}")
    for mine, other in zip(own.norms, theirs.norms, strict=True):
        if abs(mine - other) > NORMS_AGREE[dtype] * mine:
            raise SystemExit(f"the gradient's norm is {mine:.6g} here and {other:.6g} there")


def measure(name: str, work: Work, rounds: int, num_steps: int) -> None:
    found: dict[str, list[float]] = defaultdict(list)
    beside: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_work(folder, work.shape)
        _, (warm_up,) = ours(folder, "warm-up", work, 2)
        settings = [
            best_of_peer(name, folder, work, warm_up, by_length) for by_length in (False, True)
        ]

        for index in range(rounds):
            others = Beside()
            own, steps = ours(folder, f"run{index}", work, num_steps)
            found["distflow"].append(sum(own.seconds) / sum(own.tokens))
            beside["distflow"].append(others.cores())

            for setting in settings:
                others = Beside()
                theirs = padded(folder, work, steps, setting)
                check_same(own, theirs, work.shape.dtype)
                found[str(setting)].append(sum(theirs.seconds) / sum(theirs.tokens))
                beside[str(setting)].append(others.cores())

    mid = {who: statistics.median(costs) for who, costs in found.items()}
    print(
        "| work | system | answered tokens/s | distflow's speed, of it | busy beside |\n"
        "|---|---|---|---|---|"
    )

    for who, costs in found.items():
        spread = f"{1 / mid[who]:,.0f} ({1 / max(costs):,.0f}-{1 / min(costs):,.0f})"
        print(
            (
                f"| {name} | {who} | {spread} | {mid[who] / mid['distflow']:.2f} | "
                f"{max(beside[who]):.2f} |"
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not counted")
    parser.add_argument("--work", nargs="+", default=["long-1m"], choices=WORKS)
    arguments = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}, {arguments.rounds} "
        "rounds\n"
    )
    for name in arguments.work:
        measure(name, WORKS[name], arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
