"""What a node's `ctx` offers: scores on samples, and mini-batches that no number of ranks
changes."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRow
from distflow.errors import UserError
from distflow.runtime.checks_protocol import Updates
from distflow.runtime.node_context import Contexts, NodeContext
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.group import Group
from distflow.scheduling.group_states import PromptGroup
from tests.runtime.groups import PARAMS, context, group, waiting_group

GROUP_IDS = (3, 4, 6, 7, 9)


def parts(owned: Sequence[int], step: int = 0, epoch: int = 0) -> list[list[int]]:
    """The groups of each mini-batch of two groups, on a rank that has these groups."""
    ctx = context(step, group_ids=GROUP_IDS)
    batch = Batch.concat([group(number) for number in owned])
    return [part["group_index"].tolist() for part in ctx.minibatches(batch, 2, epoch)]


def test_the_mini_batches_of_all_ranks_together_are_those_of_one():
    alone = parts(GROUP_IDS)
    assert [len(part) for part in alone] == [4, 4, 2]
    assert sorted(row for part in alone for row in part) == sorted(GROUP_IDS * 2)
    for one, other in (((3, 9), (4, 6, 7)), ((7,), (3, 4, 6, 9))):
        together = [sorted(a + b) for a, b in zip(parts(one), parts(other), strict=True)]
        assert together == [sorted(part) for part in alone]


def test_a_node_has_one_state_of_its_own_and_its_updates_are_told_by_role():
    told: list[tuple[Any, ...]] = []
    state: dict[str, dict[str, Any]] = {}
    actor = object()
    critic = object()
    parts = Resources(None, (), {}, 0, actor=actor, critic=critic)  # type: ignore[arg-type]
    noted: Any = SimpleNamespace(
        before_update=lambda *update: update[-1],
        after_update=lambda *update: told.append(update),
    )
    contexts = Contexts(Config(), parts, state, Updates(noted, lambda name: nullcontext(), critic))  # type: ignore[arg-type]
    ctx = contexts.for_training(4, GROUP_IDS, "a")
    ctx.state["n"] = 1
    contexts.for_training(4, GROUP_IDS, "b").state["n"] = 2
    assert (ctx.step, ctx.group_ids, ctx.validating) == (4, GROUP_IDS, False)
    batch = group(3)
    loss: Any = object()
    assert ctx.before_update(actor, batch, loss) is loss  # type: ignore[arg-type]
    ctx.after_update(actor, batch, {"loss": 1.0}, True)  # type: ignore[arg-type]
    ctx.after_update(critic, batch, {}, False)  # type: ignore[arg-type]
    assert told == [
        ("actor", actor, batch, {"loss": 1.0}, 4, True),
        ("critic", critic, batch, {}, 4, False),
    ]

    answered = Group(PromptGroup(5, 0, 5, 2, 3), PromptRow(5, (1,), "p"), PARAMS, seed=1)
    ctx = contexts.for_rollout(answered, "c")
    ctx.state["n"] = 3
    assert (ctx.step, ctx.group, ctx.validating) == (3, answered, False)
    assert contexts.for_rollout(answered, "a", validating=True).validating
    assert state == {"a": {"n": 1}, "b": {"n": 2}, "c": {"n": 3}}
    assert contexts.for_training(5, (), "a").state == {"n": 1}
    assert contexts.for_rollout(waiting_group(), "c").state == {"n": 3}


def test_where_several_workers_generate_none_keeps_anything_in_the_rollout_loop():
    parts = Resources(None, (), {}, 0)  # type: ignore[arg-type]
    state = {"saved": {"n": 1}}
    contexts = Contexts(Config(), parts, state, Updates(None, None, None, None), keeps=False)  # type: ignore[arg-type]
    ctx = contexts.for_rollout(waiting_group(), "c")
    assert not ctx.state and ctx.state.get("n") is None

    for keep in (lambda: ctx.state.update(n=1), lambda: ctx.state.setdefault("n", 1)):
        with pytest.raises(UserError, match=r"'c' .*ctx\.state\['n'\] "):
            keep()

    # by a run on one worker, which this one resumes from
    with pytest.raises(UserError, match="'saved'"):
        contexts.for_rollout(waiting_group(), "saved")
    contexts.for_training(0, (), "saved").state["n"] = 2
    assert state == {"saved": {"n": 2}}


def test_the_order_of_mini_batches_hangs_on_the_seed():
    orders = set()
    for seed in range(4):
        config = replace(Config(), trainer=replace(Config().trainer, seed=seed))
        ctx = NodeContext(config, 0, None, group_ids=GROUP_IDS)  # type: ignore[arg-type]
        batch = Batch.concat([group(number) for number in GROUP_IDS])
        orders.add(str([part["group_index"].tolist() for part in ctx.minibatches(batch, 2, 0)]))

    assert len(orders) > 1
