"""The schema: described keys, built-in names that match the registries, groups of users, docs that
are up to date."""

import copy
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distflow import builtin_names as table
from distflow.config import (
    Config,
    ConfigError,
    config_from_dict,
    key,
    load_config,
    register_config_group,
    to_dict,
)
from distflow.config.keys.schema import schema_keys
from distflow.config.rules.check_config import check
from scripts import make_docs

GOOD = ["data.train_files=train.jsonl", "actor_rollout_ref.model.path=model"]
REPOSITORY = Path(__file__).parents[3]


@dataclass(frozen=True)
class Inner:
    depth: int = key(2, "how deep", minimum=1)


@dataclass
class MyCustomArguments:
    """As in the guide for adding a group: a plain dataclass with help texts."""

    enable_feature: bool = field(default=False, metadata={"help": "Enable the custom feature"})
    feature_threshold: float = key(0.5, "Threshold for the custom feature", minimum=0, maximum=1)
    feature_config: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Additional configuration"}
    )
    inner: Inner = field(default_factory=Inner)


@pytest.fixture
def my_custom(monkeypatch):
    from distflow.config.keys import schema

    monkeypatch.setattr(schema, "_user_groups", {})
    schema_keys.cache_clear()
    register_config_group("my_custom", MyCustomArguments)
    yield
    schema_keys.cache_clear()


@pytest.mark.parametrize("name", schema_keys())
def test_every_key_is_described(name):
    info = schema_keys()[name]
    assert len(info.spec.description) > 5


def test_defaults_break_no_bound():
    """All that is wrong with the defaults is that data and model are missing."""
    with pytest.raises(ConfigError) as caught:
        check(Config())
    assert {problem.places[0][0] for problem in caught.value.problems} == {
        "data.train_files",
        "actor_rollout_ref.model.path",
    }


@pytest.mark.parametrize(
    ("page", "render"),
    [
        ("config.md", make_docs.render_reference),
        ("migrating.md", make_docs.render_migrating),
        ("schema.md", make_docs.render_schema),
        ("metrics.md", make_docs.render_metrics),
        ("methods.md", make_docs.render_methods),
    ],
)
def test_the_docs_are_up_to_date(page, render):
    written = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    assert written == render(), "run make docs"


def test_kl_types_are_those_of_the_algorithms():
    from distflow.algorithms.kl import check_kl_type

    for name in table.KL_TYPES:
        check_kl_type(name)


def test_a_group_of_the_users_own(my_custom):
    loaded = load_config(
        "grpo", [*GOOD, "my_custom.feature_threshold=0.7", "my_custom.feature_config={key1: a}"]
    )
    group = loaded.config.my_custom
    assert (group.enable_feature, group.feature_threshold, group.feature_config) == (
        False,
        0.7,
        {"key1": "a"},
    )
    assert group.inner.depth == 2
    assert loaded.set_keys["my_custom.feature_threshold"] == "command line"
    assert config_from_dict(to_dict(loaded.config)) == loaded.config
    assert (
        pickle.loads(pickle.dumps(loaded.config)) == copy.deepcopy(loaded.config) == loaded.config
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("my_custom.feature_threshold=2", "≥ 0 and ≤ 1"),
        ("my_custom.feature_thresold=0.5", "did you mean my_custom.feature_threshold?"),
        ("my_custom.enable_feature=maybe", "write true or false"),
        ("my_custom.inner.depth=0", "≥ 1"),
    ],
)
def test_a_group_of_the_users_own_is_checked_as_the_others(my_custom, override, said):
    with pytest.raises(ConfigError, match=said):
        load_config("grpo", [*GOOD, override])


def test_a_module_of_trainer_imports_registers_its_group(tmp_path, monkeypatch):
    from distflow.config.keys import schema

    monkeypatch.setattr(schema, "_user_groups", {})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_groups_module.py").write_text(
        "from dataclasses import dataclass\n"
        "from distflow.config import key, register_config_group\n"
        "@dataclass(frozen=True)\n"
        "class Late:\n"
        "    size: int = key(1, 'its size')\n"
        "register_config_group('late', Late)\n"
    )

    try:
        loaded = load_config("grpo", [*GOOD, "trainer.imports=[my_groups_module]", "late.size=4"])
        assert loaded.config.late.size == 4
    finally:
        schema_keys.cache_clear()


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match="no_such_module_here") as caught:
        load_config("grpo", [*GOOD, "trainer.imports=[no_such_module_here]", "late.size=4"])
    assert {problem.places[0][0] for problem in caught.value.problems} == {
        "trainer.imports",
        "late.size",
    }


def test_an_unknown_group_is_no_attribute():
    with pytest.raises(AttributeError, match="no group 'my_custm'"):
        _ = Config().my_custm


@dataclass
class Plain:
    size: int = 1


@dataclass
class Needy:
    size: int


@dataclass
class Strange:
    pattern: Path = Path()


@pytest.mark.parametrize(
    ("name", "group", "said"),
    [
        ("trainer", Plain, "taken"),
        ("async", Plain, "taken"),
        ("my-group", Plain, "no identifier"),
        ("mine", int, "no dataclass"),
        ("mine", Needy, "needs a default"),
        ("mine", Strange, "cannot be read from YAML"),
    ],
)
def test_a_group_that_cannot_be_registered(name, group, said):
    with pytest.raises(ValueError, match=said):
        register_config_group(name, group)
