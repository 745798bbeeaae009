"""What a node has by its role, and what `add_node` says in its place."""

import pytest

from distflow.graph import SCORE_FIELDS, Pipeline, node


def plain(responses): ...


def bound_of(fn, whole, **settings):
    return Pipeline("p").add_node("x", fn, **settings).build().bind(whole, ["responses"]).node("x")


SHOWN = {
    "config": lambda bound: bound.config_key,
    "engine": lambda bound: bound.engines,
    "writes": lambda bound: bound.contract.writes,
    "scope": lambda bound: bound.contract.scope,
    "plane": lambda bound: bound.plane,
    "phase": lambda bound: bound.phase,
    "validates": lambda bound: bound.validates,
}


@pytest.mark.parametrize(
    ("field", "role", "by_role", "own", "shown"),
    [
        ("config", "DEFAULT", "", "critic", "critic"),
        ("config", "CRITIC", "critic", "algorithm.kl_ctrl", "algorithm.kl_ctrl"),
        ("config", "ADVANTAGE", "algorithm", {}, None),
        ("writes", "DEFAULT", (), "values", ("values",)),
        ("writes", "REWARD", SCORE_FIELDS, ["values"], ("values",)),
        ("writes", "ADVANTAGE", ("advantages", "returns"), (), ()),
        ("scope", "DEFAULT", "sample", "global", "global"),
        ("scope", "REWARD", "group", "sample", "sample"),
        ("scope", "DYNAMIC_SAMPLING", "group", "sample", "sample"),
        ("plane", "DEFAULT", "rollout", "training", "training"),
        ("plane", "DYNAMIC_SAMPLING", "rollout", "training", "training"),
        ("phase", "DEFAULT", "x", "mine", "mine"),
        ("phase", "ROLLOUT", "x", "mine", "mine"),
        ("phase", "ACTOR", "train_step", "mine", "mine"),
        ("phase", "CRITIC", "train_critic", "mine", "mine"),
        ("phase", "REFERENCE", "ref_logp", "mine", "mine"),
        ("phase", "ADVANTAGE", "compute_advantage", "mine", "mine"),
        ("validates", "DEFAULT", False, True, True),
        ("validates", "ADVANTAGE", False, True, True),
        ("validates", "ROLLOUT", True, False, False),
        ("validates", "REWARD", True, False, False),
    ],
)
def test_a_field_by_role_and_by_add_node(config, field, role, by_role, own, shown):
    assert SHOWN[field](bound_of(plain, config, node_role=role)) == by_role
    assert SHOWN[field](bound_of(plain, config, node_role=role, **{field: own})) == shown


@pytest.mark.parametrize(
    ("role", "engine"),
    [
        ("ACTOR", "actor"),
        ("CRITIC", "critic"),
        ("REFERENCE", "ref"),
        ("ROLLOUT", "rollout"),
        ("REWARD", "reward_model"),
    ],
)
def test_the_engine_by_role_and_by_add_node(config, role, engine):
    def settings(**own):
        return {"node_type": "MODEL_INFERENCE", "node_role": role, **own}

    assert bound_of(plain, config, **settings()).engines == (engine,)
    assert bound_of(plain, config, **settings(engine="ref")).engines == ("ref",)
    assert bound_of(lambda critic: None, config, **settings(engine="ref")).engines == ("critic",), (
        "a parameter says so"
    )
    assert bound_of(lambda engine: None, config, node_role=role).engines == (engine,)


@pytest.mark.parametrize(
    ("role", "phase"),
    [("ACTOR", "recompute_logp"), ("CRITIC", "compute_value"), ("REFERENCE", "ref_logp")],
)
def test_the_phase_of_a_forward_pass(config, role, phase):
    assert bound_of(plain, config, node_role=role, only_forward_compute=True).phase == phase
    assert (
        bound_of(plain, config, node_role=role, only_forward_compute=True, phase="mine").phase
        == "mine"
    )


def test_add_node_goes_before_the_function_and_that_before_the_role(config):
    said = node(role="REWARD", writes="values", scope="sample")(lambda responses: None)
    bound = bound_of(said, config)
    assert (bound.contract.writes, bound.contract.scope, bound.config_key) == (
        ("values",),
        "sample",
        "reward",
    )
    bound = bound_of(said, config, writes="returns", scope="group", node_role="CRITIC")
    assert (bound.contract.writes, bound.contract.scope, bound.config_key) == (
        ("returns",),
        "group",
        "critic",
    )


def test_retries_reach_the_program(config):
    assert bound_of(plain, config, retry_limit=3).retry_limit == 3
