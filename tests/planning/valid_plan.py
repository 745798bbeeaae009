"""What holds of every plan of a pipeline."""

from collections.abc import Sequence

from distflow.graph import BoundPipeline
from distflow.planning.plan import Plan, rank_plan


def check_plan(plan: Plan, pipeline: BoundPipeline) -> None:
    """Raises AssertionError for a node that the pipeline lacks or no rank runs, a missing engine or
    service, one that no node of its rank uses, and a layout whose ranks are not those with the
    engine."""
    placed: set[str] = set()
    for rank in plan.ranks:
        wanted = rank_plan(
            pipeline, rank.rank, rank.device, rank.rollout_nodes, rank.training_nodes
        )
        _check_uses(pipeline, rank.rank, "engine", rank.engines, wanted.engines)
        _check_uses(pipeline, rank.rank, "service", rank.services, wanted.services)
        placed.update(rank.nodes)

    for node in pipeline.nodes:
        if node.node_id not in placed:
            raise AssertionError(
                f"no rank of the plan runs node '{node.node_id}' of pipeline '{pipeline.graph_id}'"
            )

    for layout in plan.layouts:
        holders = tuple(rank.rank for rank in plan.ranks if layout.role in rank.engines)
        if holders != layout.ranks:
            raise AssertionError(
                f"the plan lays the {layout.role} over ranks {layout.ranks}, but ranks {holders} "
                "use it: use the same ranks"
            )


def _check_uses(
    pipeline: BoundPipeline, rank: int, what: str, names: Sequence[str], needed: Sequence[str]
) -> None:
    for name in names:
        if name not in needed:
            raise AssertionError(
                f"the plan gives rank {rank} the {what} '{name}', which no node of pipeline "
                f"'{pipeline.graph_id}' uses there: remove it from the plan"
            )

    for name in needed:
        if name not in names:
            raise AssertionError(
                f"the plan gives rank {rank} no {what} '{name}', which its nodes need: add it"
            )
