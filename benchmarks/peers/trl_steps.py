"""GRPO steps of TRL over the same work, by `GRPOTrainer`; run with the Python of
`make bench-peers`.

    .peers/trl/bin/python benchmarks/peers/trl_steps.py FOLDER

FOLDER/job.json has `prompts`, `steps`, `longest`, `bfloat16`, `micro_batch`, `on_gpu`, and `vllm`,
which generates on the trainer's device. FOLDER/done.json gets seconds and answered tokens of each
step but the first.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration


def share_of_even(completions: list[str], **_: Any) -> list[float]:
    scores = []
    for completion in completions:
        words = completion.split()
        scores.append(sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1))
    return scores


def load_at_once(generation: Any) -> None:
    """In place of TRL's `sync_weights`, which loads one tensor after another: the CPU build of vLLM
    has packed its weights, so that this fails there."""
    worker = generation.llm.llm_engine.model_executor.driver_worker
    worker.model_runner.reload_weights(
        weights_iterator=generation._iter_named_params(), is_checkpoint_format=True
    )
    generation.llm.reset_prefix_cache()


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.time())


def main() -> None:
    folder = Path(sys.argv[1])
    wanted = json.loads((folder / "job.json").read_text())
    samples = wanted["prompts"] * 8
    clock = Clock()
    if wanted["vllm"] and not wanted["on_gpu"]:
        VLLMGeneration.sync_weights = load_at_once

    with tempfile.TemporaryDirectory() as output_dir:
        config = GRPOConfig(
            output_dir=output_dir,
            per_device_train_batch_size=wanted["micro_batch"],
            gradient_accumulation_steps=samples // wanted["micro_batch"],
            num_generations=8,
            max_completion_length=wanted["longest"],
            max_steps=wanted["steps"],
            learning_rate=1e-6,
            weight_decay=0.01,
            bf16=wanted["bfloat16"],
            use_cpu=not wanted["on_gpu"],
            use_vllm=wanted["vllm"],
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.4,
            gradient_checkpointing=False,
            beta=0.0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32"),
            reward_funcs=share_of_even,
            args=config,
            train_dataset=load_dataset(
                "json", data_files=str(folder / "rows.jsonl"), split="train"
            ),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            callbacks=[clock],
        )
        trainer.train()

    lengths = [
        log["completions/mean_length"]
        for log in trainer.state.log_history
        if "completions/mean_length" in log
    ]
    ends = clock.ends
    steps = [
        {"seconds": end - before, "tokens": length * samples}
        for before, end, length in zip(ends, ends[1:], lengths[1:], strict=False)
    ]
    (folder / "done.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
