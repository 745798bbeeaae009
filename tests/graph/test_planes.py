"""Which plane each node runs in, and what only one of them can do."""

import pytest

from distflow.graph import Pipeline, PipelineError, node, node_factory


def plain(ctx): ...


def trains(actor): ...


def generates(rollout): ...


async def waits(ctx): ...


def sums(reduce): ...


def planes(config, *nodes):
    pipeline = Pipeline("p")
    for node_id, fn, deps, settings in nodes:
        pipeline.add_node(node_id, fn, deps, **settings)
    return {n.node_id: n.plane for n in pipeline.build().bind(config, []).nodes}


def fails(config, *nodes):
    with pytest.raises(PipelineError) as caught:
        planes(config, *nodes)
    return str(caught.value)


def test_without_train_engine_or_global_scope_all_is_experience(config):
    assert planes(
        config,
        ("rollout", generates, [], {}),
        ("reward", waits, ["rollout"], {}),
        ("filter", plain, ["reward"], {"node_role": "DYNAMIC_SAMPLING"}),
    ) == {"rollout": "rollout", "reward": "rollout", "filter": "rollout"}


@pytest.mark.parametrize("engine", ["actor", "critic", "ref", "reward_model"])
def test_train_engines_and_what_comes_after_are_learning(config, engine):
    uses = eval(f"lambda {engine}: None")
    assert planes(
        config,
        ("a", plain, [], {}),
        ("uses", uses, ["a"], {}),
        ("beside", plain, ["a"], {}),
        ("after", plain, ["uses"], {}),
        ("join", plain, ["beside", "after"], {}),
    ) == {
        "a": "rollout",
        "uses": "training",
        "beside": "rollout",
        "after": "training",
        "join": "training",
    }


@pytest.mark.parametrize(
    ("fn", "settings"),
    [
        (sums, {}),
        (plain, {"scope": "global"}),
        (node(scope="global")(lambda ctx: None), {}),
        (None, {"node_type": "BARRIER_SYNC"}),
        (None, {"node_type": "PUT_TO_BUFFER"}),
        (None, {"node_type": "GET_FROM_BUFFER"}),
        (lambda batch, ctx: None, {"node_type": "MODEL_TRAIN", "node_role": "CRITIC"}),
    ],
)
def test_global_scope_markers_and_engines_by_role_are_learning(config, fn, settings):
    assert planes(config, ("x", fn, [], settings)) == {"x": "training"}


def test_an_engine_by_role_only_where_the_type_says_so(config):
    assert planes(config, ("x", plain, [], {"node_role": "CRITIC"})) == {"x": "rollout"}
    assert planes(
        config, ("x", plain, [], {"node_type": "MODEL_INFERENCE", "node_role": "ROLLOUT"})
    ) == {"x": "rollout"}


def test_the_plane_is_that_of_the_function_that_a_factory_makes(config):
    @node_factory
    def reference(config):
        return (lambda ref: None) if config.algorithm.use_kl_in_reward else plain

    nodes = [("ref", reference, [], {}), ("after", plain, ["ref"], {})]
    assert planes(config, *nodes) == {"ref": "rollout", "after": "rollout"}
    config.algorithm.use_kl_in_reward = True
    assert planes(config, *nodes) == {"ref": "training", "after": "training"}


def test_a_node_behind_a_learning_writer_is_learning(config):
    @node(writes="old_log_probs")
    def scores(actor): ...

    def reads(old_log_probs): ...

    assert planes(config, ("reads", reads, [], {}), ("scores", scores, [], {})) == dict.fromkeys(
        ("scores", "reads"), "training"
    )
    message = fails(config, ("reads", reads, [], {"plane": "rollout"}), ("scores", scores, [], {}))
    assert "it comes after 'scores' (it uses the train engine 'actor')" in message


def test_a_plane_of_the_nodes_own(config):
    training_nodes = {"plane": "training"}
    assert planes(
        config,
        ("a", plain, [], {}),
        ("x", plain, ["a"], training_nodes),
        ("after", plain, ["x"], {}),
    ) == {
        "a": "rollout",
        "x": "training",
        "after": "training",
    }
    assert planes(config, ("x", plain, [], {"plane": "rollout"})) == {"x": "rollout"}
    assert planes(
        config, ("x", plain, [], {"node_role": "DYNAMIC_SAMPLING", **training_nodes})
    ) == {"x": "training"}
    assert "its plane is training" in fails(config, ("x", generates, [], training_nodes))
    assert "node 'x' must run there" in fails(config, ("x", trains, [], {"plane": "rollout"}))


@pytest.mark.parametrize(
    ("fn", "settings", "what"),
    [
        (generates, {}, "uses the rollout engine"),
        (waits, {}, "is an async function"),
        (lambda samples: None, {}, "works on samples or on a group"),
        (lambda group: None, {}, "works on samples or on a group"),
        (plain, {"node_role": "DYNAMIC_SAMPLING"}, "must run there (its role is DYNAMIC_SAMPLING)"),
    ],
)
def test_what_only_the_experience_plane_can(config, fn, settings, what):
    message = fails(
        config,
        ("train", trains, [], {}),
        ("between", plain, ["train"], {}),
        ("x", fn, ["between"], settings),
    )
    assert f"node 'x' {what}" in message
    assert (
        "it comes after 'between' (it comes after 'train' (it uses the train engine 'actor'))"
        in message
    )


def test_a_node_cannot_be_of_both_planes(config):
    def both(rollout, actor): ...

    assert "node 'x' uses the rollout engine" in fails(config, ("x", both, [], {}))
    assert "its scope is global" in fails(config, ("x", waits, [], {"scope": "global"}))
