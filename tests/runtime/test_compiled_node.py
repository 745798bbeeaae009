"""A compiled node in both planes: what it is called with, what becomes of its output, what is tried
again."""

import asyncio
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch
from distflow.data.sample import Sample
from distflow.errors import UserError
from distflow.graph import Drop, NodeOutput, PipelineError, node
from distflow.graph.fields import Axis
from distflow.observe.metrics import Measured
from distflow.runtime.compiled_node import Step, compile_steps
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.user_calls import PlainCalls
from distflow.runtime.run_errors import NodeError, UserNodeError, node_error
from tests.runtime.groups import (
    bound,
    context,
    group,
    group_with_responses,
    samples,
    step,
    waiting_group,
)


def learn(compiled: Step, batch: Batch | None = None) -> tuple[Batch, Measured]:
    return compiled(group() if batch is None else batch, context())


def on_group(
    compiled: Step, on: Group | None = None, timeout_s: float = 10.0
) -> tuple[Group, Drop | None]:
    on = group_with_responses() if on is None else on
    return on, asyncio.run(compiled.on_group(on, context(group=on), PlainCalls(), timeout_s))


def either(compiled: Step, plane: str) -> None:
    """Run it in that plane."""
    learn(compiled) if plane == "training" else on_group(compiled)


BOTH = pytest.mark.parametrize("plane", ["training", "rollout"])


class Flaky:
    """Fails so many times."""

    def __init__(self, failures: int, error: BaseException) -> None:
        self.left = failures
        self.error = error
        self.calls = 0

    def step(self, **settings: Any) -> Step:
        @node(writes="returns")
        def flaky(response_mask: Any) -> Any:
            self.calls += 1
            if self.left:
                self.left -= 1
                raise self.error
            return response_mask

        return step(flaky, **settings)


def test_fields_options_engines_and_reserved_names_come_by_their_names():
    seen: dict[str, Any] = {}

    @node(writes=("advantages", "returns"))
    def wired(response_mask, values=None, *, scale: float = 2.0, actor, ctx, reduce):  # type: ignore[no-untyped-def]
        seen.update(values=values, actor=actor, step=ctx.step, sum=reduce.sum(3.0))
        return response_mask * scale, response_mask

    before = group()
    out, measured = learn(step(wired, {"actor": "the actor"}, scale=3.0), before)
    assert seen == {"values": None, "actor": "the actor", "step": 0, "sum": 3.0}
    assert out["advantages"].tolist() == [[3, 3, 0, 0], [3, 3, 3, 3]] and measured == ({}, 2.0)
    assert "advantages" not in before


def test_an_engine_that_the_worker_has_not_is_missed_before_anything_runs():
    @node(writes=())
    def needs(response_mask, *, actor):  # type: ignore[no-untyped-def]
        ...

    with pytest.raises(PipelineError, match="'x' .*'actor'"):
        compile_steps([bound(needs)], {"rollout": object()})


@pytest.mark.parametrize(("weight", "counts"), [(None, 2.0), (7.0, 7.0), (0.0, 0.0)])
def test_what_a_node_measures_counts_by_its_samples_where_it_says_nothing(weight, counts):
    @node(reads=("response_mask",), writes="returns")
    def with_context(batch, ctx):  # type: ignore[no-untyped-def]
        return NodeOutput(
            {"returns": batch["response_mask"] + ctx.step}, {"mine": 1.5}, weight=weight
        )

    out, measured = learn(step(with_context))
    assert out.flat("returns").tolist() == [1.0] * 6 and measured == ({"mine": 1.5}, counts)
    on, _ = on_group(step(with_context))
    assert on.measured == [({"mine": 1.5}, counts)]


def test_a_group_keeps_what_a_node_wrote_and_measured():
    @node(writes=("advantages", "reward_extra"), scope="group")
    def writes(samples, batch, group, ctx):  # type: ignore[no-untyped-def]
        assert samples is group.samples and ctx.group is group and len(batch) == len(samples)
        columns = {
            "advantages": batch["response_mask"] * 2,
            "reward_extra": [{"r": s.response} for s in samples],
        }
        return NodeOutput(columns, {"mine": 1.5})

    on, drop = on_group(step(writes))
    assert drop is None and on.measured == [({"mine": 1.5}, 2.0)]
    assert on.batch().flat("advantages").tolist() == [2.0] * 6 and on["reward_extra"] == [
        {"r": "r0"},
        {"r": "r1"},
    ]


