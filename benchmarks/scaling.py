"""Where the time beyond linear goes: the same pipeline in one process, on one worker over Ray, and
on two.

    python benchmarks/scaling.py [--steps 8 --rounds 3]

Every run is a `distflow train` of its own with a Ray of its own: GRPO on the built-in random
decoder of 0.8 M parameters, answers of up to 64 tokens, one thread a worker, no checks that prove
steps again. Strong: two workers share the step of one. Weak: they share one of twice as many
prompts. Rounds take turns; the first step of each run, which warms up, is not counted.

Printed, medians over the rounds: of each run the seconds of a step and of its parts, as the rank
that leads has them; then how far each part is from linear: two workers against half of one worker's
time where they share its step, against all of it where the step is twice as large. Parts:

    start       from the command to the end of the first step, once a run: Ray, processes, imports,
    engines
    decode      an engine drew tokens, the slower one
    exchange    the rest of the wait for a step: verdicts, columns to the coordinator and back, the
    other rank's groups score       log-probs of the policy and the reference, advantages
    update      forward, backward, the sum of gradients over ranks, the optimizer's step
    weights     to the engine, with receipts, and replicas compared
    release     waits until the other ranks have released the step
    other       metrics over ranks, what is recorded

The figures mean something on an idle machine with a core for each worker and one more for the
driver and the coordinator; with fewer they wait for one another, and that is what is seen in every
part.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from distflow.observe.run_reader import Span, read_metrics, read_spans

PARTS = ("start", "step", "decode", "exchange", "score", "update", "weights", "release", "other")
SCORES = ("recompute_logp", "ref_logp", "compute_advantage")
WARM_UP = 1  # steps
Run = Mapping[str, float]
"""Seconds by part: of a mean step, but for `start`."""


def train(folder: Path, name: str, workers: int, prompts: int, steps: int) -> Run:
    """workers: 0 is one process without Ray."""
    launcher = ["trainer.launcher=ray", f"trainer.n_gpus_per_node={workers}"] if workers else []
    command = [
        *(sys.executable, "-m", "distflow", "train", "grpo"),
        "data.train_files=builtin:arithmetic-rl",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=16",
        "data.max_response_length=64",
        "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
        "actor_rollout_ref.model.init=random",
        "actor_rollout_ref.model.dtype=float32",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "actor_rollout_ref.rollout.n=8",
        "reward.functions={default: [exact_match]}",
        "reward.num_workers=1",
        "trust.check_freq=0",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}/{name}",
        *launcher,
    ]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    began = time.time()
    done = subprocess.run(
        command, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")

    return measured(folder / name, began)


def measured(run_dir: Path, began: float) -> Run:
    """began: when the command was given."""
    records = [record for record in read_metrics(run_dir) if record.kind == "train"]
    start, end, spans = (
        records[WARM_UP - 1].t,
        records[-1].t,
        read_spans(run_dir, max_bytes=100_000_000),
    )
    count = len(records) - WARM_UP

    def seconds(name: str) -> float:
        return (
            sum(record.values.get(f"timing_s/{name}", 0.0) for record in records[WARM_UP:]) / count
        )

    def spent(actor: str, kind: str, what: str) -> float:
        return (
            sum(_inside(span, start, end) for span in spans.get(actor, ()) if _is(span, kind, what))
            / count
        )

    decode = max(spent(actor, "decode", "train") for actor in spans)
    parts = {
        "start": start - began,
        "step": (end - start) / count,
        "decode": decode,
        "exchange": seconds("rollout") - decode,
        "score": sum(map(seconds, SCORES)),
        "update": seconds("train_step"),
        "weights": seconds("update_weights"),
        "release": spent("training", "wait", "release"),
    }
    known = sum(value for name, value in parts.items() if name not in ("start", "step"))

    return {**parts, "other": parts["step"] - known}


def _is(span: Span, kind: str, what: str) -> bool:
    return span.kind == kind and span.what.startswith(what)


def _inside(span: Span, start: float, end: float) -> float:
    return max(0.0, min(span.end, end) - max(span.start, start))


def table(title: str, rows: Mapping[str, Run]) -> None:
    print(f"\n| {title} | {' | '.join(PARTS)} |\n|---|{'---|' * len(PARTS)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{row[part]:.2f}' for part in PARTS)} |")


def beyond(found: Run, alone: Run, share: float) -> Run:
    """What each part took beyond `share` of what it took alone; the start, of which no part is
    shared, beyond all."""
    return {part: found[part] - (1.0 if part == "start" else share) * alone[part] for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}", flush=True)
    kinds = {
        "one process": (0, arguments.prompts),
        "1 worker": (1, arguments.prompts),
        "2 workers, strong": (2, arguments.prompts),
        "2 workers, weak": (2, 2 * arguments.prompts),
    }

    found: dict[str, list[Run]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for index in range(arguments.rounds):
            for name, (workers, prompts) in kinds.items():
                run = train(
                    Path(folder), f"{workers}-{prompts}-{index}", workers, prompts, arguments.steps
                )
                found[name].append(run)
                print(
                    (
                        f"round {index}: {name}: {run['step']:.2f} s a step, start "
                        f"{run['start']:.1f} s"
                    ),
                    flush=True,
                )

    middle = {
        name: {part: statistics.median(run[part] for run in runs) for part in PARTS}
        for name, runs in found.items()
    }
    one = middle["1 worker"]
    strong = middle["2 workers, strong"]
    weak = middle["2 workers, weak"]
    table("seconds a step", middle)
    table("beyond linear", {"strong": beyond(strong, one, 0.5), "weak": beyond(weak, one, 1.0)})
    speeds = one["step"] / strong["step"], one["step"] / weak["step"]
    print("\nspeed of 2 workers: strong {:.2f} of 2, weak {:.2f} of 1".format(*speeds))


if __name__ == "__main__":
    main()
