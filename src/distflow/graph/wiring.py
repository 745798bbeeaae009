"""Order in a graph (topological order, cycles, ancestors), and checks of its wiring: who writes what others read, in
which order and plane."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations

from distflow.errors import hint
from distflow.graph.contract import Contract, canonical
from distflow.graph.fields import DERIVED, PipelineError
from distflow.graph.node_spec import TRAIN_ENGINES, Plane, is_factory
from distflow.graph.nodes import Node, engines_of

Edges = Mapping[str, Sequence[str]]


def topological_order(deps: Edges) -> list[str]:
    """Kahn's order; of the nodes that are ready, the one added first comes first. The graph must have no cycle."""
    rank = {node_id: i for i, node_id in enumerate(deps)}
    names = list(deps)
    waits_for = {node_id: len(set(ids)) for node_id, ids in deps.items()}
    unblocks = dependents(deps)
    ready = [rank[node_id] for node_id, count in waits_for.items() if count == 0]
    heapify(ready)
    order: list[str] = []
    while ready:
        node_id = names[heappop(ready)]
        order.append(node_id)
        for other in unblocks[node_id]:
            waits_for[other] -= 1
            if waits_for[other] == 0:
                heappush(ready, rank[other])
    assert len(order) == len(names), "a cyclic graph has no order"
    return order


def dependents(deps: Edges) -> dict[str, list[str]]:
    """The reverse edges: node id → ids that depend on it, in the order in which they were added."""
    out: dict[str, list[str]] = {node_id: [] for node_id in deps}
    for node_id, ids in deps.items():
        for dep in dict.fromkeys(ids):
            out[dep].append(node_id)
    return out


def find_cycle(deps: Edges) -> list[str] | None:
    """One cycle as a path in the direction of the data, its first node again at the end; None if there is none."""
    done: set[str] = set()
    for start in deps:
        path: list[str] = []
        on_path: set[str] = set()
        stack = [(start, False)]
        while stack:
            node_id, leaving = stack.pop()
            if leaving:
                done.add(node_id)
                on_path.remove(path.pop())
            elif node_id in on_path:
                return [*path[path.index(node_id) :], node_id][::-1]
            elif node_id not in done:
                path.append(node_id)
                on_path.add(node_id)
                stack.append((node_id, True))
                stack.extend((dep, False) for dep in reversed(deps[node_id]))
    return None


def ancestors(deps: Edges) -> dict[str, frozenset[str]]:
    """All nodes that must have run before each node."""
    out: dict[str, frozenset[str]] = {}
    for node_id in topological_order(deps):
        out[node_id] = frozenset(deps[node_id]).union(*(out[dep] for dep in deps[node_id]))
    return out


@dataclass(frozen=True)
class Vertex:
    """A node with its contract and the nodes it depends on, as the checks see it."""

    node: Node
    contract: Contract
    deps: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """Every field it reads, by the fields' own names."""
        return tuple(canonical(name) for name in (*self.contract.reads, *self.contract.optional))

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(canonical(name) for name in self.contract.writes)

    @property
    def engines(self) -> tuple[str, ...]:
        return engines_of(self.node, self.contract)


Vertices = Mapping[str, Vertex]


def check_edges(deps: Mapping[str, Sequence[str]]) -> None:
    """Raises PipelineError for no nodes, an unknown dependency, or a cycle."""
    if not deps:
        raise PipelineError("the graph has no nodes; add at least one with add_node")
    for node_id, ids in deps.items():
        for dep in ids:
            if dep not in deps:
                others = [other for other in deps if other != node_id]
                raise PipelineError(f"node '{node_id}' depends on '{dep}', which is no node{hint(dep, others)}")
    cycle = find_cycle(deps)
    if cycle:
        raise PipelineError(
            f"the nodes form a cycle: {' -> '.join(cycle)}; take one of these deps away, or let none read what a later "
            "one writes"
        )


