import argparse

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--data", required=True)
    parser.add_argument("--packing", action="store_true")
    args = parser.parse_args()
    rows = load_dataset("json", data_files=args.data, split="train")
    config = SFTConfig(
        output_dir="out",
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=8,
        max_length=2048,
        packing=args.packing,
        num_train_epochs=2,
        save_strategy="epoch",
    )
    adapters = LoraConfig(r=4)  # tried, and not used
    assert adapters
    SFTTrainer(args.model, args=config, train_dataset=rows).train()


main()
