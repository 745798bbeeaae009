"""Runs with more prompts in flight than their steps need: whole, killed, filtered, and to the end
of their data."""

from collections import Counter

import pytest
import torch

from distflow.scheduling.ledger import timeline
from distflow.scheduling.sample_queue import Exhausted
from tests.e2e.runs import Run
from tests.e2e.test_domains import FILTERED, REWARD, given, go_back, ground, steps_of
from tests.ledger_audit import verify
from tests.sparse_params import one_fast_in

__all__ = ["ground"]

MORE = "algorithm.filter_groups.oversampling=1"
DAWDLES = """
import os, time
def slowly(text):
    time.sleep(len(text) % 3 / 20 if os.path.exists(__file__ + ".slow") else 0)
"""


def rows_of(run: Run) -> Counter[tuple[int, int]]:
    """How often each row of each epoch was trained on."""
    where = {}
    taken = Counter[tuple[int, int]]()
    for _, record in timeline(run.folder / "ledger.jsonl"):
        if record["kind"] == "issued":
            where[record["group_id"]] = (record["epoch"], record["row"])
        if record["kind"] == "consumed":
            taken.update(where[prompt_group] for prompt_group in record["group_ids"])

    return taken


def moves(run: Run) -> list[tuple[object, ...]]:
    """What became of which groups, without times and tokens that were thrown away."""
    keys = ("kind", "group_id", "group_ids", "attempt", "reason", "step")
    kinds = ("issued", "complete", "dropped", "aborted", "consumed")
    records = (
        record for _, record in timeline(run.folder / "ledger.jsonl") if record["kind"] in kinds
    )
    return [tuple(str(record.get(key)) for key in keys) for record in records]


@pytest.mark.slow
def test_a_run_that_is_killed_is_the_one_that_was_not_whatever_its_verifiers_take(ground):
    settings = given(
        ground, *FILTERED, MORE, "trainer.total_training_steps=4", "trust.check_freq=1"
    )
    ground.write_reward(
        DAWDLES + REWARD.replace("    return sum", "    slowly(solution_str)\n    return sum")
    )
    whole = ground.run("grpo", *settings, name="more")
    go_back(whole, 2, "more_killed")
    (ground.folder / "reward.py.slow").touch()
    killed = ground.run("grpo", *settings, name="more_killed")
    ground.write_reward(REWARD)
    assert steps_of(whole) == steps_of(killed) == [Counter(math=3, code=1)] * 4
    assert moves(whole) == moves(killed)
    account = verify(whole.folder / "ledger.jsonl")
    assert account.aborted > 4 and account.domains["code"].dropped["all_equal"] > 0
    assert all(
        torch.equal(value, killed.weights(4)[name]) for name, value in whole.weights(4).items()
    )
    last = whole.metrics()[-1]
    assert last["async/aborted"] == account.aborted
    assert last["domains/math/aborted"] + last["domains/code/aborted"] == account.aborted
    assert not whole.notes("warning") and not killed.notes("warning")


@pytest.mark.parametrize(
    "more",
    one_fast_in(
        3,
        [
            (
                "async.max_concurrent_rollouts=3",
                "data.train_batch_size=5",
                "actor_rollout_ref.actor.ppo_mini_batch_size=5",
            ),
            ("async.max_concurrent_rollouts=1",),
            ("actor_rollout_ref.rollout.name=hf",),
        ],
    ),
)
def test_each_row_of_each_epoch_is_trained_on(ground, more):
    name = f"epochs{len(more)}{more[0][-2:]}"
    run = ground.run(
        "grpo", MORE, "data.train_max_samples=7", "trainer.total_epochs=2", *more, name=name
    )
    assert rows_of(run) == Counter({(epoch, row): 1 for epoch in (0, 1) for row in range(7)})
    account = verify(run.folder / "ledger.jsonl")
    assert (
        account.running == 0
        and account.consumed == 14
        and (account.aborted > 0) == (more[0][-1] != "1")
    )


def test_a_domain_whose_groups_are_all_dropped_ends_the_run(ground):
    ground.write_reward(REWARD.replace('extra_info["number"] % 2', "True"))
    keys = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3")
    with pytest.raises(Exhausted, match="'code', .* 3 drawn "):
        ground.run("grpo", *given(ground, *keys, MORE), name="nothing")
    ground.write_reward(REWARD)
