"""A training loop of your own: distflow answers and judges prompts ahead of it, GRPO is written out
here.

python examples/own_loop.py
"""

import distflow
from distflow.algorithms.methods.grpo import compute_grpo_advantage
from distflow.algorithms.objectives import PolicyObjective


def reward(solution_str):
    """The share of digits in the answer: the model, whose weights begin random, learns to write
    nothing else."""
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)


def main(**overrides):
    settings = {
        "async.max_staleness": 1,
        "trainer.experiment_name": "own_loop",
        "trainer.total_training_steps": 30,
    }
    objective = PolicyObjective("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2})

    with distflow.rollouts(
        "examples/tiny.yaml", {**settings, **overrides}, reward=reward
    ) as rollouts:
        while batch := rollouts.prepare_batch():
            batch["old_log_probs"] = rollouts.actor.forward(batch, ("log_probs",))["log_probs"]
            batch["advantages"], _ = compute_grpo_advantage(
                batch["token_level_rewards"],
                batch["response_mask"],
                batch["group_index"],
                batch["valid"],
            )
            for minibatch in batch.chunk(2):
                rollouts.actor.train_step(minibatch, objective)
            metrics = rollouts.publish()
            print(f"version {rollouts.version}: reward {metrics['reward/mean_score']:.2f}")

    return rollouts.run


if __name__ == "__main__":
    main()
