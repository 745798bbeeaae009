"""Tokens per second of episodes of four turns against single turns of the same lengths, in a run
that only generates.

    python benchmarks/episodes.py [--rounds 3 --steps 4 --work quickstart fixed-10m --case instant
    tools]
                                  [--tool-ms 200 --staleness 0]

`instant`: 64 episodes in a step, whose tools answer at once. `tools`: 32 episodes, whose tools take
`--tool-ms` each. Either is compared with single turns that have the prompt and the response of each
turn, as long token for token, four groups in the place of one, with no more responses in flight
than there are episodes. A step is a batch of `distflow.rollouts` with all that ships: recording,
rewards, checks. Nothing is trained in between, so the engine gets a new version of the same
weights. The first step warms up. Rounds are interleaved in one process; ratios are medians over
rounds, by the clock and by the processor time of the process, which other processes of a busy
machine move less.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from workload import PROMPT_TOKENS, WORKS, Shape, Work, write_work

import distflow

TURNS = 4
GIVEN = 16  # tokens of a tool's answer
GROUP = 8
CASES = {"instant": 64, "tools": 32}
"""Episodes in a step."""

OURS = {
    "quickstart": Work(Shape(96, 6), 24),
    "turns-10m": Work(Shape(384, 6, dtype="bfloat16"), 192),
    **{name: WORKS[name] for name in ("fixed-1m", "fixed-10m", "fixed-135m")},
}
"""quickstart: as many weights as the quickstart's model, and responses as long as its. turns-10m:
turns as long as those of agents that think or call tools."""


@distflow.workflow
async def turns(chat: Any, row: Any, reward_fn: Any, *, tokens: int, seconds: float) -> Any:
    """seconds: of a tool."""
    import asyncio

    reply = await chat.ask(row.prompt, max_tokens=tokens)
    while chat.turns < TURNS:
        if seconds:
            await asyncio.sleep(seconds)
        said = reply.text.split()[-GIVEN:]
        reply = await chat.ask(" " + " ".join(reversed(said)), max_tokens=tokens)

    return await reward_fn()


@dataclass(frozen=True)
class Measured:
    """Of all steps but the first. hit_rate: of prompt tokens in the prefix cache, if it was
    counted."""

    tokens: int
    seconds: float
    cpu: float
    hit_rate: float


def lengths(work: Work) -> list[int]:
    """Of the prompt of each turn."""
    return [PROMPT_TOKENS + turn * (work.longest + GIVEN) for turn in range(TURNS)]


def write_single_turns(folder: Path, work: Work, steps: int) -> None:
    """Rows whose prompts are as long as those of the first, second, ... turn, in this order again
    and again."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in lengths(work) * (work.prompts * (steps + 2)):
        words = torch.randint(2, work.shape.vocabulary, (length,), generator=generator).tolist()
        rows.append('{"prompt": "' + " ".join(f"w{word}" for word in words) + '", "answer": ""}\n')
    (folder / "single.jsonl").write_text("".join(rows))


def run(folder: Path, name: str, work: Work, steps: int, **own: Any) -> Measured:
    config = {
        "data.train_files": f"{folder}/rows.jsonl",
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": work.longest,
        "actor_rollout_ref.model.path": f"{folder}/model",
        "actor_rollout_ref.model.dtype": work.shape.dtype,
        "actor_rollout_ref.actor.ppo_mini_batch_size": work.prompts,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.rollout.n": GROUP,
        "custom_reward_function.path": f"{folder}/verifier.py",
        "reward.functions": {"default": ["custom"]},
        "trainer.total_training_steps": steps,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.default_local_dir": f"{folder}/{name}",
        "trust.check_freq": 0,
        **{key.replace("__", "."): value for key, value in own.items()},
    }
    workflow = config.pop("workflow", None)

    tokens = 0
    taken = []
    hits = []
    with distflow.rollouts("grpo", config, workflow=workflow) as rollouts:
        began = time.perf_counter(), time.process_time()
        while (batch := rollouts.prepare_batch()) is not None:
            taken.append((time.perf_counter() - began[0], time.process_time() - began[1]))
            tokens += int((batch["versions"] >= 0).sum()) if len(taken) > 1 else 0
            metrics = rollouts.publish()
            hits.append(metrics.get("episodes/prefix_cache_hit_rate", float("nan")))
            began = time.perf_counter(), time.process_time()

    seconds, cpu = (sum(column) for column in zip(*taken[1:], strict=True))
    return Measured(tokens, seconds, cpu, hits[-1])


def compare(
    folder: Path, name: str, work: Work, steps: int, seconds: float, staleness: int
) -> tuple[Measured, ...]:
    """Single turns, and episodes."""
    both: dict[str, Any] = {"async__max_staleness": staleness}
    write_single_turns(folder, work, steps + staleness)
    single = run(
        folder,
        f"{name}-single",
        replace(work, prompts=TURNS * work.prompts),
        steps,
        data__train_files=f"{folder}/single.jsonl",
        data__shuffle=False,
        data__max_prompt_length=lengths(work)[-1],
        actor_rollout_ref__rollout__max_num_seqs=GROUP * work.prompts,
        **both,
    )
    options = {"tokens": work.longest, "seconds": seconds}
    episodes = run(
        folder,
        f"{name}-turns",
        work,
        steps,
        data__max_response_length=TURNS * work.longest + (TURNS - 1) * GIVEN,
        workflow=turns,
        actor_rollout_ref__rollout__workflow_kwargs=options,
        **both,
    )
    assert single.tokens == episodes.tokens, (single, episodes)

    return single, episodes


def measure(name: str, arguments: argparse.Namespace) -> None:
    found: dict[str, list[tuple[Measured, ...]]] = {case: [] for case in arguments.case}
    delays = {"instant": 0.0, "tools": arguments.tool_ms / 1000}

    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        work = OURS[name]
        write_work(folder, work.shape)

        for index in range(arguments.rounds):
            for case in arguments.case:
                own = replace(work, prompts=CASES[case] // GROUP)
                both = compare(
                    folder,
                    f"{case}{index}",
                    own,
                    arguments.steps,
                    delays[case],
                    arguments.staleness,
                )
                found[case].append(both)

    for case, runs in found.items():
        row = [name, f"{CASES[case]}", f"{delays[case] * 1000:.0f}"]
        row += [
            f"{statistics.median(each.tokens / each.seconds for each in side):,.0f}"
            for side in zip(*runs, strict=True)
        ]
        for what in ("seconds", "cpu"):
            ratios = [getattr(single, what) / getattr(episodes, what) for single, episodes in runs]
            row.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")

        print(f"| {' | '.join(row)} | {runs[-1][1].hit_rate:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not counted")
    parser.add_argument("--work", nargs="+", default=["quickstart", "fixed-10m"], choices=OURS)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--tool-ms", type=int, default=200)
    parser.add_argument("--staleness", type=int, default=0)
    arguments = parser.parse_args()

    # as the command line does; else one collection of all imported objects may be a tenth of a run
    gc.freeze()
    print(
        f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}, {arguments.rounds} "
        "rounds\n"
    )
    print(
        "| work | episodes | ms a tool | single turns, tokens/s | episodes, tokens/s | ratio | by "
        "CPU time | hits |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in arguments.work:
        measure(name, arguments)


if __name__ == "__main__":
    main()
