"""A watched config: the same values, and the names of the keys that were read."""

from dataclasses import dataclass, field

from distflow.config import Config, config_from_dict, key, register_config_group
from distflow.config.compose.unknown_and_unused_keys import peek, plain, watch, whole
from distflow.config.keys.schema import schema_keys
from tests.user_code import forgotten


@dataclass(frozen=True)
class Inner:
    depth: int = 2


@dataclass(frozen=True)
class Mine:
    strength: float = key(1.0, "how strong")
    inner: Inner = field(default_factory=Inner)


def test_a_read_key_is_noted_with_its_dotted_name_and_has_its_value() -> None:
    config, reads = watch(Config())
    assert reads == set()
    assert config.algorithm.kl_ctrl.kl_coef == Config().algorithm.kl_ctrl.kl_coef
    assert reads == {"algorithm.kl_ctrl.kl_coef"}


def test_a_group_that_is_passed_on_is_not_read() -> None:
    config, reads = watch(Config())
    optim = config.actor_rollout_ref.actor.optim
    assert reads == set()
    assert optim.lr > 0
    assert reads == {"actor_rollout_ref.actor.optim.lr"}


def test_names_are_those_of_yaml() -> None:
    config, reads = watch(Config())
    assert config.async_.max_staleness == 0
    assert reads == {"async.max_staleness"}
    assert reads <= set(schema_keys())


def test_a_property_notes_what_it_reads() -> None:
    config, reads = watch(Config())
    assert config.trainer.run_dir == Config().trainer.run_dir
    assert {"trainer.project_name", "trainer.experiment_name"} <= reads <= set(schema_keys())


def test_a_look_is_no_use() -> None:
    config, reads = watch(Config())
    assert peek(config) == Config() and peek(config.trainer).seed == Config().trainer.seed
    assert reads == set()
    assert peek(Config()) == Config(), "of a plain config it is the config itself"


def test_who_is_handed_a_group_whole_may_read_all_below_it() -> None:
    config, reads = watch(Config())
    assert whole(config.critic) == Config().critic
    assert reads == {name for name in schema_keys() if name.startswith("critic.")}
    assert whole(Config().critic) == Config().critic


def test_a_group_as_a_mapping_of_its_own_keys() -> None:
    config, reads = watch(Config())
    values = plain(config.actor_rollout_ref.actor)
    assert values["ppo_epochs"] == 1 and values["optim"] == Config().actor_rollout_ref.actor.optim
    assert {"actor_rollout_ref.actor.ppo_epochs", "actor_rollout_ref.actor.optim.lr"} <= reads
    assert plain(Config().actor_rollout_ref.actor) == values


def test_the_attributes_are_those_of_the_group() -> None:
    config, reads = watch(Config())
    public = [name for name in dir(config.algorithm) if not name.startswith("_")]
    assert public == [name for name in dir(Config().algorithm) if not name.startswith("_")]
    assert not hasattr(config.algorithm, "no_such_key") and reads == set()


def test_a_group_that_a_user_registered() -> None:
    with forgotten():
        register_config_group("mine", Mine)
        config, reads = watch(config_from_dict({"mine": {"strength": 0.5}}, judge=False))
        assert config.mine.strength == 0.5 and config.mine.inner.depth == 2
        assert reads == {"mine.strength", "mine.inner.depth"}
