"""Runs with more prompts in flight than their steps need: whole, killed, filtered, and to the end
of their data."""

from collections import Counter

import pytest

from distflow.scheduling.ledger import timeline
from distflow.scheduling.sample_queue import Exhausted
from tests.e2e.runs import Run
from tests.e2e.test_domains import REWARD, given, ground
from tests.ledger_audit import verify
from tests.sparse_params import one_fast_in

__all__ = ["ground"]

MORE = "algorithm.filter_groups.oversampling=1"


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
