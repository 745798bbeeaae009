"""A GRPO loop through the Tinker API against `distflow train grpo` on the same work, and the time
that a call of the API adds to what it computes.

    python benchmarks/tinker_api.py [--rounds 3 --steps 8 --work fixed-1m]

Both train an adapter of rank 32 on the same model, prompts, lengths and verdicts, with one update a
step. The loop is the client's usual one: it saves the weights for sampling, asks for all groups of
a step at once, scores them in its own process, and sends one `forward_backward` and one
`optim_step` together. The run is `distflow train grpo` as it ships, which checks its first steps
whole, and once more without these checks. They take turns; the first two steps of each warm up.
The ratio is of seconds a token.

A call adds its time by the clock without that of the same work alone: of `forward`, and of
`forward_backward` and `optim_step` sent together, over five tokens of a tiny model, with their
futures. `busy beside`: cores that processes other than ours kept busy.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tinker
import torch
from fairness import Beside
from workload import WORKS, Shape, Work, ids_of, train, write_work

from distflow.models.loading import load_model
from distflow.tinker.adapter import AdapterConfig, SharedBase, StepOptions, TrainedAdapter
from distflow.tinker.messages import Datum, PassRequest
from distflow.tinker.model_memory import ModelMemory

WARM_UP = 2
RANK = 32
CALLS = 200
LORA = (f"actor_rollout_ref.model.lora_rank={RANK}", "actor_rollout_ref.model.lora_alpha=32")
BARE = ("trust.check_freq=0",)
RUN = "`distflow train grpo`"
Steps = list[tuple[float, float]]
"""Seconds and response tokens of each."""


@contextmanager
def client_of(folder: Path, work: Work) -> Iterator[Any]:
    """Of a server over `folder`/model, in a process of its own."""
    command = [
        *(sys.executable, "-m", "distflow", "serve", f"{folder}/model", "--tinker", "--port", "0"),
        *("--folder", f"{folder}/checkpoints"),
        f"actor_rollout_ref.model.dtype={work.shape.dtype}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = {}
        for line in process.stdout:
            name, _, value = line.strip().partition("=")
            told[name] = value
            if line.startswith("base model"):
                break

        service = tinker.ServiceClient(
            base_url=told["TINKER_BASE_URL"], api_key=told["TINKER_API_KEY"]
        )
        try:
            yield service
            service.close("success")
        finally:
            process.send_signal(signal.SIGINT)


def loop(folder: Path, work: Work, steps: int) -> Steps:
    found: Steps = []
    rows = (folder / "rows.jsonl").read_text().splitlines()
    prompts = [ids_of(json.loads(row)["prompt"]) for row in rows]
    params = tinker.SamplingParams(max_tokens=work.longest, temperature=1.0)
    adam = tinker.AdamParams(learning_rate=1e-6, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)

    with client_of(folder, work) as service:
        model = service.create_lora_training_client(f"{folder}/model", RANK, seed=1).result()
        for step in range(steps):
            start = time.perf_counter()
            sampler = model.save_weights_and_get_sampling_client().result()
            own = prompts[step * work.prompts : (step + 1) * work.prompts]
            asked = [
                sampler.sample(tinker.ModelInput.from_ints(prompt), 8, params) for prompt in own
            ]
            data = []
            num_tokens = 0
            for prompt, future in zip(own, asked, strict=True):
                group = future.result().sequences
                scores = torch.tensor([verdict(each.tokens) for each in group])
                advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
                for each, advantage in zip(group, advantages.tolist(), strict=True):
                    data.append(datum(prompt, each, advantage))
                    num_tokens += len(each.tokens)

            passed = model.forward_backward(data, "ppo")
            stepped = model.optim_step(adam)
            passed.result()
            stepped.result()
            found.append((time.perf_counter() - start, num_tokens))

    return found[WARM_UP:]


def verdict(tokens: list[int]) -> float:
    """That of the run's verifier."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def datum(prompt: list[int], drawn: Any, advantage: float) -> Any:
    ids = [*prompt, *drawn.tokens]
    given = [0.0] * (len(prompt) - 1)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "logprobs": given + list(drawn.logprobs),
            "advantages": given + [advantage] * len(drawn.tokens),
        },
    )


