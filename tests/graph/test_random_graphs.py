"""Random graphs against brute force: orders, the deps that follow from reads and writes, and what
`build` accepts."""

import random
from graphlib import CycleError
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.graph import Node, PipelineError, TaskGraph, register_field
from distflow.graph import node as mark
from distflow.graph.node_order import ancestors, topological_order


@st.composite
def dags(draw, max_nodes=9):
    """node id → deps; ids in an order that says nothing about the edges."""
    n = draw(st.integers(1, max_nodes))
    edges = {j: [i for i in range(j) if draw(st.booleans())] for j in range(n)}
    names = draw(st.permutations([f"n{i}" for i in range(n)]))
    order = draw(st.permutations(range(n)))
    return {names[j]: tuple(names[i] for i in edges[j]) for j in order}


def reaches(deps, start, end):
    return any(dep == end or reaches(deps, dep, end) for dep in deps[start])


@given(dags())
def test_order_respects_edges_and_keeps_every_node_once(deps):
    order = topological_order(deps)
    assert sorted(order) == sorted(deps)
    for node_id, ids in deps.items():
        assert all(order.index(dep) < order.index(node_id) for dep in ids)
    assert order == topological_order(dict(deps)), "the same graph has the same order"


@given(dags(max_nodes=7))
def test_of_the_nodes_that_could_come_next_the_first_added_comes(deps):
    rank = list(deps)
    done: list[str] = []
    for node_id in topological_order(deps):
        ready = [
            other for other in rank if other not in done and all(dep in done for dep in deps[other])
        ]
        assert node_id == ready[0]
        done.append(node_id)


@given(dags())
def test_ancestors(deps):
    before = ancestors(deps)
    for one in deps:
        assert before[one] == {other for other in deps if reaches(deps, one, other)}


@given(dags(), st.data())
def test_a_cycle_is_found_and_is_one(deps, data):
    ids = list(deps)
    for _ in range(data.draw(st.integers(1, 3))):
        one = data.draw(st.sampled_from(ids))
        other = data.draw(st.sampled_from(ids))
        deps[one] = tuple(dict.fromkeys((*deps[one], other)))

    order_exists = any(
        all(order.index(d) < order.index(n) for n in deps for d in deps[n])
        for order in _some_orders(deps)
    )
    try:
        assert sorted(topological_order(deps)) == sorted(deps)
    except CycleError as error:
        cycle = error.args[1]
        assert not order_exists
        assert cycle[0] == cycle[-1] and len(set(cycle)) == len(cycle) - 1
        assert all(before in deps[after] for before, after in zip(cycle, cycle[1:], strict=False))


def _some_orders(deps):
    return permutations(deps) if len(deps) <= 5 else []


FIELDS = ("returns", "values", "advantages")


@st.composite
def wired_dags(draw):
    """A small graph whose nodes read and write a few fields at random."""
    deps = draw(dags(max_nodes=5))
    names = st.lists(st.sampled_from(FIELDS), unique=True, max_size=2)
    return deps, {node_id: (tuple(draw(names)), tuple(draw(names))) for node_id in deps}


def graph_of(deps, wires):
    graph = TaskGraph("random")
    for node_id, ids in deps.items():
        reads, writes = wires[node_id]
        graph.add_node(Node(node_id, mark(reads=reads, writes=writes)(lambda batch: None), ids))
    return graph


def behind(deps, wires):
    """(writer, reader) where the reader must come behind, unless the deps put it before: see the
    docs."""
    return {
        (writer, reader)
        for reader in deps
        for writer in deps
        for field in set(wires[reader][0]) & set(wires[writer][1])
        if writer != reader and not (field in wires[reader][1] and field in wires[writer][0])
        if not reaches(deps, writer, reader)
    }


def orders(deps, wires):
    """All orders that the deps and the wires allow."""
    pairs = {(dep, n) for n in deps for dep in deps[n]} | behind(deps, wires)
    return [
        o for o in permutations(deps) if all(o.index(one) < o.index(other) for one, other in pairs)
    ]


