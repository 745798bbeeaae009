"""TRL's trainers, in the environment of `make bench-peers`.

.peers/trl/bin/python adapters/with_trl.py FOLDER OUT"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

Rows = list[dict[str, Any]]


class Clock(TrainerCallback):
    """When training began, and when each update ended."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.ends: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.time() - self.begin)


def run(folder: Path, out: Path) -> None:
    task: dict[str, Any] = json.loads((folder / "task.json").read_text())
    clock = Clock()
    updates: list[Rows] = []
    trainer = make_trainer(task, folder, out, clock, updates)
    trainer.train()
    (out / "weights").mkdir()
    for checkpoint in (out / "trl").glob("checkpoint-*"):
        number = checkpoint.name.partition("-")[2]
        checkpoint.rename(out / "weights" / number)

    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    lines = zip(logs, clock.ends, updates, strict=False)  # a batch more may have been prepared
    with (out / "updates.jsonl").open("w") as file:
        for log, end, rows in lines:
            line = {
                "seconds": end,
                "loss": float(log["loss"]),
                "grad_norm": float(log["grad_norm"]),
                "rows": rows,
            }
            file.write(json.dumps(line) + "\n")


def make_trainer(
    task: dict[str, Any], folder: Path, out: Path, clock: Clock, updates: list[Rows]
) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    shared = {
        "output_dir": str(out / "trl"),
        "max_steps": task["updates"],
        "learning_rate": task["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "steps",
        "save_steps": task["saved_every"],
        "save_only_model": True,
        "disable_tqdm": True,
        "seed": task["seed"],
    }
    given = {
        "model": AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32"),
        "processing_class": tokenizer,
        "callbacks": [clock],
    }

    if task["kind"] == "grpo":
        config = GRPOConfig(
            **shared,
            per_device_train_batch_size=task["rows"] * task["samples"],
            num_generations=task["samples"],
            max_completion_length=task["longest"],
            scale_rewards="none",
            loss_type="dapo",
            beta=0.0,
            shuffle_dataset=False,
        )
        reward = recorded_reward(folder, tokenizer, updates)
        return GRPOTrainer(
            args=config, reward_funcs=reward, train_dataset=Dataset.from_list(rows), **given
        )

    shared["per_device_train_batch_size"] = task["rows"]
    shared["train_sampling_strategy"] = "sequential"
    if task["kind"] == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
        config = SFTConfig(**shared, completion_only_loss=True)
        trainer = SFTTrainer(args=config, train_dataset=Dataset.from_list(rows), **given)
    else:
        config = DPOConfig(**shared, beta=task["beta"])
        trainer = DPOTrainer(args=config, train_dataset=Dataset.from_list(rows), **given)

    collate = trainer.data_collator

    def recorded(examples: Rows) -> Any:
        updates.append([tokens_of(example) for example in examples])
        return collate(examples)

    trainer.data_collator = recorded
    return trainer


def tokens_of(example: dict[str, Any]) -> dict[str, Any]:
    if "chosen_ids" in example:
        return {name: list(example[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")}

    ids = list(example["input_ids"])
    is_trained = [label != -100 for label in example["labels"]]
    begin = is_trained.index(True)
    return {"prompt_ids": ids[:begin], "response_ids": ids[begin:]}


def recorded_reward(folder: Path, tokenizer: Any, updates: list[Rows]) -> Any:
    spec = importlib.util.spec_from_file_location("reward", folder / "reward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def reward(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: Any,
    ) -> list[float]:
        scores = [
            module.score(text, right) for text, right in zip(completions, answer, strict=True)
        ]
        updates.append(
            [
                {
                    "prompt_ids": tokenizer(prompt)["input_ids"],
                    "response_ids": list(ids),
                    "reward": score,
                }
                for prompt, ids, score in zip(prompts, completion_ids, scores, strict=True)
            ]
        )
        return scores

    return reward


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