def test_of_a_batch_that_a_node_gives_back_the_group_keeps_what_changed():
    @node(reads=("response_mask",), writes=("valid", "returns"))
    def changes(batch):  # type: ignore[no-untyped-def]
        batch["valid"] = torch.tensor([True, False])
        batch["returns"] = batch["response_mask"]
        return batch

    on, _ = on_group(step(changes))
    assert set(on.written) == {"valid", "returns"} and on.batch()["valid"].tolist() == [True, False]


def test_an_entry_node_s_samples_become_the_group_s():
    @node(reads=("prompt_ids",), writes=("response_ids",))
    async def answers(group):  # type: ignore[no-untyped-def]
        return samples(lengths=(3, 1))

    on, _ = on_group(step(answers), waiting_group())
    assert on.batch().lengths(Axis.RESPONSE).tolist() == [3, 1]


@pytest.mark.parametrize(("weight", "counts"), [(None, 2.0), (7.0, 7.0)])
def test_an_entry_node_may_measure_too(weight, counts):
    @node(reads=("prompt_ids",), writes=("response_ids",))
    async def answers(group):  # type: ignore[no-untyped-def]
        return NodeOutput(samples(lengths=(3, 1)), {"turns": 2.0}, weight=weight)

    on, _ = on_group(step(answers), waiting_group())
    assert len(on.samples) == 2 and on.measured == [({"turns": 2.0}, counts)]


def test_samples_that_the_columns_written_so_far_do_not_fit_are_refused():
    on = group_with_responses()
    on.write({"scores": [1.0, 2.0]})

    @node(reads=("response_ids",), writes=("response_ids",))
    async def one_less(group):  # type: ignore[no-untyped-def]
        return group.samples[:1]

    with pytest.raises(NodeError, match=r"'x' returned .*'scores' .*\(2,\)"):
        on_group(step(one_less), on)


def test_a_batch_over_other_samples_is_refused_with_what_to_return_instead():
    @node(reads=("prompt_ids",), writes=("response_ids",))
    def answers(batch):  # type: ignore[no-untyped-def]
        return group(lengths=(3, 1))

    with pytest.raises(UserNodeError, match=f"'x' .* list of samples .*{Sample.__name__}"):
        on_group(step(answers), waiting_group())


def test_a_drop_ends_the_group():
    @node(writes="advantages")
    def drops(response_mask):  # type: ignore[no-untyped-def]
        return Drop("dull", "all alike")

    on, drop = on_group(step(drops))
    assert drop == Drop("dull", "all alike") and on.written == {}


@BOTH
def test_nothing_returned_changes_nothing(plane):
    @node(writes=())
    def quiet(response_mask):  # type: ignore[no-untyped-def]
        return None

    if plane == "training":
        out, (metrics, _) = learn(step(quiet))
        assert set(out.names) == set(group().names) and metrics == {}
    else:
        on, drop = on_group(step(quiet))
        assert (on.written, drop) == ({}, None) and all(metrics == {} for metrics, _ in on.measured)


@BOTH
def test_outputs_that_do_not_fit_are_refused_with_the_node_s_name(plane):
    @node(writes=("advantages", "returns"))
    def one_of_two(response_mask):  # type: ignore[no-untyped-def]
        return response_mask

    @node(writes="advantages")
    def too_wide(response_mask):  # type: ignore[no-untyped-def]
        return torch.zeros(len(response_mask), response_mask.shape[1] + 1)

    for function, words in (
        (one_of_two, "1 values for the fields advantages, returns; return one"),
        (too_wide, "advantages"),
    ):
        with pytest.raises(UserNodeError, match=f"'x' returned .*{words}"):
            either(step(function), plane)


@BOTH
@pytest.mark.parametrize("values", [[object(), object()], ["high", "low"]])
@pytest.mark.parametrize("name", ["scores", "advantages"])
def test_what_is_no_number_is_refused_with_the_node_s_name(name, values, plane):
    @node(writes=name)
    def no_numbers(response_mask):  # type: ignore[no-untyped-def]
        return values

    with pytest.raises(UserNodeError, match=f"'x' returned .*'{name}'"):
        either(step(no_numbers), plane)


@BOTH
def test_a_node_is_tried_again_as_often_as_it_may(plane):
    flaky = Flaky(2, OSError("flapping"))
    either(flaky.step(retry_limit=2), plane)
    assert flaky.calls == 3


