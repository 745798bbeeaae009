"""The learning plane: status of nodes, what is tried again, and errors that name the node."""

from typing import Any

import pytest
import torch
from distflow.runtime.learning import LearningPlane

from distflow.config.errors import UserError
from distflow.graph import NodeOutput, NodeStatus, Pipeline, node
from distflow.observe.timing import PhaseTimer
from distflow.runtime.blame import NodeError
from distflow.runtime.checks import TrustError
from distflow.training.collective import OneRank
from tests.runtime.groups import FIELDS, context, group


@node(writes="advantages", role="ADVANTAGE", scope="global")
def first(response_mask: Any) -> NodeOutput:
    return NodeOutput({"advantages": response_mask}, {"one": 1.0})


class Flaky:
    """Fails so many times."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.left, self.error, self.calls = failures, error, 0

    def node(self) -> Any:
        @node(writes="returns", role="ADVANTAGE", scope="global")
        def second(advantages: Any) -> NodeOutput:
            self.calls += 1
            if self.left:
                self.left -= 1
                raise self.error
            return NodeOutput({"returns": advantages * 2}, {"two": 2.0})

        return second


def plane_of(flaky: Flaky, retry_limit: int = 0, per_node: bool = False) -> LearningPlane:
    pipeline = Pipeline("p").add_node("a", first, []).add_node("b", flaky.node(), ["a"], retry_limit=retry_limit)
    program = pipeline.build().bind(context().config, FIELDS)
    return LearningPlane(program.nodes, {}, OneRank(), PhaseTimer(), per_node)


def test_nodes_run_in_order_and_their_metrics_are_merged() -> None:
    plane = plane_of(Flaky(0, KeyError()), per_node=True)
    assert set(plane.status.values()) == {NodeStatus.PENDING}
    out, metrics = plane.run(group(), lambda node_id: context())
    assert torch.equal(out["returns"], 2 * out["response_mask"])
    assert metrics.pop("perf/a") >= 0 and metrics.pop("perf/b") >= 0
    assert metrics == {"one": 1.0, "two": 2.0}
    assert set(plane.status.values()) == {NodeStatus.COMPLETED}


def test_a_node_is_tried_again_as_often_as_it_may() -> None:
    flaky = Flaky(2, OSError("flapping"))
    plane_of(flaky, retry_limit=2).run(group(), lambda node_id: context())
    assert flaky.calls == 3


@pytest.mark.parametrize("error", [KeyError("k"), RuntimeError("r"), AttributeError("a"), OSError("o")])
def test_whatever_a_node_raises_is_told_with_its_name(error: Exception) -> None:
    flaky = Flaky(9, error)
    plane = plane_of(flaky, retry_limit=1)
    with pytest.raises(NodeError, match=rf"node 'b' raised {type(error).__name__}.*test_learning.py") as caught:
        plane.run(group(), lambda node_id: context())
    assert isinstance(caught.value, UserError) and caught.value.__cause__ is error
    assert flaky.calls == 2
    assert plane.status == {"a": NodeStatus.COMPLETED, "b": NodeStatus.FAILED}


@pytest.mark.parametrize("error", [TrustError("the ratio"), UserError("a key")])
def test_what_is_told_well_already_passes_through(error: Exception) -> None:
    flaky = Flaky(9, error)
    plane = plane_of(flaky, retry_limit=3)
    with pytest.raises(type(error)) as caught:
        plane.run(group(), lambda node_id: context())
    assert caught.value is error and flaky.calls == 1
    assert plane.status["b"] is NodeStatus.FAILED
