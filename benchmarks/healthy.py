"""Alarms of healthy runs: the checks of a run must stay silent where nothing is
wrong.

    python -m benchmarks.healthy [--seeds 20 --steps 200 --check-freq 5 --only grpo,ppo --staleness
    2]

Each run trains a tiny random decoder (32 wide, 2 layers) by another seed, through the path that
ships, with all checks on: GRPO with a KL term and 2 mini-batches x 2 epochs, PPO, DAPO, decoupled
PPO, LoRA, bfloat16, the `hf` engine, and episodes of several turns; where staleness is allowed with
answers of up to 40 tokens, so that updates fall into them. The table counts the warnings, findings
and errors of all runs, and shows what share of their time the checks took. An alarm is printed with
its message. Findings that are true of these runs are no alarm: a tiny random policy may stop
moving.
"""

import argparse
import contextlib
import io
import tempfile
from collections import Counter
from pathlib import Path

from distflow.observe.run_reader import read_events, read_metrics
from tests.e2e.runs import Playground

TWO_BY_TWO = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=2",
)
KL = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1")
BFLOAT16 = "actor_rollout_ref.model.dtype=bfloat16"
SETUPS = {
    "grpo": ("grpo", *TWO_BY_TWO),
    "ppo": ("ppo", *TWO_BY_TWO),
    "dapo": (
        "dapo",
        "reward.overlong.buffer_tokens=4",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        *TWO_BY_TWO,
    ),
    "decoupled": ("grpo", "actor_rollout_ref.actor.policy_loss=decoupled", *TWO_BY_TWO),
    "lora": ("grpo", "actor_rollout_ref.model.lora_rank=4"),
    "bfloat16": ("grpo", BFLOAT16),
    "hf": ("grpo", "actor_rollout_ref.rollout.name=hf"),
    "kl bfloat16": ("grpo", *KL, *TWO_BY_TWO, BFLOAT16),
    "ppo bfloat16": ("ppo", *TWO_BY_TWO, BFLOAT16),
    "lora bfloat16": ("grpo", "actor_rollout_ref.model.lora_rank=4", BFLOAT16),
    "multi_turn": (
        "grpo",
        "actor_rollout_ref.rollout.workflow=multi_turn",
        "data.max_response_length=60",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--check-freq", type=int, default=5)
    parser.add_argument("--only", default=",".join(SETUPS))
    parser.add_argument("--staleness", type=int, default=0)
    options = parser.parse_args()
    print(
        "| set-up | runs | steps | checked | not proven | warnings | findings | ended early | "
        "checks' share of time |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.only.split(","):
        print(row(name, options), flush=True)


def row(name: str, options: argparse.Namespace) -> str:
    kinds: Counter[str] = Counter()
    unproven: Counter[str] = Counter()
    checked = total = 0.0
    steps = 0

    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            playground = Playground(Path(folder))
            preset, *overrides = SETUPS[name]
            overrides += [
                f"trainer.seed={seed}",
                f"trainer.total_training_steps={options.steps}",
                f"trust.check_freq={options.check_freq}",
                "trainer.logger=[]",
                f"async.max_staleness={options.staleness}",
            ]
            if options.staleness:
                overrides.append("data.max_response_length=40")

            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    playground.run(preset, *overrides)
            # whatever ends a run is an alarm, and the next run is made all the same
            except Exception as error:
                kinds["ended"] += 1
                print(f"  {name}, seed {seed}: {type(error).__name__}: {error}", flush=True)

            for event in read_events(playground.folder / "run"):
                kinds[event.kind] += 1
                if event.kind == "checks":
                    unproven.update(dict(event.fields["not_checked"]))  # type: ignore[call-overload]

                if event.kind in ("warning", "finding"):
                    print(
                        f"  {name}, seed {seed}, step {event.step}: {event.kind}: {event.message}",
                        flush=True,
                    )

            for record in read_metrics(playground.folder / "run"):
                checked += record.values.get("timing_s/check", 0.0)
                total += record.values.get("timing_s/step", 0.0)
                steps += record.kind == "train"

    left = ", ".join(unproven) or "none"
    return (
        f"| {name} | {len(seeds)} | {steps:,} | {kinds['checks']} | {left} | {kinds['warning']} | "
        f"{kinds['finding']} | "
        f"{kinds['ended']} | {checked / max(total, 1e-9):.1%} |"
    )


if __name__ == "__main__":
    main()
