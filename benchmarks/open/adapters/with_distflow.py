"""`distflow train` as it ships, with its checks and records on.

python adapters/with_distflow.py FOLDER OUT"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from distflow.launch.run_folders.export_checkpoint import export_checkpoint
from distflow.observe.run_reader import read_metrics
from distflow.runtime.saved_groups import load_groups

REWARD = """
import importlib.util

spec = importlib.util.spec_from_file_location("reward", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def compute_score(solution_str, ground_truth):
    return module.score(solution_str, ground_truth)
"""
LOSSES = {
    "grpo": ("actor/pg_loss", "actor/grad_norm"),
    "sft": ("sft/loss", "sft/grad_norm"),
    "dpo": ("preference/loss", "preference/grad_norm"),
}


def run(folder: Path, out: Path) -> None:
    task: dict[str, Any] = json.loads((folder / "task.json").read_text())
    out.mkdir(exist_ok=True)
    run_dir = out / "run"
    command = [sys.executable, "-m", "distflow", "train", task["kind"], *settings(task, folder)]
    subprocess.run([*command, f"trainer.default_local_dir={run_dir}"], check=True)
    for checkpoint in (run_dir / "checkpoints").glob("step-*"):
        number = str(int(checkpoint.name.partition("-")[2]))
        export_checkpoint(checkpoint, out / "weights" / number)

    loss, norm = LOSSES[task["kind"]]
    records = [record for record in read_metrics(run_dir) if record.kind == "train"]
    with (out / "updates.jsonl").open("w") as file:
        for number, record in enumerate(records, 1):
            line = {
                "seconds": record.t,
                "loss": record.values[loss],
                "grad_norm": record.values[norm],
                "rows": rows_of(task, run_dir, number),
            }
            file.write(json.dumps(line) + "\n")


def settings(task: dict[str, Any], folder: Path) -> list[str]:
    actor = "actor_rollout_ref.actor"
    found = [
        f"data.train_files={folder}/rows.jsonl",
        f"data.train_batch_size={task['rows']}",
        "data.shuffle=false",
        "data.max_prompt_length=16",
        f"data.max_response_length={task['longest']}",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.dtype=float32",
        f"{actor}.optim.lr={task['lr']}",
        f"{actor}.optim.scheduler=constant",
        f"{actor}.optim.weight_decay=0",
        f"{actor}.ppo_mini_batch_size={task['rows']}",
        f"trainer.total_training_steps={task['updates']}",
        "trainer.total_epochs=1",
        "trainer.test_freq=-1",
        "trainer.save_groups=all",
        f"trainer.save_freq={task['saved_every']}",
        f"trainer.keep_last={task['updates']}",
    ]
    if task["kind"] == "grpo":
        (folder.parent / "distflow_reward.py").write_text(
            REWARD.format(path=str(folder / "reward.py"))
        )
        found += [
            f"actor_rollout_ref.rollout.n={task['samples']}",
            f"{actor}.use_kl_loss=false",
            "algorithm.norm_adv_by_std_in_grpo=false",
            "reward.functions={default: [custom]}",
            f"custom_reward_function.path={folder.parent}/distflow_reward.py",
        ]
    if task["kind"] == "sft":
        found += ["data.response_key=answer"]
    if task["kind"] == "dpo":
        found += [f"algorithm.preference_loss_kwargs.beta={task['beta']}"]
    return found


def rows_of(task: dict[str, Any], run_dir: Path, step: int) -> list[dict[str, Any]]:
    batch = load_groups(run_dir, step)
    prompts = parts(batch, "prompt")
    responses = parts(batch, "response")
    if task["kind"] == "dpo":
        pairs = zip(prompts[::2], responses[::2], responses[1::2], strict=True)
        return [
            {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
            for prompt, chosen, rejected in pairs
        ]

    rows = [
        {"prompt_ids": prompt, "response_ids": response}
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    if task["kind"] == "grpo":
        for row, score in zip(rows, batch["scores"].tolist(), strict=True):
            row["reward"] = score
    return rows


def parts(batch: Any, axis: str) -> list[list[int]]:
    lengths = batch.lengths(axis).tolist()
    return [ids.tolist() for ids in batch.flat(f"{axis}_ids").split(lengths)]


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