def says_the_same_in_every_order(deps, wires):
    """Brute force over all orders: there is one; nothing that a node reads, and nothing left at the
    end, depends on the order; and no node reads a field that only a later node makes (one that
    updates the field does not make it)."""
    seen = set()
    for order in orders(deps, wires):
        written: dict[str, tuple[str, ...]] = dict.fromkeys(FIELDS, ())
        reads = {}
        for node_id in order:
            for field in wires[node_id][0]:
                reads[node_id, field] = written[field]
                makers = [
                    n
                    for n in deps
                    if field in wires[n][1] and field not in wires[n][0] and n != node_id
                ]
                if makers and not written[field]:
                    return False

            for field in wires[node_id][1]:
                written[field] += (node_id,)

        seen.add((tuple(sorted(reads.items())), tuple(written.items())))

    return len(seen) == 1


@settings(max_examples=300, deadline=None)
@given(wired_dags())
def test_a_graph_is_accepted_if_and_only_if_it_means_one_thing(case):
    deps, wires = case
    ok, message = graph_of(deps, wires).validate_graph()
    assert ok == says_the_same_in_every_order(deps, wires), message


@settings(max_examples=300, deadline=None)
@given(wired_dags(), st.lists(st.sampled_from(FIELDS), unique=True))
def test_a_bound_program_never_misses_a_field(case, data_fields):
    deps, wires = case
    graph = graph_of(deps, wires)
    if not graph.validate_graph()[0]:
        return

    try:
        pipeline = graph.bind(None, data_fields)
    except PipelineError:
        pipeline = None

    allowed = orders(deps, wires)
    there = set(data_fields)
    complete = True
    for node_id in allowed[0]:
        complete &= there.issuperset(wires[node_id][0])
        there |= set(wires[node_id][1])

    assert (pipeline is not None) == complete
    if pipeline:
        assert tuple(n.node_id for n in pipeline.nodes) in allowed
        assert set(pipeline.fields) == there


@given(wired_dags())
def test_no_reader_runs_before_a_writer_unless_the_deps_say_so(case):
    deps, wires = case
    graph = graph_of(deps, wires)
    if not graph.validate_graph()[0]:
        return

    order = [n.node_id for n in graph.bind(None, FIELDS).nodes]
    for reader in deps:
        for field in set(wires[reader][0]) - set(wires[reader][1]):
            for writer in (
                n for n in deps if field in wires[n][1] and not reaches(deps, n, reader)
            ):
                assert order.index(writer) < order.index(reader)


@given(dags())
def test_deps_given_as_columns_alone_are_the_same_deps(deps):
    """Each node makes one column of its own and reads those of its deps; none is named as a dep."""
    for node_id in deps:
        register_field(f"random_{node_id}", axis="sample")
    wires = {n: ([f"random_{dep}" for dep in ids], [f"random_{n}"]) for n, ids in deps.items()}
    pipeline = graph_of(dict.fromkeys(deps, ()), wires).bind(None, [])
    assert {n.node_id: set(n.deps) for n in pipeline.nodes} == {
        n: set(ids) for n, ids in deps.items()
    }
    assert [n.node_id for n in pipeline.nodes] == topological_order(deps)


@given(dags(), st.data())
def test_planes_against_their_definition(deps, data):
    uses = {node_id: data.draw(st.sampled_from(["plain", "train", "global"])) for node_id in deps}
    functions = {
        "plain": lambda ctx: None,
        "train": lambda actor: None,
        "global": lambda reduce: None,
    }
    graph = TaskGraph("planes")
    for node_id, ids in deps.items():
        graph.add_node(Node(node_id, functions[uses[node_id]], ids))

    pipeline = graph.bind(None, [])
    for bound in pipeline.nodes:
        before = [n for n in deps if n == bound.node_id or reaches(deps, bound.node_id, n)]
        assert (bound.plane == "training") == any(uses[n] != "plain" for n in before)

    assert pipeline.rollout_nodes + pipeline.training_nodes == tuple(
        sorted(pipeline.nodes, key=lambda n: n.plane)
    )


def test_a_large_graph_is_ordered_quickly():
    rng = random.Random(0)
    deps = {
        str(i): tuple({str(rng.randrange(i)) for _ in range(3)}) if i else () for i in range(2000)
    }
    assert len(topological_order(deps)) == 2000
