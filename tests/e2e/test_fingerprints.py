"""Short runs end where they ended before: a change that should change no result changes none, bit
for bit.

`fingerprints.json` holds the groups that were consumed and a few metrics in full, and for each
machine that recorded them a hash of the trained weights and of the texts that were sampled. On a
machine that is not listed bits may differ, and the metrics are compared within what the rounding of
another processor makes of them. After a change that is meant to change results, or on a machine
that is to be listed, record by

    python -m tests.e2e.test_fingerprints
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.models.cpu_kernels import build as native
from distflow.observe.run_reader import sample_files
from distflow.observe.sample_files import DROPPED, read_sample_file
from distflow.scheduling import ledger
from tests.e2e.runs import Playground, Run
from tests.sparse_params import one_fast_in

FILE = Path(__file__).with_name("fingerprints.json")
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
ALGORITHM = "algorithm"
RL_ONLY = ("reward.functions", "reward.num_workers", "custom_reward_function.path", f"{ROLLOUT}.n")
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("grpo", f"{ROLLOUT}.temperature=0.9"),
    "grpo_bfloat16": (
        "grpo",
        "actor_rollout_ref.model.dtype=bfloat16",
        f"{ACTOR}.ppo_max_token_len_per_gpu=60",
    ),
    "grpo_lora_hf": (
        "grpo",
        "actor_rollout_ref.model.lora_rank=2",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.top_p=0.9",
    ),
    "decoupled": (
        "grpo",
        f"{ACTOR}.policy_loss=decoupled",
        f"{ACTOR}.ppo_mini_batch_size=2",
    ),
    "corrected": (
        "grpo",
        f"{ALGORITHM}.rollout_correction.rollout_is=sequence",
        f"{ALGORITHM}.adv_estimator=rloo",
    ),
    "remax": ("grpo", f"{ALGORITHM}.adv_estimator=remax"),
    "ppo": (
        "ppo",
        f"{ROLLOUT}.n=2",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.ppo_mini_batch_size=3",
        "critic.ppo_epochs=2",
        "trainer.critic_warmup=1",
        *(
            f"{ALGORITHM}.kl_ctrl.{key}"
            for key in ("type=adaptive", "target_kl=0.1", "horizon=100")
        ),
    ),
    "dapo": (
        "dapo",
        f"{ROLLOUT}.n=3",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.entropy_coef=0.01",
        "reward.overlong.buffer_tokens=4",
        f"{ALGORITHM}.filter_groups.metric=score",
    ),
    "sft": (
        "sft",
        "data.response_key=answer",
        f"{ACTOR}.ppo_mini_batch_size=2",
        *(f"~{key}" for key in RL_ONLY),
    ),
}
STEPS = 4
KEPT_METRICS = (
    "actor/loss",
    "actor/grad_norm",
    "critic/loss",
    "sft/loss",
    "reward/mean_score",
    "actor/entropy",
)
NEEDED = (
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "trainer.save_groups=all",
)


# variables by which another processor's code is taken
CHOOSES_CODE = ("ATEN_", "ONEDNN_", "DNNL_", "MKL_")
# The largest difference that was seen was 3e-6, over torch's and oneDNN's code for four generations
# of processors.
OTHER_ROUNDING = 1e-4


def fingerprint(run: Run) -> dict[str, Any]:
    """What a run computed, apart from times and from how its folder is laid out."""
    weights = hashlib.sha256()
    for role in ("actor", "critic"):
        if (run.folder / "checkpoints" / f"step-{STEPS:06d}" / f"{role}.safetensors").exists():
            for name, tensor in sorted(run.weights(STEPS, role).items()):
                weights.update(
                    name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes()
                )

    files = [file for file, split, _ in sample_files(run.folder) if split != DROPPED]
    rows = [row for file in files for row in read_sample_file(file, run.folder)[0]]
    texts = [[row["uid"], row["response"], row["score"], row["advantage"]] for row in rows]
    journal = [record for _, record in ledger.timeline(run.folder / "ledger.jsonl")]
    prompt_groups = [record["group_ids"] for record in journal if record["kind"] == "consumed"]
    metrics = [
        {name: step[name] for name in KEPT_METRICS if name in step} for step in run.metrics()
    ]

    return {
        "weights": weights.hexdigest(),
        "texts": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        "group_ids": prompt_groups,
        "metrics": metrics,
    }


def machine() -> dict[str, str]:
    """What bits hang on besides the code. Native code's name is of its source, the compiler and the
    processor."""
    cpu = next(
        (
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    chosen = sorted(
        f"{key}={value}" for key, value in os.environ.items() if key.startswith(CHOOSES_CODE)
    )

    return {
        "torch": torch.__version__,
        "cpu": cpu.partition(":")[2].strip(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "native": native.name(),
        "chosen": " ".join(chosen),
    }


def run(name: str, folder: Path) -> dict[str, Any]:
    preset, *options = RUNS[name]
    return fingerprint(Playground(folder).run(preset, *options, *NEEDED))


def bits_of(record: dict[str, Any]) -> dict[str, str]:
    return {key: record[key] for key in ("weights", "texts")}


def recorded_bits(recorded: dict[str, Any]) -> dict[str, Any] | None:
    """By run, those of this machine."""
    return next(
        (each["bits"] for each in recorded["machines"] if each["machine"] == machine()), None
    )


@pytest.mark.parametrize("name", one_fast_in(99, RUNS))
def test_a_run_ends_where_it_ended(name: str, tmp_path: Path) -> None:
    recorded = json.loads(FILE.read_text())
    now = run(name, tmp_path)
    before = recorded["runs"][name]
    check_near(name, now, before)
    bits = recorded_bits(recorded)
    if bits is not None:
        assert bits_of(now) == bits[name]


def check_near(name: str, now: dict[str, Any], before: dict[str, Any]) -> None:
    assert [list(step) for step in now["metrics"]] == [list(step) for step in before["metrics"]]
    assert now["group_ids"] == before["group_ids"]

    # its products round in another order on another processor, and other tokens are drawn
    if "bfloat16" in name:
        return
    for ours, theirs in zip(now["metrics"], before["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=OTHER_ROUNDING, abs=OTHER_ROUNDING)


def all_near(runs: dict[str, Any], recorded: dict[str, Any]) -> bool:
    try:
        for name in RUNS:
            check_near(name, runs[name], recorded[name])
    except AssertionError:
        return False
    return True


def record() -> None:
    """Adds this machine; alone where results have changed: bits that it has recorded, or figures
    beyond rounding."""
    runs = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = run(name, Path(folder))

    bits = {name: bits_of(each) for name, each in runs.items()}
    recorded = json.loads(FILE.read_text())
    before = recorded_bits(recorded)
    if bits == before:
        return

    if before is None and all_near(runs, recorded["runs"]):
        recorded["machines"].append({"machine": machine(), "bits": bits})
    else:
        kept = {
            name: {key: each[key] for key in ("group_ids", "metrics")}
            for name, each in runs.items()
        }
        recorded = {"machines": [{"machine": machine(), "bits": bits}], "runs": kept}

    FILE.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record()
