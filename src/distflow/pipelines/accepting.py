"""A run whose finished prompt groups a function of the user's accepts or rejects, as one more node of its program."""

from collections.abc import Callable
from dataclasses import replace

from distflow.data.batch import Batch
from distflow.graph import Drop, Program
from distflow.graph.nodes import Node
from distflow.pipelines.select import bound, select_pipeline
from distflow.planning.plan import plan_local
from distflow.runtime.spec import Spec

REJECTED = "rejected"


def accepting(spec: Spec, should_accept: Callable[[Batch], object]) -> Spec:
    """The same run, with this node behind all others of the experience plane. It does not leave this process."""

    def accept(batch: Batch) -> Drop | None:
        return None if should_accept(batch) else Drop(REJECTED)

    graph = select_pipeline(spec.config).copy()
    before = tuple(node.node_id for node in spec.program().experience)
    graph.add_node(Node("should_accept", accept, before, writes=(), scope="group", plane="experience", validates=False))
    program = bound(graph, spec.config)

    def made() -> Program:
        return program

    return replace(spec, program=made, plan=plan_local(program, spec.plan.ranks[0].device))
