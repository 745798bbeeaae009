"""Peak memory of short runs on this CPU, measured and as `distflow plan` predicts it.

    python benchmarks/plan_memory.py

Each run makes two steps of GRPO with a model with random weights, in a process of its own. Measured
is the highest resident memory (`memory/process/peak`); the plan is given the keys of the run alone.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENIZER = "builtin:tiny-arithmetic"
BASE = (
    Path(__file__).resolve().parents[1] / "src/distflow/models/builtin/tiny-arithmetic/config.json"
)
MODELS = {
    "23.7M": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    | {"num_key_value_heads": 4, "head_dim": 64},
    "22.9M, vocabulary 32,000": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
    }
    | {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 32000},
    "5.1M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 64},
}
SMALL = ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
LONG = ["data.max_response_length=100", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192"]
RUNS = [
    ("23.7M", SMALL),
    ("23.7M", [*SMALL, "actor_rollout_ref.actor.use_kl_loss=true"]),
    ("23.7M", [*SMALL, "actor_rollout_ref.model.enable_gradient_checkpointing=true"]),
    ("22.9M, vocabulary 32,000", SMALL),
    ("5.1M", LONG),
]


def keys_of(folder: Path, overrides: list[str]) -> list[str]:
    model = [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.model.init=random"]
    return [
        "quickstart_grpo",
        *model,
        f"actor_rollout_ref.model.tokenizer_path={TOKENIZER}",
        *overrides,
    ]


def measured(folder: Path, words: list[str]) -> float:
    quiet = [
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "trust.check_freq=0",
    ]
    run = [
        f"trainer.default_local_dir={folder / 'run'}",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
    ]
    command = [sys.executable, "-m", "distflow", "train", *words, *quiet, *run]
    subprocess.run(command, check=True, capture_output=True)
    with (folder / "run/metrics.jsonl").open(encoding="utf-8") as lines:
        return max(float(json.loads(line)["m"]["memory/process/peak"]) for line in lines)


def predicted(words: list[str]) -> float:
    command = [sys.executable, "-m", "distflow", "plan", *words, "--device", "cpu", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return max(float(worker["peak_bytes"]) for worker in json.loads(done.stdout)["memory"])


def main() -> None:
    print("| model | keys | predicted, MB | measured, MB | difference |\n|---|---|---|---|---|")
    for name, overrides in RUNS:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "config.json").write_text(
                json.dumps({**json.loads(BASE.read_text()), **MODELS[name]})
            )
            words = keys_of(folder, overrides)
            ours = predicted(words)
            real = measured(folder, words)

        print(
            f"| {name} | {' '.join(overrides)} | {ours / 1e6:,.0f} | {real / 1e6:,.0f} | "
            f"{ours / real - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
