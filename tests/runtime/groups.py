"""What the tests of the runtime share: prompt groups, nodes bound to a config, compiled steps, a
coordinator."""

from collections.abc import Callable
from typing import Any

from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PROMPT_FIELDS, PromptRow
from distflow.data.sample import Sample, Segment
from distflow.graph import BoundNode, Pipeline
from distflow.rollout.engine import SamplingParams
from distflow.runtime.compiled_node import Step, compile_steps
from distflow.runtime.node_context import NodeContext
from distflow.runtime.rollout_loop.group import Group
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.group_states import PromptGroup
from distflow.training.engine import OneRank

FIELDS = (
    *PROMPT_FIELDS,
    "responses",
    "response_ids",
    "response_mask",
    "valid",
    "token_level_rewards",
)
PARAMS = SamplingParams(4)


def group(
    number: int = 0,
    lengths: tuple[int, ...] = (2, 4),
    valid: tuple[bool, ...] | None = None,
    version: int = 0,
) -> Batch:
    """The columns of `samples`."""
    return Batch.from_samples(samples(number, lengths, valid, version))


def samples(
    number: int = 0,
    lengths: tuple[int, ...] = (2, 4),
    valid: tuple[bool, ...] | None = None,
    version: int = 0,
) -> list[Sample]:
    """One sample for each response length, after prompts of 3 tokens. version: of the weights of
    each token."""
    made = []
    for i, length in enumerate(lengths):
        policy = Segment(
            "policy",
            tuple(range(10, 10 + length)),
            (-1.0,) * length,
            (-1.0,) * length,
            (version,) * length,
        )
        made.append(
            Sample(
                f"{number}-{i}",
                number,
                [Segment("prompt", (1, 2, 3)), policy],
                prompt="p",
                response=f"r{i}",
                ground_truth=f"r{i}",
                valid=valid is None or valid[i],
                extra_info={"row": i},
            )
        )

    return made


def prompt_group(number: int = 0, size: int = 2) -> PromptGroup:
    return PromptGroup(number, 0, number, size, 0)


def waiting_group(of: PromptGroup | None = None) -> Group:
    """A group without any response yet."""
    of = of or prompt_group()
    return Group(
        of, PromptRow(of.row, (1, 2, 3), "p", "r0", "default", {"row": of.row}), PARAMS, seed=1
    )


def group_with_responses(number: int = 0, lengths: tuple[int, ...] = (2, 4)) -> Group:
    made = waiting_group(prompt_group(number, len(lengths)))
    made.set_samples(samples(number, lengths))
    return made


def coordinator(**changes: Any) -> Coordinator:
    plan: dict[str, Any] = {
        "num_rows": 8,
        "consumer_batch": 2,
        "group_size": 2,
        "total_groups": 8,
        "total_steps": 4,
    }
    return Coordinator(DataPlan(**{**plan, **changes}))


def bound(
    fn: Callable[..., Any] | None,
    config: Any = None,
    fields: tuple[str, ...] = FIELDS,
    **settings: Any,
) -> BoundNode:
    """The function, or what a marker has in its place, as the only node, `x`, of a pipeline."""
    graph = Pipeline("p").add_node("x", fn, [], **settings).build()
    return graph.bind(config or Config(), fields).node("x")


def step(
    fn: Callable[..., Any] | None, resources: dict[str, object] | None = None, **settings: Any
) -> Step:
    """The function as a compiled node `x`."""
    (compiled,) = compile_steps([bound(fn, **settings)], {"reduce": OneRank(), **(resources or {})})
    return compiled


def context(step: int = 0, **changes: Any) -> NodeContext:
    # no test reads the tokenizer
    return NodeContext(Config(), step, None, **changes)  # type: ignore[arg-type]
