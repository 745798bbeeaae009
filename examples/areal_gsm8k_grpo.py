"""AReaL's `examples/math/gsm8k_grpo.py`, translated line by line, on the quickstart's tiny model
and two-digit sums.

python examples/areal_gsm8k_grpo.py
python examples/areal_gsm8k_grpo.py trainer.launcher=ray trainer.n_gpus_per_node=2
trainer.device=cpu
"""

import sys

import distflow
from distflow.algorithms.methods.grpo import compute_grpo_advantage
from distflow.algorithms.objectives import PolicyObjective

# AReaL's config, data loaders, allocation, saver, evaluator and recover handler are keys of the
# run.
SETTINGS = [
    "data.val_files=builtin:arithmetic-val",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "async.max_staleness=0",
    "trainer.experiment_name=areal_gsm8k_grpo",
    "trainer.total_training_steps=10",
    "trainer.save_freq=5",
    "trainer.test_freq=5",
    "trainer.resume_mode=auto",
]


def gsm8k_reward_fn(solution_str, ground_truth):
    """1 for the right sum; up to 0.5 for digits, since the weights begin random."""
    digits = sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)
    return 1.0 if solution_str.strip() == ground_truth else digits / 2


def compute_advantages(batch):
    batch["advantages"], _ = compute_grpo_advantage(
        batch["token_level_rewards"], batch["response_mask"], batch["group_index"], batch["valid"]
    )


def main(*overrides):
    """overrides: keys of the run, as on the command line."""
    loss = PolicyObjective(
        "vanilla", {"clip_ratio_low": 0.2}, kl_loss_type="low_var_kl", kl_loss_coef=0.001
    )

    with distflow.rollouts(
        "examples/tiny.yaml", [*SETTINGS, *overrides], reward=gsm8k_reward_fn
    ) as rollout:
        actor = rollout.actor
        ref = rollout.ref

        for global_step in range(rollout.version, rollout.config.trainer.total_training_steps):
            batch = rollout.prepare_batch(should_accept=lambda group: True)
            batch.copy_columns(actor.forward(batch, ("log_probs",)), old_log_probs="log_probs")
            batch.copy_columns(ref.forward(batch, ("log_probs",)), ref_log_prob="log_probs")
            rollout.apply(batch, compute_advantages)
            for minibatch in batch.chunk(2):  # ppo_update
                actor.train_step(minibatch, loss)
            rollout.pause()
            metrics = rollout.publish()  # update_weights, set_version, save, evaluate, commit
            rollout.resume()
            print(f"step {global_step + 1}: reward {metrics['reward/mean_score']:.3f}")

    return rollout.run


if __name__ == "__main__":
    main(*sys.argv[1:])
