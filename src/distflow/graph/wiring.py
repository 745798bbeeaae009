"""Checks of a graph's wiring: which node writes what others read, in what order and on which
side."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from distflow.errors import PipelineError
from distflow.graph.contract_from_signature import Contract
from distflow.graph.fields import DERIVED, canonical
from distflow.graph.graph_node import Node, engines_of
from distflow.graph.node_order import _check_edges, ancestors, topological_order
from distflow.graph.node_roles import Plane
from distflow.graph.node_spec import is_factory


@dataclass(frozen=True)
class Vertex:
    node: Node
    contract: Contract

    @property
    def reads(self) -> tuple[str, ...]:
        """Every field that it reads, with aliases resolved."""
        return tuple(canonical(name) for name in (*self.contract.reads, *self.contract.optional))

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(canonical(name) for name in self.contract.writes)

    @property
    def engines(self) -> tuple[str, ...]:
        return engines_of(self.node, self.contract)


class Wiring:
    """Order, writers and planes of a graph. Raises PipelineError for no nodes, an unknown
    dependency, or a cycle by deps or by what nodes read and write.

    A node runs after all nodes that write what it reads, unless its deps say otherwise; a node that
    updates a field (reads and writes it) runs after those that create it. deps: explicit and
    inferred, by node id. order: node ids, topological. planes: by node id. writers: field → ids of
    the nodes that write it, in order.
    """

    def __init__(self, nodes: Mapping[str, Node], contracts: Mapping[str, Contract]) -> None:
        self.vertices: dict[str, Vertex] = {}
        self.writers: dict[str, list[str]] = {}

        explicit: dict[str, tuple[str, ...]] = {}
        for node_id, node in nodes.items():
            vertex = Vertex(node, contracts[node_id])
            self.vertices[node_id] = vertex
            explicit[node_id] = node.deps
            for name in vertex.writes:
                self.writers.setdefault(name, []).append(node_id)

        _check_edges(explicit)
        given = ancestors(explicit)
        self.deps: dict[str, tuple[str, ...]] = {}

        for node_id, deps in explicit.items():
            self.deps[node_id] = tuple(
                dict.fromkeys((*deps, *self._writers_before(node_id, given)))
            )

        _check_edges(self.deps)
        self.order = topological_order(self.deps)
        self.before = ancestors(self.deps)
        for writers in self.writers.values():
            writers.sort(key=self.order.index)
        self._training_because: dict[str, str] = {}
        self.planes: dict[str, Plane] = {}
        for node_id in self.order:
            self.planes[node_id] = self._plane(node_id)

    def check(self) -> None:
        """Raises PipelineError if writers, readers and planes do not fit together."""
        self._check_writers()
        for node_id in self.order:
            needs = _why_rollout(self.vertices[node_id])
            if needs and self.planes[node_id] == "training":
                raise PipelineError(
                    f"node '{node_id}' {needs}, which needs the rollout loop, but runs in the "
                    f"training loop: {self._training_because[node_id]}"
                )

            for name in self._sources(node_id):
                self._check_read(node_id, name)

            for dep in self.vertices[node_id].node.deps:
                if not self._share_a_path(node_id, dep):
                    own = self.vertices[node_id].node.policy
                    other = self.vertices[dep].node.policy
                    raise PipelineError(
                        f"node '{node_id}' of the policy '{own}' depends on '{dep}' of '{other}', "
                        "but the paths of two policies do not meet: each has columns of its own"
                    )

    def _writers_before(self, node_id: str, given: Mapping[str, frozenset[str]]) -> Iterator[str]:
        """Writers of what the node reads, if the explicit deps do not order the two."""
        own = set(self.vertices[node_id].writes)
        for name in self._sources(node_id):
            for writer in self.writers.get(name, ()):
                updates = name in self.vertices[writer].reads
                if not self._share_a_path(writer, node_id):
                    continue
                if writer == node_id or node_id in given[writer] or (name in own and updates):
                    continue
                yield writer

    def _sources(self, node_id: str) -> Iterator[str]:
        """The fields that a node reads, with the sources of a derived one instead if no node writes
        that."""
        names = list(self.vertices[node_id].reads)
        for name in names:  # grows in the loop
            others = [writer for writer in self.writers.get(name, ()) if writer != node_id]
            if name not in DERIVED or others:
                yield name
            if name in DERIVED and all(name in self.vertices[writer].reads for writer in others):
                names += (source for source in DERIVED[name] if source not in names)

    def columns(self, node_id: str, loaded: Iterable[str]) -> set[str]:
        """The fields that exist when the node runs: written before, loaded with the data, or
        derived."""
        known = set(loaded)
        for other in self.before[node_id]:
            known.update(self.vertices[other].writes)

        while True:  # a derived field may be the source of another
            derived = {name for name, sources in DERIVED.items() if known.issuperset(sources)}
            if derived <= known:
                return known
            known |= derived

    def _plane(self, node_id: str) -> Plane:
        vertex = self.vertices[node_id]
        inherited = [dep for dep in self.deps[node_id] if dep in self._training_because]
        train = [engine for engine in vertex.engines if engine != "rollout"]

        if vertex.contract.scope == "global":
            self._training_because[node_id] = "its scope is global"
        elif train:
            self._training_because[node_id] = f"it uses the train engine '{train[0]}'"
        elif inherited:
            first = self._training_because[inherited[0]]
            self._training_because[node_id] = f"it comes after '{inherited[0]}' ({first})"
        elif vertex.node.plane == "training":
            self._training_because[node_id] = "its plane is training"

        if node_id in self._training_because:
            return "training"
        return "rollout"

    def _check_writers(self) -> None:
        for name, writers in self.writers.items():
            for one, other in combinations(writers, 2):
                is_ordered = one in self.before[other] or other in self.before[one]
                if not self._share_a_path(one, other):
                    continue
                if not is_ordered and not (self._is_late(one) or self._is_late(other)):
                    raise PipelineError(
                        f"nodes '{one}' and '{other}' both write '{name}' and neither comes before "
                        f"the other; add '{one}' to the deps of '{other}', or write another field"
                    )

    def _share_a_path(self, one: str, other: str) -> bool:
        """Whether one may read what the other writes: nodes of different policies have separate
        columns."""
        policies = {self.vertices[one].node.policy, self.vertices[other].node.policy} - {None}
        return len(policies) < 2

    def _is_late(self, node_id: str) -> bool:
        """Whether a factory makes its function, so that its reads are unknown without a config."""
        return is_factory(self.vertices[node_id].node.fn)

    def _check_read(self, node_id: str, name: str) -> None:
        writers = []
        for writer in self.writers.get(name, ()):
            is_other = writer != node_id and self._share_a_path(writer, node_id)
            if is_other and not self._is_late(writer):
                writers.append(writer)

        if any(writer in self.before[node_id] for writer in writers):
            return

        for writer in writers:
            # a node that updates the field needs it to exist already
            if name not in self.vertices[writer].reads:
                raise PipelineError(
                    f"node '{node_id}' reads '{name}' before '{writer}' writes it; put '{node_id}' "
                    f"after '{writer}'"
                )


def _why_rollout(vertex: Vertex) -> str | None:
    """Why a node can run only in the rollout loop; None if it can run in either."""
    if "rollout" in vertex.engines:
        return "uses the rollout engine"
    if vertex.contract.is_async:
        return "is an async function"
    if {"samples", "group"} & set(vertex.contract.reserved):
        return "works on samples or on a group"
    if vertex.node.plane == "rollout":
        return "must run there (its plane is rollout)"
    if vertex.node.plane is None and vertex.node.by_role.plane == "rollout":
        return f"must run there (its role is {vertex.node.node_role.name})"

    return None
