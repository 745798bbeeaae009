from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer


def reward(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


if __name__ == "__main__":
    settings = {"learning_rate": 1e-6, "max_completion_length": 64, "num_train_epochs": 1, "epsilon": 0.1}
    args = RLOOConfig(
        output_dir="rloo",
        per_device_train_batch_size=16,
        num_generations=4,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        reward_clip_range=(-5.0, 5.0),
        reward_weights=[0.5],
        **settings,
    )
    rows = load_dataset("trl-lib/ultrafeedback-prompt", split="train")
    trainer = RLOOTrainer("Qwen/Qwen2-0.5B-Instruct", reward_funcs=reward, args=args, train_dataset=rows)
    trainer.train()
