"""The checks at the points where a worker calls them: their errors and notes, and how often they
come."""

from pathlib import Path

import pytest
import torch

from distflow.algorithms.mismatch_check import Tolerance
from distflow.checks.invariants import Invariants, LossTerms, Movement, NonFinite
from distflow.data.batch import Batch
from distflow.errors import TrustError
from tests.checks.batches import WeightsOnly, sampled_batch

TAKEN = {"loss": 0.1, "grad_norm": 1.0, "lr": 1e-3, "skipped": 0.0, "log_ratio_abs": 0.0}


class Notes(list[tuple[str, str]]):
    def __call__(self, kind: str, message: str) -> None:
        self.append((kind, message))


def make_checks(folder: Path, ratio_limit: float = 1e-4) -> tuple[Invariants, Notes]:
    notes = Notes()
    checks = Invariants(
        notes,
        Tolerance.of(exact=True),
        ratio_limit,
        NonFinite(folder, 3, ""),
        {"actor": Movement(5), "critic": Movement(5)},
        LossTerms(("actor/loss_term/kl",), after=2),
    )

    return checks, notes


def drifted(gap: float) -> Batch:
    batch = sampled_batch()
    batch["old_log_probs"] = batch.flat("rollout_log_probs") - gap
    return batch


def test_the_first_ratio_of_a_step_must_be_one_and_later_ones_need_not(tmp_path):
    checks, notes = make_checks(tmp_path)
    far = TAKEN | {"log_ratio_abs": 2e-4}
    engine = WeightsOnly(w=torch.ones(2))
    checks.updated("actor", engine, sampled_batch(), TAKEN, step=0, first=True)
    checks.updated("actor", engine, sampled_batch(), far, step=0, first=False)
    checks.updated("critic", WeightsOnly(w=torch.ones(2)), sampled_batch(), far, step=0, first=True)
    with pytest.raises(TrustError, match=r"\|log ratio\| .* 0\.0002 .* 0\.0001\)"):
        checks.updated("actor", engine, sampled_batch(), far, step=1, first=True)
    assert notes == []


def test_a_skipped_update_is_reported_and_its_ratio_is_not_checked(tmp_path):
    checks, notes = make_checks(tmp_path)
    skipped = TAKEN | {"skipped": 1.0, "log_ratio_abs": 9.0}
    checks.updated(
        "actor", WeightsOnly(w=torch.ones(2)), sampled_batch(), skipped, step=0, first=True
    )
    ((kind, message),) = notes
    assert kind == "warning" and "an update of the actor was skipped" in message


def test_tensors_that_do_not_move_are_reported_together(tmp_path):
    checks, notes = make_checks(tmp_path)
    engine = WeightsOnly(**{f"w{i}": torch.ones(2) for i in range(7)})
    for _ in range(9):
        checks.updated("actor", engine, sampled_batch(), TAKEN, step=0, first=False)
    ((kind, message),) = notes
    assert kind == "finding" and message.startswith(
        "actor: 'w0', 'w1', 'w2', 'w3', 'w4' and 2 more did not change"
    )


def test_a_mismatch_is_reported_when_it_appears_and_when_it_has_doubled(tmp_path):
    checks, notes = make_checks(tmp_path)
    for gap in (1e-5, 2e-4, 3e-4, 3e-4, 6e-4):
        found = checks.step_trained(drifted(gap), {}, step=0)
        assert found["mismatch/mean_abs"] == pytest.approx(gap, rel=0.01)
    assert [message.split(" nats")[0].split()[-1] for _, message in notes] == ["0.0002", "0.0006"]


def test_a_node_that_rewrote_the_mask_is_found(tmp_path):
    checks, _ = make_checks(tmp_path)
    batch = sampled_batch()
    checks.step_taken(batch, 0, None)
    batch["response_mask"] = batch["response_mask"].roll(1, dims=-1)
    with pytest.raises(TrustError, match="response_mask is wrong"):
        checks.step_trained(batch, {}, step=0)


def test_steps_without_an_update_do_not_count_for_loss_terms(tmp_path):
    checks, notes = make_checks(tmp_path)
    for _ in range(5):
        checks.step_trained(sampled_batch(), {"critic/loss": 1.0}, step=0)
    assert notes == []
    for _ in range(5):
        checks.step_trained(sampled_batch(), {"actor/loss": 1.0, "actor/loss_term/kl": 0.0}, step=0)
    ((kind, message),) = notes
    assert (
        kind == "finding" and "loss_term/kl is on but was exactly 0 in the first 2 steps" in message
    )


def test_recorded_responses_are_not_compared_with_an_engine(tmp_path):
    checks, notes = make_checks(tmp_path)
    checks.samples = False
    assert checks.step_trained(drifted(5.0), {}, step=0) == {} and notes == []
    checks.samples = True
    with pytest.raises(TrustError, match="disagree by 5 "):
        checks.step_trained(drifted(5.0), {}, step=0)


def test_a_part_of_a_response_is_found(tmp_path):
    checks, _ = make_checks(tmp_path)
    batch = sampled_batch()
    batch["finish_reason"] = ["stop", "length", "abort", "stop"]
    with pytest.raises(TrustError, match="sample 1-0 .* part"):
        checks.step_taken(batch, 0, None)
