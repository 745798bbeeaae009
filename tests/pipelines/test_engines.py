"""Engines from a config: which class, with which of its keys, and for how many optimizer steps."""

import pytest
from distflow.pipelines.engines import build_engines, load_policy, load_policy_tokenizer, rollout_settings

from distflow.config import Config, load_config
from distflow.rollout.embedded.engine import EmbeddedEngine
from distflow.rollout.hf import HFEngine
from distflow.training.torch_engine import TorchTrainEngine

NEEDED = (
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "actor_rollout_ref.model.init=random",
    "data.train_files=rows.jsonl",
)
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def config(preset: str, *overrides: str) -> Config:
    return load_config(preset, [*NEEDED, *overrides]).config


def falls_to_zero_at(engine: object) -> int:
    """The optimizer step at which a linear schedule has come to its end."""
    assert isinstance(engine, TorchTrainEngine)
    return next(step for step in range(1000) if engine.schedule(step) == 0.0)


def test_warm_up_of_the_critic_is_taken_off_the_actors_schedule_and_not_off_the_critics() -> None:
    linear = ("scheduler=linear_with_warmup", "warmup_ratio=0.0", "min_lr_ratio=0.0")
    settings = config(
        "ppo",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=5",
        "data.train_batch_size=5",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_epochs=2",
        "critic.ppo_mini_batch_size=4",
        "critic.ppo_epochs=3",
        *(f"{ACTOR}.optim.{change}" for change in linear),
        *(f"critic.optim.{change}" for change in linear),
    )
    engines = build_engines(settings, load_policy(settings), {"critic"}, None, steps=5)
    assert falls_to_zero_at(engines.actor) == (5 - 2) * 2 * 3, "3 steps, 2 passes, 2 + 2 + 1 prompts"
    assert falls_to_zero_at(engines.critic) == 5 * 3 * 2, "5 steps, 3 passes, 4 + 1 prompts"


@pytest.mark.parametrize(
    ("name", "made", "taken"), [("embedded", EmbeddedEngine, {"max_num_seqs": 7}), ("hf", HFEngine, {})]
)
def test_a_rollout_engine_gets_the_keys_that_its_constructor_names(
    name: str, made: type, taken: dict[str, object]
) -> None:
    settings = config("grpo", f"{ROLLOUT}.name={name}", f"{ROLLOUT}.max_num_seqs=7")
    assert rollout_settings(settings) == taken
    engines = build_engines(settings, load_policy(settings), {"rollout"}, load_policy_tokenizer(settings), steps=1)
    assert type(engines.rollout) is made and engines.critic is None and engines.ref is None
