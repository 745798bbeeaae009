"""Extra prompts over a real Ray: each worker fills its places of the step, and ends its other
groups."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from distflow.scheduling.ledger import timeline
from tests.cluster.test_supervisor import run
from tests.e2e.runs import Playground, Run
from tests.e2e.test_domains import go_back
from tests.e2e.test_oversampling import MORE
from tests.ledger_audit import verify

pytestmark = pytest.mark.slow
FILTERED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score")
BAND = (
    "algorithm.filter_groups.mean_range=[0.35,0.65]",
    "algorithm.filter_groups.max_num_gen_batches=20",
)
STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trust.check_freq=2")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, on_ray: None) -> Playground:
    return Playground(tmp_path_factory.mktemp("more"))


def moves(run: Run) -> Counter[tuple[object, ...]]:
    """What became of which groups, in any order: calls of the coordinator may overtake one
    another."""
    found = Counter[tuple[object, ...]]()
    for _, record in timeline(Path(run.folder) / "ledger.jsonl"):
        if record["kind"] in ("issued", "complete", "dropped", "aborted"):
            for number in record.get("group_ids", [record.get("group_id")]):
                found[record["kind"], number, record.get("attempt"), record.get("reason")] += 1
    return found


@pytest.mark.by_hand
@pytest.mark.parametrize("num_workers", [2, 1])
def test_extra_groups_are_ended_and_a_killed_run_is_the_one_that_was_not(
    ground: Playground, num_workers: int
) -> None:
    settings = (*FILTERED, *BAND, MORE, *STEPS, f"trainer.n_gpus_per_node={num_workers}")
    whole = run(ground, *settings, name=f"whole{num_workers}")
    go_back(whole, 2, f"killed{num_workers}")
    killed = run(ground, *settings, name=f"killed{num_workers}")
    assert all(
        torch.equal(value, killed.weights(4)[name]) for name, value in whole.weights(4).items()
    )
    assert moves(whole) == moves(killed)
    account = verify(whole.folder / "ledger.jsonl")
    assert account.aborted > 2 and account.consumed == 16 and account.dropped
    assert not [note for note in whole.notes("warning") if "sampled policy" not in note]
    if num_workers == 1:
        alone = ground.run("grpo", *settings[:-1], name="alone")
        assert moves(alone) == moves(whole)
        assert all(
            torch.equal(value, alone.weights(4)[name]) for name, value in whole.weights(4).items()
        )
