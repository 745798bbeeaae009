"""What a checkpoint holds besides weights: a resumed process draws on where the undisturbed one
would have."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from distflow.errors import UserError
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.checkpoint.restore import (
    check_same_facts,
    load_queued,
    restore,
    set_generators,
)
from distflow.runtime.checkpoint.saved_parts import copy_of_state, merge_node_states, saved_parts
from distflow.runtime.checks_protocol import CHECK_STATE
from distflow.runtime.resources import build_resources
from distflow.runtime.rollout_loop.group import finished_group
from distflow.runtime.sample_queue.protocol import ResumePoint
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.group_states import GroupState, PromptGroup
from distflow.scheduling.scheduler_snapshot import saved_group
from tests.e2e.runs import Playground
from tests.runtime.groups import group


def draws() -> tuple[list[float], list[float], list[float], list[float]]:
    """From every generator; an odd number of Gaussians, of which Python and numpy keep the second
    of a pair."""
    python = [random.random(), random.gauss(0, 1)]
    return (
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        np.random.standard_normal(3).tolist(),
        python,
    )


def test_all_random_draws_continue_as_in_the_undisturbed_process(tmp_path):
    off = (
        "~reward.functions",
        "~reward.num_workers",
        "~custom_reward_function.path",
        "~actor_rollout_ref.rollout.n",
    )
    _, spec = Playground(tmp_path).spec("sft", "data.response_key=answer", *off)
    resources = build_resources(spec.factories, spec.plan.ranks[0])
    coordinator = Coordinator(spec.data)
    queued = finished_group(PromptGroup(4, 0, 4, 2, 0), group(4), [({"mine": 1.0}, 2.0)])
    record = replace(
        queued.prompt_group,
        state=GroupState.QUEUED,
        num_tokens=queued.num_tokens,
        lowest_version=queued.version,
    )
    point = ResumePoint({**coordinator.snapshot(), "live": [saved_group(record)]}, {4: queued})
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7)
    draws()
    store = CheckpointStore(tmp_path / "checkpoints")

    writing = store.begin(1)
    names = []
    for name, part in saved_parts(spec, resources, lambda: point, {"node": {"kept": 1}}):
        writing.write(name, part)
        names.append(name)

    writing.commit(names)
    undisturbed = draws()

    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(8)
    assert all(other != first for other, first in zip(draws(), undisturbed, strict=True))
    nodes = restore(store.load(), resources)
    restored = load_queued(store.load())
    set_generators(store.load(), seed=1)
    assert draws() == undisturbed
    assert nodes == {"node": {"kept": 1}} and restored[4].measured == queued.measured
    assert restored[4].data["uid"] == ["4-0", "4-1"]
    assert (
        restored[4].prompt_group == queued.prompt_group
        and restored[4].num_tokens == queued.num_tokens
    )
    assert check_same_facts(store.load(), spec, {**spec.facts, **resources.facts}) == []


def test_a_run_that_starts_draws_by_its_seed():
    drawn = []
    for seed in (1, 1, 2):
        set_generators(None, seed)
        drawn.append(draws())

    assert drawn[0] == drawn[1] and all(
        one != other for one, other in zip(drawn[0], drawn[2], strict=True)
    )


def test_what_ranks_keep_is_that_of_the_first_but_of_updates_each_has_those_of_its_own_models():
    first = {"mine": {"seen": 1}, CHECK_STATE: {"updates": {"actor": 5}, "reference": [1]}}
    second = {
        "mine": {"seen": 2},
        "theirs": {},
        CHECK_STATE: {"updates": {"critic": 4}, "reference": [2]},
    }
    assert merge_node_states([first, second]) == {
        "mine": {"seen": 1},
        "theirs": {},
        CHECK_STATE: {"updates": {"actor": 5, "critic": 4}, "reference": [1]},
    }
    assert merge_node_states([{}, {}]) == {}


@pytest.mark.parametrize(
    ("kept", "shown"),
    [
        (torch.tensor(1.5), r"tensor\(1.5000\)"),
        ([{"seen": {3}}], r"\{3\}"),
        ({"of_rows": {7: 1}}, "7"),
        ((1, 2), r"\(1, 2\)"),
        (np.int64(3), "3"),
    ],
)
def test_a_state_that_a_resumed_run_would_not_have_is_refused_by_the_name_of_its_node(kept, shown):
    with pytest.raises(
        UserError,
        match=rf"'mine' .*{shown}.* ctx\.state, ",
    ):
        copy_of_state(
            {"fine": {"n": [1, 2.5, None, "a", True, float("nan")]}, "mine": {"kept": kept}}
        )


class Changes:
    """Is copied while a node of the rollout loop puts one key in place of another."""

    def __init__(self, state: dict[str, object]) -> None:
        self._state = state
        self._num_copies = 0

    def __deepcopy__(self, memo: object) -> int:
        self._num_copies += 1
        if self._num_copies == 1:
            del self._state["before"]
            self._state["after"] = 2
        return 1


def test_a_state_whose_keys_change_while_it_is_copied_is_copied_again():
    state: dict[str, object] = {"before": 1}
    state["last"] = Changes(state)
    assert copy_of_state({"mine": state}) == {"mine": {"last": 1, "after": 2}}


def test_weights_data_or_tokens_that_are_not_those_of_before_are_refused_and_another_machine_is_told(  # noqa: E501
    tmp_path,
):
    _, spec = Playground(tmp_path).spec("ppo", "actor_rollout_ref.rollout.n=1")
    resources = build_resources(spec.factories, spec.plan.ranks[0])
    coordinator = Coordinator(spec.data)
    point = ResumePoint(coordinator.snapshot(), {})
    store = CheckpointStore(tmp_path / "checkpoints")
    writing = store.begin(1)
    parts = dict(saved_parts(spec, resources, lambda: point, {}))
    assert set(parts) == {"actor", "actor_meta", "critic", "critic_meta", "rank_0", "run"}
    for name, part in parts.items():
        writing.write(name, part)
    writing.commit(parts)
    assert check_same_facts(store.load(), spec, {**spec.facts, **resources.facts}) == []

    for name in ("data", "tokenizer", "model"):
        facts = {**resources.facts, f"{name}_fingerprint": "another"}
        with pytest.raises(UserError, match=f"different {name}"):
            check_same_facts(store.load(), spec, facts)

    (note,) = check_same_facts(store.load(), spec, {**resources.facts, "cpu": "another"})
    assert note.startswith("cpu was ") and "is another now" in note