def run(folder: Path, name: str, work: Work, steps: int, *options: str) -> Steps:
    found = train(folder, name, work, steps, *LORA, *options)
    return [(step.seconds, step.tokens) for step in found[WARM_UP - 1 :]]


def measure_loop(name: str, rounds: int, steps: int) -> None:
    work = WORKS[name]
    seconds: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, list[float]] = defaultdict(list)
    beside: dict[str, list[float]] = defaultdict(list)

    def take(who: str, measured: Callable[[], Steps]) -> None:
        others = Beside()
        found = measured()
        beside[who].append(others.cores())
        seconds[who].append(statistics.median(each for each, _ in found))
        costs[who].append(sum(each for each, _ in found) / sum(tokens for _, tokens in found))

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_work(folder, work.shape)
        for index in range(rounds):
            take(RUN, partial(run, folder, f"run{index}", work, steps))
            take(
                "the same without checks", partial(run, folder, f"bare{index}", work, steps, *BARE)
            )
            take("a loop of the Tinker API", partial(loop, folder, work, steps))

    first = statistics.median(costs[RUN])
    print("| work | loop | s a step | speed, of the run's | busy beside |\n|---|---|---|---|---|")
    for who, found in seconds.items():
        speed = first / statistics.median(costs[who])
        spread = f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"
        print(f"| {name} | {who} | {spread} | {speed:.2f} | {max(beside[who]):.2f} |", flush=True)


def measure_calls() -> None:
    ids = [5, 6, 7, 8, 9, 10]
    work = Work(Shape(64, 2, vocabulary=64), 8)
    sent = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * 5},
    )
    read = Datum(torch.tensor(ids[:-1]), {"target_tokens": torch.tensor(ids[1:])})

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_work(folder, work.shape)
        adapter = TrainedAdapter(
            SharedBase(load_model(str(folder / "model")), None, ModelMemory(math.inf, folder)),
            "own",
            AdapterConfig(RANK, 1, True, True),
        )
        with client_of(folder, work) as service:
            model = service.create_lora_training_client(f"{folder}/model", RANK, seed=1).result()

            def trained() -> None:
                passed = model.forward_backward([sent], "cross_entropy")
                model.optim_step(tinker.AdamParams()).result()
                passed.result()

            def own_trained() -> None:
                adapter.run(PassRequest("cross_entropy", {}, (read,), forward_only=False))
                adapter.step(StepOptions())

            own_forward = PassRequest("cross_entropy", {}, (read,), forward_only=True)
            pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
                "forward": (
                    lambda: model.forward([sent], "cross_entropy").result(),
                    lambda: adapter.run(own_forward),
                ),
                "forward_backward and optim_step": (trained, own_trained),
            }
            print(
                "| call | ms, median and least | the same work alone | added |\n|---|---|---|---|"
            )
            for name, (through, alone) in pairs.items():
                whole = milliseconds(through)
                own = milliseconds(alone)
                added = f"{whole[0] - own[0]:.1f}, {whole[1] - own[1]:.1f}"
                cells = f"{whole[0]:.1f}, {whole[1]:.1f} | {own[0]:.1f}, {own[1]:.1f} | {added}"
                print(f"| {name} | {cells} |", flush=True)


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Median and least."""
    for _ in range(20):
        call()

    found = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found), min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=8, help="of a run; the first two are not counted"
    )
    parser.add_argument("--work", nargs="+", default=["fixed-1m"], choices=WORKS)
    arguments = parser.parse_args()

    print(f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}\n")
    measure_calls()
    for name in arguments.work:
        measure_loop(name, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
