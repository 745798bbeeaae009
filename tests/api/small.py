"""The smallest run there is, for tests of what is around it."""

from pathlib import Path

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 5) for b in range(1, 3)]


def small(folder: Path, **changed: object) -> dict[str, object]:
    """Overrides of `TINY`; in `changed` two underscores stand for a dot."""
    return {
        "data": {"train_batch_size": 2, "max_response_length": 4},
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.rollout.n": 2,
        "trainer": {
            "default_local_dir": folder,
            "total_training_steps": 2,
            "resume_mode": "auto",
            "save_freq": 1,
            "keep_last": 5,
        },
        "trust.check_freq": 0,
        "trust.check_rewards": False,
        "reward.num_workers": 1,
        **{name.replace("__", "."): value for name, value in changed.items()},
    }
