"""Trains on sums. Reading it must not run it: `os._exit` would end the process."""

import os

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

os._exit(7)


def short(completions, **kwargs):
    return [-len(text) / 1000 for text in completions]


args = GRPOConfig(
    output_dir="outputs/sums",
    run_name="sums",
    learning_rate=5e-6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    num_generations=8,
    num_iterations=2,
    max_completion_length=64,
    mask_truncated_completions=True,
    temperature=0.9,
    beta=0.04,
    adam_beta2=0.99,
    max_steps=200,
    save_strategy="steps",
    save_steps=50,
    warmup_steps=int(os.environ["WARMUP"]),
    lr_scheduler_type="cosine",
    top_entropy_quantile=0.2,
    use_vllm=True,
    vllm_gpu_memory_utilization=0.3,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[accuracy_reward, short],
    args=args,
    train_dataset=load_dataset("my/sums", "small")["train"],
    peft_config=LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
