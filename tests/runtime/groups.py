"""What the tests of the runtime share: prompt groups, nodes bound to a config, a coordinator."""

from collections.abc import Callable
from typing import Any

from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.prompts import PROMPT_FIELDS
from distflow.data.sample import Sample, Segment
from distflow.flow.coordinator import Coordinator
from distflow.flow.data_plan import DataPlan
from distflow.flow.ticket import Ticket
from distflow.graph import BoundNode, Pipeline
from distflow.runtime.context import NodeContext

FIELDS = (*PROMPT_FIELDS, "responses", "response_ids", "response_mask", "valid", "token_level_rewards")


def group(number: int = 0, lengths: tuple[int, ...] = (2, 4), valid: tuple[bool, ...] | None = None) -> Batch:
    """One sample for each response length, behind prompts of 3 tokens."""
    samples = []
    for i, length in enumerate(lengths):
        policy = Segment("policy", tuple(range(10, 10 + length)), (-1.0,) * length, (-1.0,) * length, (0,) * length)
        samples.append(
            Sample(
                f"{number}-{i}", number, [Segment("prompt", (1, 2, 3)), policy], "p", f"r{i}", ground_truth=f"r{i}",
                valid=valid is None or valid[i], extra_info={"row": i},
            )
        )  # fmt: skip
    return Batch.from_samples(samples)


def ticket(number: int = 0, size: int = 2) -> Ticket:
    return Ticket(number, 0, number, size, 0)


def coordinator(**changes: Any) -> Coordinator:
    plan: dict[str, Any] = {"num_rows": 8, "consumer_batch": 2, "group_size": 2, "total_tickets": 8, "total_steps": 4}
    return Coordinator(DataPlan(**{**plan, **changes}))


def bound(fn: Callable[..., Any], config: Any = None, fields: tuple[str, ...] = FIELDS, **settings: Any) -> BoundNode:
    """The function as the only node, `x`, of a program."""
    graph = Pipeline("p").add_node("x", fn, [], **settings).build()
    return graph.bind(config or Config(), fields).node("x")


def context(step: int = 0) -> NodeContext:
    async def judge(batch: Batch) -> list[Any]:
        return []

    return NodeContext(Config(), step, None, judge, lambda *arguments: None)
