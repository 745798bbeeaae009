"""Seconds of a whole GRPO step against TRL's `GRPOTrainer`, on the same model, prompts, lengths and
verdicts.

    make bench-peers
    python benchmarks/train_step.py [--rounds 3 --steps 6 --work fixed-1m long-1m fixed-10m
    long-10m] [--vllm]

Ours is a `distflow train grpo` as it ships, with its threads, verifiers, checks and recording; TRL
runs in an environment of its own. With `--vllm` both generate by vLLM, ours by its server, TRL in
the trainer's process. Each run is a process of its own, and the two take turns. The first two steps
of a run warm up.
TRL is tried at each division of the step's 256 answers into micro-batches that is named below, and
the best of these again over tcmalloc where that is found; settings that lose clearly are not run
again, which the output says, and the fastest of what is left counts. On `long` lengths an answer
ends after every token with the same chance, so that step and step differ; both then do about the
same number of tokens, which is printed, and the ratio is of seconds a token. `busy beside`: cores
that processes other than ours and TRL's kept busy meanwhile, in the worst round. Name one work at a
time: 3 rounds take 5 minutes at 1 M on two cores, with `--steps 4` 9 at 10 M, and 25 on long tails.

docs/tried.md lists what profiling found to gain nothing.
"""

import argparse
import math
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from fairness import Beside, tcmalloc, worth_it
from workload import WORKS, Work, run_peer, train, write_work

ROOT = Path(__file__).resolve().parents[1]
TRL = ROOT / ".peers" / "trl" / "bin" / "python"
BY_VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    f"actor_rollout_ref.rollout.python={ROOT / '.venv-vllm' / 'bin' / 'python'}",
)
MICRO_BATCHES = (256, 64, 32)
TRIED_STEPS = 3


Run = tuple[float, float]
"""Mean seconds a step, mean tokens a step."""


@dataclass(frozen=True)
class Setting:
    """Of TRL. preload: the allocator's library, or none. vllm: it generates, on the trainer's
    device."""

    micro_batch: int
    preload: str = ""
    vllm: bool = False

    def __str__(self) -> str:
        added = (", tcmalloc" if self.preload else "") + (", vLLM" if self.vllm else "")
        return f"micro-batches of {self.micro_batch}{added}"


def ours(folder: Path, name: str, work: Work, steps: int, options: Sequence[str] = ()) -> Run:
    found = train(folder, name, work, steps, *options)[1:]
    return _measured([step.seconds for step in found], [step.tokens for step in found])


def trl(folder: Path, work: Work, steps: int, setting: Setting) -> Run:
    wanted = {
        "prompts": work.prompts,
        "steps": steps,
        "longest": work.longest,
        "bfloat16": work.shape.dtype == "bfloat16",
        "micro_batch": setting.micro_batch,
        "on_gpu": torch.cuda.is_available(),
        "vllm": setting.vllm,
    }
    command = ["env", f"LD_PRELOAD={setting.preload}"] if setting.preload else []
    command += [str(TRL), str(ROOT / "benchmarks/peers/trl_steps.py"), str(folder)]
    found: list[dict[str, float]] = run_peer(command, folder, wanted)[1:]

    return _measured([step["seconds"] for step in found], [step["tokens"] for step in found])


def settings_of_trl(name: str, folder: Path, work: Work, vllm: bool = False) -> list[Setting]:
    """Those that are worth their time, best first."""

    def cost(setting: Setting) -> float:
        try:
            seconds, tokens = trl(folder, work, TRIED_STEPS, setting)
        except SystemExit as failed:  # such as for want of memory
            print(
                f"{name}: TRL, {setting} failed: {str(failed).strip().splitlines()[-1]}", flush=True
            )
            return math.inf

        return seconds / tokens

    taken = {
        setting: cost(setting) for setting in (Setting(size, vllm=vllm) for size in MICRO_BATCHES)
    }
    faster = min(taken, key=lambda setting: taken[setting])
    library = tcmalloc(ROOT / ".peers")

    if torch.cuda.is_available() and not vllm:
        if subprocess.run([TRL, "-c", "import vllm"], capture_output=True).returncode:
            print(f"{TRL} has no vLLM: TRL generates by transformers", flush=True)
        else:
            by_vllm = replace(faster, vllm=True)
            taken[by_vllm] = cost(by_vllm)
    elif library is None:
        print("tcmalloc was not found: TRL runs without", flush=True)
    else:
        preloaded = replace(faster, preload=library)
        taken[preloaded] = cost(preloaded)

    ran = {str(setting): seconds for setting, seconds in taken.items() if seconds < math.inf}
    if not ran:
        raise SystemExit(f"{name}: TRL runs with none of its settings")

    kept = worth_it(f"{name}: TRL", ran)

    return [setting for told in kept for setting in taken if str(setting) == told]


def _measured(seconds: Sequence[float], tokens: Sequence[float]) -> Run:
    """On long lengths a step's seconds follow its tokens, so that means belong together."""
    return statistics.mean(seconds), statistics.mean(tokens)


def measure(name: str, work: Work, rounds: int, steps: int, vllm: bool) -> None:
    found: dict[str, list[Run]] = defaultdict(list)
    beside: dict[str, list[float]] = defaultdict(list)

    def take(who: str, run: Callable[[], Run]) -> None:
        others = Beside()
        found[who].append(run())
        beside[who].append(others.cores())

    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_work(folder, work.shape)
        settings = settings_of_trl(name, folder, work, vllm)

        for index in range(rounds):
            take(
                "distflow",
                partial(ours, folder, f"run{index}", work, steps, BY_VLLM if vllm else ()),
            )
            for setting in settings:
                take(f"TRL, {setting}", partial(trl, folder, work, steps, setting))

    per_token = {
        who: statistics.median(seconds / tokens for seconds, tokens in runs)
        for who, runs in found.items()
    }
    best = min(cost for who, cost in per_token.items() if who != "distflow")
    print(
        "| work | system | s a step | tokens a step | speed, of TRL's best | busy beside |\n"
        "|---|---|---|---|---|---|"
    )

    for who, runs in found.items():
        seconds = sorted(seconds for seconds, _ in runs)
        tokens = statistics.mean(tokens for _, tokens in runs)
        spread = f"{statistics.median(seconds):.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})"
        cells = f"{tokens:,.0f} | {best / per_token[who]:.2f} | {max(beside[who]):.2f}"
        print(f"| {name} | {who} | {spread} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=6, help="of a run; the first two are not counted"
    )
    parser.add_argument("--work", nargs="+", default=list(WORKS)[:4], choices=WORKS)
    parser.add_argument("--vllm", action="store_true", help="both generate by vLLM")
    arguments = parser.parse_args()
    if not TRL.exists():
        raise SystemExit(f"{TRL} is not there: run `make bench-peers` first")

    print(
        f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}, {arguments.rounds} "
        "rounds\n"
    )
    for name in arguments.work:
        measure(name, WORKS[name], arguments.rounds, arguments.steps, arguments.vllm)


if __name__ == "__main__":
    main()