@BOTH
@pytest.mark.parametrize(
    "error",
    [KeyError("k"), RuntimeError("r"), AttributeError("a"), OSError("o"), TimeoutError("t")],
)
def test_whatever_a_node_raises_is_told_with_its_name(error, plane):
    flaky = Flaky(9, error)
    with pytest.raises(
        UserNodeError, match=rf"'x' .*{type(error).__name__}.*test_compiled_node\.py"
    ) as caught:
        either(flaky.step(retry_limit=1), plane)
    assert caught.value.__cause__ is error and flaky.calls == 2


def test_a_plain_function_that_hangs_fails_at_the_deadline_of_its_samples_and_is_not_tried_again():
    release = threading.Event()
    calls = []

    @node(writes="advantages")
    def hangs(response_mask):  # type: ignore[no-untyped-def]
        calls.append(1)
        release.wait(60)

    with pytest.raises(
        UserError,
        match=r"'x' .* 0\.1 s .*reward\.timeout_s",
    ):
        on_group(step(hangs, retry_limit=2), timeout_s=0.05)

    release.set()
    assert len(calls) == 1


@pytest.mark.parametrize("module", ["distflow.pipelines.nodes.own", "users"])
def test_only_a_users_coroutine_has_a_deadline(module):
    """Ours waits for what has deadlines of its own."""

    @node(writes="advantages")
    async def waits(response_mask):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0.2)
        return torch.zeros(response_mask.shape)

    waits.__module__ = module
    if module == "users":
        with pytest.raises(UserError, match=r"reward\.timeout_s"):
            on_group(step(waits), timeout_s=0.01)
    else:
        on_group(step(waits), timeout_s=0.01)


def test_whose_fault_an_error_is():
    """Code of the user's in the traceback makes it theirs, also under a function of ours that calls
    it."""

    def users() -> None:
        raise RuntimeError("mine")

    bound_node = bound(node(writes=())(lambda response_mask: None))
    try:
        users()
    except RuntimeError as err:
        error = node_error(bound_node, err)

    assert isinstance(error, UserNodeError) and "(at test_compiled_node.py:" in str(error)
    try:
        exec(compile("import torch; torch.zeros(2) + torch.zeros(3)", "<string>", "exec"), {})
    except RuntimeError as err:
        err.__traceback__ = err.__traceback__.tb_next if err.__traceback__ else None
        assert not isinstance(node_error(bound_node, err), UserError)


@BOTH
@pytest.mark.parametrize(
    ("column", "values", "found"),
    [
        (
            "returns",
            [[1.0, 2.0, 0, 0], [3.0, float("nan"), 4.0, 5.0]],
            "nan .*'returns' .*sample 0-1",
        ),
        ("scores", [float("-inf"), 1.0], "-inf .*'scores' .*sample 0-0"),
        ("scores", [1.0, 2.0], None),
        ("valid", [True, False], None),
    ],
)
def test_what_is_not_finite_is_told_with_node_column_and_sample(column, values, found, plane):
    @node(writes=column)
    def writes(response_mask):  # type: ignore[no-untyped-def]
        return torch.tensor(values)

    with (
        pytest.raises(UserNodeError, match=f"'x' .*{found}.*{__name__}") if found else nullcontext()
    ):
        either(step(writes), plane)


def test_what_is_not_finite_may_stand_where_nothing_counts():
    """On tokens of a tool, and in samples without a score."""

    @node(writes="returns")
    def writes(response_mask):  # type: ignore[no-untyped-def]
        return torch.where(response_mask > 0, torch.tensor([[1.0], [torch.nan]]), torch.inf)

    batch = group(valid=(True, False))
    batch["response_mask"] = torch.tensor([1.0, 0, 1, 1, 1, 1])
    learn(step(writes), batch)


@BOTH
@pytest.mark.parametrize("returns", ["nothing", "another", "the same", "a clone"])
def test_a_column_that_is_changed_in_place_is_told_unless_it_is_returned(returns, plane):
    @node(writes=() if returns == "nothing" else "returns")
    def changes(response_mask):  # type: ignore[no-untyped-def]
        mine = response_mask.clone() if returns == "a clone" else response_mask
        mine[:, -1] *= 100
        return {"nothing": None, "another": mine + 1}.get(returns, mine)

    refused = returns in ("nothing", "another")
    message = (
        "^node 'x' changed its column 'response_mask' in place, which has no effect: return it and "
        "name it"
    )
    with pytest.raises(UserNodeError, match=message) if refused else nullcontext():
        either(step(changes), plane)
