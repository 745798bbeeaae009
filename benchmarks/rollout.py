"""Tokens per second of a rollout inside a run against transformers' `generate` and vLLM on the CPU,
on the same work.

    make bench-peers
    python benchmarks/rollout.py [--rounds 3 --steps 4 --work fixed-1m long-1m fixed-10m long-10m]

Ours is what the steps of a `distflow train grpo` wait for their groups, as it ships: verdicts,
recording and checks included. The peers then get the prompts and the lengths that the run's answers
had, token for token, on the same model files, in processes of their own: `generate` in batches of
32, 64 and all requests; vLLM with as many sequences at a time as we have, on all cores or, as by
itself, on all but one. The first step of a run warms up, and for a peer some of the same work.
Before the rounds each setting of a peer is tried on one step, and those that lose clearly are not
run again; the output says which. Lengths are `fixed` at 64, or `long`: after each token an answer
ends with a chance of one in sixty-four, and at 512; eight answers share a prompt. `busy beside`:
cores that processes other than ours and the peer's kept busy meanwhile, in the worst round. A work
takes 5 to 8 minutes on two cores; name one at a time.

docs/tried.md lists what profiling found to gain nothing.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from fairness import Beside, worth_it
from workload import WORKS, Work, ids_of, run_peer, train, write_work

from distflow.observe.run_reader import read_samples

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks/peers"
VLLM = ROOT / ".venv-vllm/bin/python"

Request = tuple[list[int], int]
"""Prompt ids, tokens wanted."""


def answered(run_dir: Path, step: int) -> list[Request]:
    return [
        (ids_of(sample["prompt"]), int(str(sample["response_length"])))
        for sample in read_samples(run_dir, step)
    ]


def generate(folder: Path, work: Work, steps: list[list[Request]], batch: int) -> list[float]:
    command = [sys.executable, str(PEERS / "hf_rollout.py"), str(folder)]
    seconds: list[float] = run_peer(
        command, folder, {"steps": steps, "dtype": work.shape.dtype, "batch": batch}
    )
    return seconds


def vllm(folder: Path, work: Work, steps: list[list[Request]], reserved: int) -> list[float]:
    """reserved: cores on which it does not compute; by itself it leaves one free."""
    command = ["env", "VLLM_CPU_KVCACHE_SPACE=1", f"VLLM_CPU_NUM_OF_RESERVED_CPU={reserved}"]
    command += [str(VLLM), str(PEERS / "vllm_rollout.py"), str(folder)]
    seconds: list[float] = run_peer(command, folder, {"steps": steps, "dtype": work.shape.dtype})
    return seconds


def peers_of(
    work: Work,
) -> dict[str, dict[str, Callable[[Path, list[list[Request]]], list[float]]]]:
    """Of each peer its settings: what gives the seconds of each step."""
    batches = sorted({32, 64, work.prompts * 8})
    return {
        "generate": {
            f"generate, batch {batch}": lambda folder, steps, batch=batch: generate(
                folder, work, steps, batch
            )
            for batch in batches
        },
        "vLLM": {
            f"vLLM, {cores} cores reserved": lambda folder, steps, cores=cores: vllm(
                folder, work, steps, cores
            )
            for cores in (0, 1)
        },
    }


def ours(folder: Path, name: str, work: Work, num_steps: int) -> tuple[float, list[list[Request]]]:
    """Seconds of all steps but the first, and what was answered in each."""
    found = train(folder, name, work, num_steps)
    steps = [answered(folder / name, step) for step in range(2, num_steps + 1)]
    assert sum(length for step in steps for _, length in step) == sum(step.tokens for step in found)
    return sum(step.rollout for step in found), steps


def measure(name: str, work: Work, rounds: int, num_steps: int) -> None:
    rates: dict[str, list[float]] = defaultdict(list)
    beside: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_work(folder, work.shape)
        _, warm_up = ours(folder, "warm-up", work, 2)

        kept = {}
        for peer, settings in peers_of(work).items():
            taken = {setting: sum(run(folder, warm_up)) for setting, run in settings.items()}
            kept |= {setting: settings[setting] for setting in worth_it(f"{name}: {peer}", taken)}

        for index in range(rounds):
            others = Beside()
            seconds, steps = ours(folder, f"run{index}", work, num_steps)
            num_tokens = sum(length for step in steps for _, length in step)
            rates["distflow"].append(num_tokens / seconds)
            beside["distflow"].append(others.cores())

            for setting, run in kept.items():
                others = Beside()
                rates[setting].append(num_tokens / sum(run(folder, steps)))
                beside[setting].append(others.cores())

    mid = {who: statistics.median(found) for who, found in rates.items()}
    print(
        "| work | system | tokens/s | distflow's speed, of it | busy beside |\n"
        "|---|---|---|---|---|"
    )

    for who, found in rates.items():
        spread = f"{mid[who]:,.0f} ({min(found):,.0f}-{max(found):,.0f})"
        print(
            (
                f"| {name} | {who} | {spread} | {mid['distflow'] / mid[who]:.2f} | "
                f"{max(beside[who]):.2f} |"
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not counted")
    parser.add_argument("--work", nargs="+", default=list(WORKS), choices=WORKS)
    arguments = parser.parse_args()
    if not VLLM.exists():
        raise SystemExit(f"{VLLM} is not there: run `make bench-peers` first")

    print(
        f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}, {arguments.rounds} "
        "rounds\n"
    )
    for name in arguments.work:
        measure(name, WORKS[name], arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
