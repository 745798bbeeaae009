"""Runs whose groups are filtered by the mean of their scores and by a function of the user's."""

from collections import Counter

import pytest
import torch

from distflow.data.batch import Batch
from distflow.scheduling.ledger import timeline
from tests.e2e.runs import Playground, Run
from tests.e2e.test_domains import go_back
from tests.ledger_audit import verify

ENABLED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score")
BAND = (
    *ENABLED,
    "algorithm.filter_groups.mean_range=[0.4,0.6]",
    "algorithm.filter_groups.max_num_gen_batches=20",
)
ACCEPT = """
def is_wanted(scores, domain, valid):
    assert set(domain) == {"default"} and bool(valid.all())
    return "best_is_bad" if float(scores.max()) < 0.8 else float(scores.min()) < 0.3

async def waits(scores):
    return True

def reads(nothing_writes_it):
    return True
"""
STEPS = (
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.save_groups=all",
    "trust.check_freq=1",
)


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("filters"))
    (ground.folder / "accept.py").write_text(ACCEPT)
    return ground


def groups_of(run: Run) -> list[torch.Tensor]:
    """The scores of every group that was trained on."""
    found = []
    for step in range(1, 5):
        batch = Batch.load(run.folder / "tokens" / f"{step:06d}.safetensors")
        found += [
            batch["scores"][batch["group_index"] == group]
            for group in batch["group_index"].unique()
        ]

    return found


def reasons(run: Run) -> Counter[str]:
    records = (record for _, record in timeline(run.folder / "ledger.jsonl"))
    return Counter(record["reason"] for record in records if record["kind"] == "dropped")


@pytest.mark.slow
def test_groups_with_a_mean_outside_are_replaced_counted_and_proven(ground):
    run = ground.run("grpo", *BAND, *STEPS, name="band")
    means = [float(scores.double().mean()) for scores in groups_of(run)]
    assert len(means) == 16 and all(0.4 < mean < 0.6 for mean in means)
    found = reasons(run)
    assert {"mean_too_low", "mean_too_high"} <= set(found) and run.metrics()[-1][
        "async/dropped/mean_too_low"
    ]
    assert verify(run.folder / "ledger.jsonl").dropped == found
    go_back(run, 2, "band_killed")
    killed = ground.run("grpo", *BAND, *STEPS, name="band_killed")
    assert all(
        torch.equal(value, killed.weights(4)[name]) for name, value in run.weights(4).items()
    )
    assert reasons(killed) == found and not [
        note for note in run.notes("warning") if "sampled policy" not in note
    ]


@pytest.mark.slow
def test_a_function_drops_groups_for_reasons_of_its_own(ground):
    accepts = f"algorithm.filter_groups.should_accept={ground.folder}/accept.py:is_wanted"
    run = ground.run(
        "grpo", accepts, *STEPS, "algorithm.filter_groups.max_num_gen_batches=20", name="function"
    )
    assert all(float(scores.max()) > 0.8 and float(scores.min()) < 0.3 for scores in groups_of(run))
    assert set(reasons(run)) == {"best_is_bad", "rejected"}
    go_back(run, 2, "function_killed")
    killed = ground.run(
        "grpo",
        accepts,
        *STEPS,
        "algorithm.filter_groups.max_num_gen_batches=20",
        name="function_killed",
    )
    assert all(
        torch.equal(value, killed.weights(4)[name]) for name, value in run.weights(4).items()
    )
