"""Trains on sums. Reading it must not run it: `os._exit` would end the process."""

import os

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

os._exit(7)

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
STEPS_OF_A_DEVICE = 2 * 4
name = "sums"

if "Llama" in MODEL:
    name = "others"
    output_dir = "outputs/others"
else:
    output_dir = f"outputs/{name}"


def sums(split="train"):
    data = load_dataset("my/sums", "small")[split]
    return data.map(lambda row: {"prompt": row["question"]})


def short(completions, **kwargs):
    return [-len(text) / 1000 for text in completions]


args = GRPOConfig(
    output_dir=output_dir,
    run_name=name,
    learning_rate=5e-6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=STEPS_OF_A_DEVICE,
    num_generations=8,
    num_iterations=2,
    max_completion_length=64,
    mask_truncated_completions=True,
    beta=0.04,
    adam_beta2=0.99,
    max_steps=200,
    save_strategy="steps",
    save_steps=50,
    warmup_steps=int(os.environ["WARMUP"]),
    lr_scheduler_type="cosine",
    top_entropy_quantile=0.2,
)
args.temperature = 0.9
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype="float32", device_map="auto"),
    reward_funcs=[accuracy_reward, short],
    args=args,
    train_dataset=sums(),
    peft_config=LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
