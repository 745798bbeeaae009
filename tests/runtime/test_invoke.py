"""Every form of function is called as its signature wants, and what it returns lands in the batch or is refused."""

import asyncio
import threading
from typing import Any

import pytest
import torch
from distflow.runtime.invoke import call_node, merge_output, run_node, scores_on_last_token

from distflow.config.errors import UserError
from distflow.data.batch import Batch
from distflow.graph import NodeOutput, node
from distflow.graph.fields import Axis
from distflow.runtime.blame import NodeError, UserNodeError, node_error
from distflow.runtime.plain_calls import PlainCalls
from distflow.training.collective import OneRank
from tests.runtime.groups import bound, context, group


def run(function: Any, batch: Batch | None = None, **settings: Any) -> tuple[Batch, dict[str, float]]:
    batch = group() if batch is None else batch
    bound_node = bound(function, **settings)
    return merge_output(bound_node, batch, call_node(bound_node, batch, {"actor": "the actor"}, context(), OneRank()))


def test_fields_options_engines_and_reserved_names_come_by_their_names() -> None:
    seen: dict[str, Any] = {}

    @node(writes=("advantages", "returns"))
    def wired(response_mask, values=None, *, scale: float = 2.0, actor, ctx, reduce):  # type: ignore[no-untyped-def]
        seen.update(values=values, actor=actor, step=ctx.step, sum=reduce.sum(3.0))
        return response_mask * scale, response_mask

    out, metrics = run(wired, scale=3.0)
    assert seen == {"values": None, "actor": "the actor", "step": 0, "sum": 3.0}
    assert out["advantages"].tolist() == [[3, 3, 0, 0], [3, 3, 3, 3]] and metrics == {}
    assert "advantages" not in group()


def test_a_batch_and_a_context() -> None:
    @node(reads=("response_mask",), writes="returns")
    def with_context(batch, ctx):  # type: ignore[no-untyped-def]
        return NodeOutput({"returns": batch["response_mask"] + ctx.step}, {"mine": 1.5})

    out, metrics = run(with_context)
    assert out.flat("returns").tolist() == [1.0] * 6 and metrics == {"mine": 1.5}


def test_the_reward_of_a_whole_batch_may_be_as_wide_as_the_sequence() -> None:
    """Other systems give rewards of the attention mask's shape, with the score anywhere in the row."""

    def compute_custom_reward(batch, config, **kwargs):  # type: ignore[no-untyped-def]
        wide = torch.zeros(batch["attention_mask"].shape)
        wide[:, -1] = torch.tensor([float(len(prompt)) for prompt in batch["prompts"]])
        batch["token_level_scores"] = wide
        batch["token_level_rewards"] = wide
        return NodeOutput(batch)

    out, _ = run(compute_custom_reward, node_role="REWARD")
    assert out["token_level_scores"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    assert "attention_mask" not in out.names


def test_the_reward_of_one_sample() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
        assert solution_str == ground_truth and data_source == "default"
        return {"score": 1.0 + extra_info["row"], "why": "it is"}

    out, _ = run(compute_score)
    assert out["token_level_rewards"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 2]]
    assert out["token_level_scores"].tolist() == out["token_level_rewards"].tolist()


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), None, "1", {"points": 1}])
def test_a_reward_that_is_no_finite_number_is_the_user_s_error(answer: Any) -> None:
    def compute_score(data_source, solution_str, ground_truth):  # type: ignore[no-untyped-def]
        return answer

    with pytest.raises(UserNodeError, match="node 'x' was asked to score sample 0-0: it returned"):
        run(compute_score)


def test_scores_lie_on_the_last_token_of_the_policy() -> None:
    assert scores_on_last_token(group(lengths=(1, 3)), [5.0, 7.0]).tolist() == [[5, 0, 0], [0, 0, 7]]
    assert scores_on_last_token(group(lengths=(0, 2)), [5.0, 7.0]).tolist() == [[0, 0], [0, 7]]


def test_scores_lie_before_what_a_tool_said_last() -> None:
    """Estimators read the policy's tokens only: a score on a tool's would be lost."""
    batch = group(lengths=(4, 3))
    batch["response_mask"] = torch.tensor([[1.0, 0, 1, 0], [1, 0, 0, 0]])
    assert scores_on_last_token(batch, [5.0, 7.0]).tolist() == [[0, 0, 5, 0], [7, 0, 0, 0]]


def test_outputs_that_do_not_fit_are_refused_with_the_node_s_name() -> None:
    @node(writes=("advantages", "returns"))
    def one_of_two(response_mask):  # type: ignore[no-untyped-def]
        return response_mask

    @node(writes="advantages")
    def too_wide(response_mask):  # type: ignore[no-untyped-def]
        return torch.zeros(len(response_mask), response_mask.shape[1] + 1)

    for function, words in ((one_of_two, "1 values for the fields advantages, returns"), (too_wide, "advantages")):
        with pytest.raises(NodeError, match=f"node 'x' returned something that does not fit.*{words}"):
            run(function)


def test_an_entry_node_s_batch_replaces_the_prompts() -> None:
    prompts = group(lengths=(0, 0))

    @node(reads=("prompt_ids",), writes=("response_ids",))
    def answers(batch, ctx):  # type: ignore[no-untyped-def]
        return group(lengths=(3, 1))

    out, _ = run(answers, prompts)
    assert out.lengths(Axis.RESPONSE).tolist() == [3, 1]


def test_nothing_returned_changes_nothing() -> None:
    @node(writes=())
    def quiet(response_mask):  # type: ignore[no-untyped-def]
        return None

    out, metrics = run(quiet)
    assert set(out.names) == set(group().names) and metrics == {}


def test_a_plain_function_that_hangs_fails_at_its_deadline() -> None:
    release = threading.Event()

    @node(writes="advantages")
    def hangs(response_mask):  # type: ignore[no-untyped-def]
        release.wait(60)

    call = run_node(bound(hangs), group(), {}, context(), OneRank(), PlainCalls(), 0.05)
    with pytest.raises(UserError, match=r"node 'x' did not return within 0.05 s \(reward.timeout_s"):
        asyncio.run(call)
    release.set()


def test_whose_fault_an_error_is() -> None:
    """Code of the user's in the traceback makes it theirs, also behind a function of ours that calls it."""

    def users() -> None:
        raise RuntimeError("mine")

    bound_node = bound(node(writes=())(lambda response_mask: None))
    try:
        users()
    except RuntimeError as err:
        error = node_error(bound_node, err)
    assert isinstance(error, UserNodeError) and "(at test_invoke.py:" in str(error)
    try:
        exec(compile("import torch; torch.zeros(2) + torch.zeros(3)", "<string>", "exec"), {})
    except RuntimeError as err:
        err.__traceback__ = err.__traceback__.tb_next if err.__traceback__ else None
        assert not isinstance(node_error(bound_node, err), UserError)
