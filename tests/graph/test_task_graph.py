"""The graph as something to look at and to change."""

import pytest

from distflow.graph import Node, NodeRole, Pipeline, PipelineError, TaskGraph, node


def nothing(ctx): ...


def scaled(responses, *, scale: float = 1.0, shift: float = 0.0): ...


@pytest.fixture
def diamond():
    return (
        Pipeline("diamond")
        .add_node("a", nothing)
        .add_node("b", nothing, ["a"])
        .add_node("c", nothing, ["a"])
        .add_node("d", nothing, ["b", "c"])
        .build()
    )


def ids(nodes):
    return [n.node_id for n in nodes]


def test_looking(diamond):
    assert ids(diamond.get_entry_nodes()) == ["a"]
    assert ids(diamond.get_dependents("a")) == ["b", "c"] == ids(diamond.get_downstream_nodes("a"))
    assert ids(diamond.get_dependents("d")) == []
    assert ids(diamond.get_exit_nodes()) == ["d"]
    assert ids(diamond.get_dependencies("d")) == ["b", "c"] and diamond.get_dependencies("a") == []
    assert diamond.get_topological_sort() == ["a", "b", "c", "d"]
    assert diamond.validate_graph() == (True, None)


def test_ties_go_to_the_node_added_first():
    graph = TaskGraph("g")
    for node_id, deps in [("late", ("z",)), ("y", ()), ("z", ()), ("x", ())]:
        graph.add_node(Node(node_id, nothing, deps))
    assert graph.get_topological_sort() == ["y", "z", "late", "x"]


def test_unknown_node_names_the_nearest(diamond):
    diamond.add_node(Node("actor_train", nothing, ("d",)))
    looking = (diamond.get_dependencies, diamond.get_dependents, diamond.get_downstream_nodes)
    for ask in (diamond.get_node, diamond.remove_node, *looking):
        with pytest.raises(
            PipelineError,
            match="'diamond'.*'actor_trian'.*'actor_train'",
        ):
            ask("actor_trian")


def test_adding(diamond):
    diamond.add_node(Node("e", nothing, ("d",)))
    assert diamond.get_topological_sort()[-1] == "e"
    with pytest.raises(PipelineError, match="'e'"):
        diamond.add_node(Node("e", nothing))
    with pytest.raises(PipelineError, match="'f'.*Node"):
        diamond.add_node("f")


def test_looking_at_what_follows_from_reads_and_writes():
    made = node(writes="returns")(lambda ctx: None)
    graph = (
        Pipeline("p")
        .add_node("read", node(reads="returns")(lambda batch: None))
        .add_node("make", made)
        .build()
    )
    assert ids(graph.get_dependencies("read")) == ["make"] == ids(graph.get_entry_nodes())
    assert ids(graph.get_exit_nodes()) == ["read"]


def test_removing_joins_the_ends(diamond):
    removed = diamond.remove_node("b")
    assert removed.node_id == "b" and list(diamond.nodes) == ["a", "c", "d"]
    assert diamond.get_node("d").deps == ("a", "c")
    diamond.remove_node("a")
    assert diamond.get_node("c").deps == () and diamond.get_node("d").deps == ("c",)


def test_updating():
    graph = Pipeline("p").add_node("a", nothing).add_node("b", scaled, ["a"], scale=2.0).build()
    graph.update_node("b", node_role="REWARD", shift=1.0, deps=())
    node = graph.get_node("b")
    assert node.node_role is NodeRole.REWARD and node.deps == ()
    assert node.options == {"scale": 2.0, "shift": 1.0}
    assert graph.validate_graph() == (True, None)
    graph.update_node("b", func=nothing)
    ok, message = graph.validate_graph()
    assert not ok and "takes no option 'scale'" in message
    with pytest.raises(PipelineError, match="'b': the id"):
        graph.update_node("b", node_id="c")
    with pytest.raises(PipelineError, match="retry_limit"):
        graph.update_node("b", retry_limit=-1)


def test_validation_says_what_is_wrong(diamond):
    diamond.update_node("a", deps=("d",))
    ok, message = diamond.validate_graph()
    assert not ok and "cycle" in message

    for ask in (diamond.get_topological_sort, diamond.to_mermaid, lambda: diamond.bind(None, [])):
        with pytest.raises(PipelineError, match="cycle"):
            ask()

    diamond.update_node("a", deps=("e",))
    assert "depends on 'e'" in diamond.validate_graph()[1]
    assert TaskGraph("empty").validate_graph()[0] is False


def test_a_copy_is_independent(diamond):
    other = diamond.copy()
    other.remove_node("b")
    other.update_node("c", retry_limit=3)
    assert list(diamond.nodes) == ["a", "b", "c", "d"] and diamond.get_node("c").retry_limit == 0
    assert (other.graph_id, other.description) == (diamond.graph_id, diamond.description)
