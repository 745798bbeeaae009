"""A training loop of the user's own over Ray: seconds of a step, and bytes that pass through the
script.

    python benchmarks/own_loop.py [--steps 8 --prompts 16 --length 64]

GRPO on the built-in random decoder of 0.8 M parameters, two workers that generate and train, one
thread each. `train` is `distflow.train`; `on the ranks` a loop whose columns stay with the workers
(`copy_columns`, `apply`); `in the script` the same with log-probs and advantages that are read and
computed here. Bytes are those of the objects and arguments that the driver sends and reads in a
step. Without the first step: the fastest step, which a busy machine disturbs least, and medians.
"""

import argparse
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

import distflow
from distflow.algorithms.methods.grpo import compute_grpo_advantage
from distflow.algorithms.objectives import PolicyObjective
from distflow.cluster.supervisor import RayRun

MOVED = {"out": 0, "in": 0}


def reward(solution_str: str) -> float:
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)


def settings(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    return {
        "actor_rollout_ref.model": {
            "path": "builtin:tiny-arithmetic",
            "init": "random",
            "dtype": "float32",
        },
        "actor_rollout_ref.actor.ppo_mini_batch_size": options.prompts,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "algorithm.recompute_old_log_probs": "true",
        "data.train_files": "builtin:arithmetic-rl",
        "data.train_batch_size": options.prompts,
        "data.max_prompt_length": 16,
        "data.max_response_length": options.length,
        "trainer.launcher": "ray",
        "trainer.n_gpus_per_node": 2,
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
        "trainer.save_freq": -1,
        "trainer.total_training_steps": options.steps,
        "trainer.default_local_dir": folder,
        "trust.check_freq": 0,
        "trust.check_rewards": False,
    }


def advantages(batch: Any) -> None:
    batch["advantages"], _ = compute_grpo_advantage(
        batch["token_level_rewards"], batch["response_mask"], batch["group_index"], batch["valid"]
    )


def loop(config: dict[str, Any], on_ranks: bool) -> list[tuple[float, int, int]]:
    """(seconds, bytes sent, bytes read) of each step."""
    steps = []
    loss = PolicyObjective("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2})

    with distflow.rollouts("grpo", config, reward=reward) as rollouts:
        start = time.perf_counter()
        while batch := rollouts.prepare_batch():
            made = rollouts.actor.forward(batch, ("log_probs",))
            if on_ranks:
                batch.copy_columns(made, old_log_probs="log_probs")
                rollouts.apply(batch, advantages)
            else:
                batch["old_log_probs"] = made["log_probs"]
                advantages(batch)

            rollouts.actor.train_step(batch, loss)
            rollouts.publish()
            steps.append((time.perf_counter() - start, MOVED["out"], MOVED["in"]))
            start = time.perf_counter()
            MOVED["out"] = 0
            MOVED["in"] = 0

    return steps


def counted(direction: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the bytes of its argument ("out") or result ("in") added up."""

    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        MOVED[direction] += len(
            ray.cloudpickle.dumps(
                result if direction == "in" else arguments[-1], pickle.HIGHEST_PROTOCOL
            )
        )
        return result

    return call


def in_words(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.2f} s at least, {statistics.median(seconds):.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("steps", 8), ("prompts", 16), ("length", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        run = distflow.train("grpo", settings(options, f"{folder}/train"), reward=reward)
        print(f"train: {in_words([row['timing_s/step'] for row in run.metrics('train')][1:])}")
        ray.put = counted("out", ray.put)
        ray.get = counted("in", ray.get)
        RayRun.call = counted("out", RayRun.call)  # type: ignore[method-assign]

        for on_ranks in (True, False):
            steps = loop(settings(options, f"{folder}/{on_ranks}"), on_ranks)[1:]
            seconds, *moved = zip(*steps, strict=True)
            sent, received = map(statistics.median, moved)
            name = "on the ranks" if on_ranks else "in the script"
            print(
                f"{name}: {in_words(seconds)}, {sent / 1024:.0f} KiB sent, {received / 1024:.0f} "
                "KiB read"
            )


if __name__ == "__main__":
    main()
