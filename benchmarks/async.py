"""Wall clock of the same pipeline at several bounds on staleness, on the same long-tail work and
the same cores.

    python benchmarks/async.py [--steps 20 --rounds 3 --eta 0 1 2 4]

Every run is a `distflow train` of its own: GRPO with decoupled PPO on a random decoder whose
answers end at about one token in sixty-four, at most at 512, so that the longest of a step is many
times the mean. Latency comes from generated tokens and from a verifier that computes (it counts
primes for as many steps as the answer has tokens, some milliseconds); nothing sleeps. Rounds take
turns. At staleness 0 both planes have all cores in turn; above it they share them out
(`trainer.num_threads`, `actor_rollout_ref.rollout.num_threads`), as a run does by default. All
checks are on.

Printed for each bound: the median of the seconds from the first prompt's start to the end of the
last step, warm-up and the last steps, for which nothing more is generated, included; how that
compares with staleness 0; how much of that time either plane was idle (the trainer waited for
groups; no slot was decoded); the mean staleness of the oldest token; and the mean reward of the
last quarter of the steps.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from distflow.observe.report.activity import covered, read_activity
from distflow.observe.run_reader import MetricsRecord, read_metrics
from distflow.scheduling.ledger import timeline

VERIFIER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    primes = 0
    for number in range(2, 60 + 3 * len(solution_str.split())):
        primes += all(number % divisor for divisor in range(2, number))
    words = solution_str.split()
    return sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)
"""


@dataclass(frozen=True)
class Result:
    """seconds: of the whole run but its start. waited, idle: shares of it. staleness: mean over
    steps. reward: of
    the last quarter."""

    seconds: float
    waited: float
    idle: float
    staleness: float
    reward: float


def prepare(folder: Path, hidden: int, layers: int) -> None:
    """A random model over 64 words of which one ends an answer, its data and its verifier."""
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    wrapped.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 32),
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = (
        f'{{"prompt": "w{i % 60} w{i * 7 % 60} w{i * 11 % 60}", "answer": ""}}\n'
        for i in range(512)
    )
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "verifier.py").write_text(VERIFIER)


def run(folder: Path, name: str, staleness: int, steps: int) -> Result:
    command = [
        *(sys.executable, "-m", "distflow", "train", "grpo"),
        f"data.train_files={folder}/rows.jsonl",
        "data.train_batch_size=16",
        "data.max_prompt_length=8",
        "data.max_response_length=512",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.dtype=float32",
        "actor_rollout_ref.actor.policy_loss=decoupled",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.rollout.n=8",
        "reward.functions={default: [custom]}",
        f"custom_reward_function.path={folder}/verifier.py",
        f"async.max_staleness={staleness}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={folder}/{name}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")

    return measured(folder / name)


def measured(run_dir: Path) -> Result:
    steps = [record for record in read_metrics(run_dir) if record.kind == "train"]
    first = next(
        record for _, record in timeline(run_dir / "ledger.jsonl") if record["kind"] == "issued"
    )
    start = first["t"]
    end = steps[-1].t
    activity = read_activity(run_dir)
    seconds = end - start

    waits = []
    for span in activity.spans.get("training", ()):
        if span.kind == "wait" and span.what.startswith("step "):
            waits.append((span.start, span.end))

    return Result(
        seconds,
        covered(waits, start, end) / seconds,
        1 - activity.decoded(start, end) / seconds,
        _mean(steps, "async/version_diff/max"),
        _mean(steps[-len(steps) // 4 :], "reward/mean_score"),
    )


def _mean(steps: list[MetricsRecord], name: str) -> float:
    return statistics.mean(record.values[name] for record in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eta", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}", flush=True)

    found: dict[int, list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, arguments.hidden, arguments.layers)

        for index in range(arguments.rounds):
            for staleness in arguments.eta:
                found[staleness].append(
                    run(folder, f"eta{staleness}-{index}", staleness, arguments.steps)
                )

    print(
        "| η | s | speed | trainer waits | engine idle | oldest token, steps | reward |\n"
        "|---|---|---|---|---|---|---|"
    )
    base = statistics.median(result.seconds for result in found[arguments.eta[0]])

    for staleness, results in found.items():
        mid = {
            key: statistics.median(getattr(r, key) for r in results)
            for key in Result.__dataclass_fields__
        }
        spread = f"{min(r.seconds for r in results):.1f}-{max(r.seconds for r in results):.1f}"
        print(
            f"| {staleness} | {mid['seconds']:.1f} ({spread}) | {base / mid['seconds']:.2f} | "
            f"{mid['waited']:.0%} | "
            f"{mid['idle']:.0%} | {mid['staleness']:.1f} | {mid['reward']:.3f} |"
        )


if __name__ == "__main__":
    main()
