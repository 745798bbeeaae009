"""Columns between dp groups: a node of one dp group writes them and a node of another reads them in
the same step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from distflow.data.batch import Batch
from distflow.graph import BoundPipeline
from distflow.planning.plan import Plan, dp_groups_of
from distflow.runtime.dp_groups import with_samples
from distflow.scheduling.reshard_writers_to_readers import Key


class ReshardPort(Protocol):
    """Between nodes of one dp group and nodes of another that read their columns."""

    def put(self, key: Key, batch: Batch, writer: int, num_writers: int) -> None:
        """Put this writer's samples of a step, possibly none; the step is complete once all
        `num_writers` have.

        Raises ReshardError for an invalid step, or the error that ended another rank."""

    def pick(self, key: Key, rank: int, num_ranks: int, uids: Sequence[str]) -> Batch:
        """The samples of these uids, in that order, in separate memory; each of `num_ranks` picks
        its own.

        Waits until the step is complete. Raises ReshardError if it cannot be completed any more, or
        the error that ended another rank.
        """


@dataclass(frozen=True)
class ReshardedColumns:
    """Columns that one dp group writes and all ranks of another read. source: the writing node.
    target: the first node of the other dp group that waits for it."""

    source: str
    target: str
    writers: tuple[int, ...]
    readers: tuple[int, ...]

    def key(self, step: int) -> Key:
        """The key for a step, which trains the weights of the version with the same number."""
        ranks = ", ".join(map(str, self.readers))
        return Key(f"{self.source} to {self.target} on ranks {ranks}", step + 1, step)


def resharded_columns(plan: Plan, pipeline: BoundPipeline) -> Iterator[ReshardedColumns]:
    """The columns of all dp groups, in pipeline order. If several dp groups run a node, the first
    sends its columns."""
    dp_groups = dp_groups_of(plan)
    nodes_of = {group: plan.ranks[group[0]].training_nodes for group in dp_groups}
    training_nodes = [node.node_id for node in pipeline.training_nodes]

    for readers in dp_groups:
        present = set(nodes_of[readers])
        for target in pipeline.training_nodes:
            if target.node_id not in nodes_of[readers]:
                continue

            for source in training_nodes:
                if source not in target.deps or source in present:
                    continue
                present.add(source)
                writers = next(group for group in dp_groups if source in nodes_of[group])
                yield ReshardedColumns(source, target.node_id, with_samples(plan, writers), readers)


class ColumnReshard:
    """The columns that one rank sends after a node, and those that it waits for before one.

    Every dp group runs its nodes in pipeline order, and a step is kept until all of its readers
    have it, so dp groups never wait for each other in a cycle.
    """

    def __init__(
        self, plan: Plan, pipeline: BoundPipeline, rank: int, port: ReshardPort | None
    ) -> None:
        found = [*resharded_columns(plan, pipeline)]
        self._rank = rank
        self._port = port
        self._out = [each for each in found if rank in each.writers]
        self._in = [each for each in found if rank in each.readers]
        assert port is not None or not (self._out or self._in), "a rank that reshards has a port"

    def waits_for(self, node: str) -> bool:
        return any(each.target == node for each in self._in)

    def receive(self, node: str, batch: Batch, step: int) -> Batch:
        """The batch with the columns of other dp groups for the node, in the rows of this rank's
        samples."""
        for each in self._in:
            if each.target == node:
                assert self._port is not None
                place = each.readers.index(self._rank)
                uids = batch["uid"]
                theirs = self._port.pick(each.key(step), place, len(each.readers), uids)
                batch = batch.merge(theirs.only(name for name in theirs.names if name != "uid"))

        return batch

    def sends(self, node: str) -> bool:
        return any(each.source == node for each in self._out)

    def send(self, node: str, before: Batch, after: Batch, step: int) -> None:
        for each in self._out:
            if each.source == node:
                assert self._port is not None
                names = {"uid": None}
                for name in after.names:
                    if name not in before.names or after.flat(name) is not before.flat(name):
                        names[name] = None

                place = each.writers.index(self._rank)
                self._port.put(each.key(step), after.only(names), place, len(each.writers))
