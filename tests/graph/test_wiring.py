"""What the order of nodes follows from: what they read and write, and the deps that only the user
knows."""

import pytest

from distflow.graph import Pipeline, PipelineError, node

LOADED = ["prompt_ids", "response_ids", "response_mask", "token_level_scores", "returns", "values"]


def makes(*writes, reads=()):
    return node(reads=reads, writes=writes)(lambda batch: None)


def reads(*names):
    return makes(reads=names)


def updates(name):
    return makes(name, reads=name)


def bound(*nodes):
    """nodes: (id, function, further deps...)."""
    pipeline = Pipeline("p")
    for node_id, fn, *deps in nodes:
        pipeline.add_node(node_id, fn, deps)
    return pipeline.build().bind(None, LOADED)


def order(*nodes):
    return [n.node_id for n in bound(*nodes).nodes]


def fails(*nodes):
    with pytest.raises(PipelineError) as caught:
        bound(*nodes)
    return str(caught.value)


def test_a_column_that_the_data_have_is_read_behind_its_writer_too():
    assert order(("read", reads("returns")), ("write", makes("returns"))) == ["write", "read"]


def test_an_optional_read_counts():
    assert order(("read", reads("?returns")), ("write", makes("returns"))) == ["write", "read"]


def test_aliases_are_the_same_field():
    assert order(("read", reads("index")), ("write", makes("group_index"))) == ["write", "read"]


def test_a_chain_given_backwards():
    assert order(
        ("c", makes(reads="advantages")),
        ("b", makes("advantages", reads="values")),
        ("a", makes("values")),
    ) == ["a", "b", "c"]


def test_an_updater_runs_behind_the_maker_and_before_the_readers():
    assert order(
        ("read", reads("returns")), ("update", updates("returns")), ("make", makes("returns"))
    ) == [
        "make",
        "update",
        "read",
    ]


def test_updaters_need_an_order_of_their_own():
    nodes = ("a", updates("returns")), ("make", makes("returns"))
    assert "nodes 'a' and 'b' both write 'returns'" in fails(*nodes, ("b", updates("returns")))
    assert order(*nodes, ("b", updates("returns"), "a")) == ["make", "a", "b"]


def test_makers_need_an_order_unless_one_follows():
    assert "nodes 'a' and 'b' both write 'returns'" in fails(
        ("a", makes("returns")), ("b", makes("returns"))
    )
    assert order(("a", makes("returns", reads="values")), ("b", makes("returns", "values"))) == [
        "b",
        "a",
    ]


def test_deps_are_kept_beside_those_that_follow():
    bound_pipeline = bound(("a", makes("returns")), ("b", makes()), ("c", reads("returns"), "b"))
    assert bound_pipeline.node("c").deps == ("b", "a")


def test_two_nodes_that_each_read_what_the_other_makes():
    message = fails(
        ("a", makes("returns", reads="values")), ("b", makes("values", reads="returns"))
    )
    assert "cycle" in message and "a -> b" in message


@pytest.mark.parametrize(
    ("column", "source"),
    [
        ("input_ids", "prompt_ids"),
        ("attention_mask", "response_ids"),
        ("loss_mask", "response_mask"),
        ("token_level_scores", "response_mask"),
        ("token_level_rewards", "token_level_scores"),
        ("token_level_rewards", "response_mask"),
    ],
)
def test_a_derived_column_is_read_behind_what_it_is_derived_from(column, source):
    reader = ("read", reads(column))
    writer = ("write", makes(source))
    assert order(reader, writer) == ["write", "read"]
    assert order(reader, ("make", makes(column)), writer) == ["make", "read", "write"], (
        "it is derived no more"
    )


def test_an_update_of_a_derived_column_runs_behind_its_sources():
    nodes = (
        ("read", reads("loss_mask")),
        ("tighten", updates("loss_mask")),
        ("write", makes("response_mask")),
    )
    assert order(*nodes) == ["write", "tighten", "read"]


def test_each_update_of_a_derived_column_runs_behind_its_sources():
    nodes = (
        ("one", updates("loss_mask")),
        ("two", updates("loss_mask"), "one"),
        ("write", makes("response_mask")),
    )
    assert order(*nodes) == ["write", "one", "two"]


def test_nodes_of_two_policies_have_columns_of_their_own():
    pipeline = Pipeline("p").add_node("shared", makes("returns", reads="advantages"))
    for policy in ("a", "b"):
        pipeline.add_node(f"write_{policy}", makes("advantages"), policy=policy)
        pipeline.add_node(f"read_{policy}", reads("advantages", "returns"), policy=policy)

    graph = pipeline.build()
    bound_pipeline = graph.path_of("b").bind(None, LOADED)
    assert [n.node_id for n in bound_pipeline.nodes] == ["write_b", "shared", "read_b"]
    assert bound_pipeline.node("read_b").deps == ("write_b", "shared")
    assert {n.node_id for n in graph.get_dependencies("read_a")} == {"write_a", "shared"}
    assert {n.node_id for n in graph.get_dependencies("shared")} == {"write_a", "write_b"}


def test_a_shared_node_runs_after_those_of_its_deps_that_are_on_the_path():
    pipeline = Pipeline("p").add_node("last", makes("returns"), ["one", "two"])
    pipeline.add_node("one", makes("values"), policy="a").add_node(
        "two", makes("values"), policy="b"
    )
    assert pipeline.build().path_of("a").get_node("last").deps == ("one",)


def test_paths_of_two_policies_do_not_meet():
    pipeline = (
        Pipeline("p")
        .add_node("one", makes("values"), policy="a")
        .add_node("two", reads("values"), ["one"])
    )
    pipeline.build()
    pipeline.add_node("three", makes("returns"), ["one"], policy="b")
    with pytest.raises(PipelineError, match="'three'.*'b'.*'one'.*'a'"):
        pipeline.build()