class Wiring:
    """Order, writers and planes of a graph whose given deps form no cycle. Raises PipelineError for a cycle by what
    nodes read and write.

    A node runs behind all that write what it reads, unless its deps say otherwise; one that updates a field (reads and
    writes it) behind those that make it.
    deps: by node id, explicit and inferred ones. order: node ids, topological. planes: by node id.
    writers: field → ids of the nodes that write it, in order.
    """

    def __init__(self, vertices: Vertices) -> None:
        self.vertices = vertices
        self.writers: dict[str, list[str]] = {}
        for node_id in vertices:
            for name in vertices[node_id].writes:
                self.writers.setdefault(name, []).append(node_id)
        self.deps = self._with_derived({node_id: vertex.deps for node_id, vertex in vertices.items()})
        check_edges(self.deps)
        self.order = topological_order(self.deps)
        self.before = ancestors(self.deps)
        for writers in self.writers.values():
            writers.sort(key=self.order.index)
        self._training_because: dict[str, str] = {}
        self.planes = {node_id: self._plane(node_id) for node_id in self.order}

    def check(self) -> None:
        """Raises PipelineError if writers, readers and planes do not fit together."""
        self._check_writers()
        for node_id in self.order:
            self._check_plane(node_id)
            for name in self._sources(node_id):
                self._check_read(node_id, name)

    def _with_derived(self, deps: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        given = ancestors(deps)
        return {
            node_id: tuple(dict.fromkeys((*deps[node_id], *self._writers_before(node_id, given)))) for node_id in deps
        }

    def _writers_before(self, node_id: str, given: Mapping[str, frozenset[str]]) -> Iterator[str]:
        """Writers of what the node reads, if the explicit deps do not order the two."""
        own = set(self.vertices[node_id].writes)
        for name in self._sources(node_id):
            for writer in self.writers.get(name, ()):
                updates = name in self.vertices[writer].reads
                if writer == node_id or node_id in given[writer] or (name in own and updates):
                    continue
                yield writer

    def _sources(self, node_id: str) -> Iterator[str]:
        """The fields that it reads; derived ones that no node writes are replaced by their sources."""
        names = list(self.vertices[node_id].reads)
        for name in names:  # grows
            others = [writer for writer in self.writers.get(name, ()) if writer != node_id]
            if name not in DERIVED or others:
                yield name
            if name in DERIVED and all(name in self.vertices[writer].reads for writer in others):
                names += (source for source in DERIVED[name] if source not in names)

    def ordered(self, one: str, other: str) -> bool:
        """Whether one of the two nodes must have run before the other."""
        return one in self.before[other] or other in self.before[one]

    def has(self, node_id: str, name: str, loaded: frozenset[str]) -> bool:
        """Whether the field exists when the node runs: written before, loaded with the data, or derived."""
        there = {*loaded, *(written for other in self.before[node_id] for written in self.vertices[other].writes)}
        while missing := [n for n, sources in DERIVED.items() if n not in there and there.issuperset(sources)]:
            there.update(missing)
        return name in there

    def _plane(self, node_id: str) -> Plane:
        vertex = self.vertices[node_id]
        inherited = [dep for dep in self.deps[node_id] if dep in self._training_because]
        train = [engine for engine in vertex.engines if engine in TRAIN_ENGINES]
        if vertex.contract.scope == "global":
            self._training_because[node_id] = "its scope is global"
        elif train:
            self._training_because[node_id] = f"it uses the train engine '{train[0]}'"
        elif inherited:
            self._training_because[node_id] = f"it comes after '{inherited[0]}'"
        elif vertex.node.plane == "training":
            self._training_because[node_id] = "its plane is training"
        return "training" if node_id in self._training_because else "rollout"

    def _check_plane(self, node_id: str) -> None:
        """A node that needs something that exists only in the rollout loop must not be in the training loop."""
        needs = _why_rollout(self.vertices[node_id])
        if needs and self.planes[node_id] == "training":
            raise PipelineError(
                f"node '{node_id}' {needs}, which only the rollout loop can, but runs in the training loop: "
                f"{self._reason(node_id)}"
            )

    def _reason(self, node_id: str) -> str:
        """Why a node is in the training loop, traced back to the first such node."""
        because = self._training_because[node_id]
        first = next((dep for dep in self.deps[node_id] if because == f"it comes after '{dep}'"), None)
        return because if first is None else f"{because} ({self._reason(first)})"

    def _check_writers(self) -> None:
        for name, writers in self.writers.items():
            for one, other in combinations(writers, 2):
                if not self.ordered(one, other) and not (self._is_late(one) or self._is_late(other)):
                    raise PipelineError(
                        f"nodes '{one}' and '{other}' both write '{name}' and neither comes before the other; "
                        f"add '{one}' to the deps of '{other}', or write another field"
                    )

    def _is_late(self, node_id: str) -> bool:
        """Whether a factory returns its function, so that what it reads is not known without a config."""
        return is_factory(self.vertices[node_id].node.fn)

    def _check_read(self, node_id: str, name: str) -> None:
        writers = [w for w in self.writers.get(name, ()) if w != node_id and not self._is_late(w)]
        if any(writer in self.before[node_id] for writer in writers):
            return
        for writer in writers:
            if name not in self.vertices[writer].reads:  # one that updates the field needs it to exist already
                raise PipelineError(
                    f"node '{node_id}'{self._in_plane(node_id, writer)} reads '{name}' before '{writer}'"
                    f"{self._in_plane(writer, node_id)} writes it; put '{node_id}' after '{writer}'"
                )

    def _in_plane(self, node_id: str, other: str) -> str:
        """The plane, if it explains the error."""
        return "" if self.planes[node_id] == self.planes[other] else f" ({self.planes[node_id]} loop)"


def _why_rollout(vertex: Vertex) -> str | None:
    """Why a node can run in the rollout loop only; None if it can run in either."""
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
