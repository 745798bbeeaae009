"""Skipped updates: what is kept of them, when they end the run, and weights that must go no
further."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from distflow.checks import nonfinite
from distflow.checks.nonfinite import NonFinite
from distflow.data.batch import Batch
from distflow.errors import TrustError
from tests.checks.batches import WeightsOnly, sampled_batch

SKIPPED = {"loss": math.nan, "grad_norm": 1.0, "skipped": 1.0}
TAKEN = {"loss": 1.0, "grad_norm": 1.0, "skipped": 0.0}


def engine() -> WeightsOnly:
    return WeightsOnly(w=torch.arange(4.0))


def test_a_bundle_holds_batch_weights_and_config(tmp_path):
    batch = sampled_batch()
    batch["extra_info"] = [{"not JSON": {1, 2}}] * len(batch)
    bundle = NonFinite(tmp_path, 5, "a: 1\n").updated("actor", engine(), batch, SKIPPED, step=6)
    assert bundle is not None and bundle.name == "step-000007-actor-1"
    kept = Batch.load(bundle / "batch.safetensors")
    assert (
        torch.equal(kept["old_log_probs"], batch["old_log_probs"]) and kept["uid"] == batch["uid"]
    )
    assert torch.equal(load_file(bundle / "weights.safetensors")["w"], torch.arange(4.0))
    assert (bundle / "config.yaml").read_text() == "a: 1\n"
    facts = json.loads((bundle / "bundle.json").read_text())
    assert facts["role"] == "actor" and facts["step"] == 6 and facts["metrics"]["loss"] == "nan"


def test_an_update_that_was_taken_leaves_nothing(tmp_path):
    assert (
        NonFinite(tmp_path, 2, "").updated("actor", engine(), sampled_batch(), TAKEN, step=0)
        is None
    )
    assert list(tmp_path.iterdir()) == []


def test_only_skips_in_a_row_of_one_engine_end_the_run(tmp_path):
    check = NonFinite(tmp_path, 3, "")
    batch = sampled_batch()

    for metrics in (SKIPPED, SKIPPED, TAKEN, SKIPPED, SKIPPED):
        check.updated("actor", engine(), batch, metrics, step=0)
        check.updated("critic", engine(), batch, TAKEN, step=0)

    with pytest.raises(TrustError, match="3 updates of the actor .*distflow replay"):
        check.updated("actor", engine(), batch, SKIPPED, step=1)


def test_bundles_do_not_fill_the_disk(tmp_path):
    check = NonFinite(tmp_path, 3, "")
    batch = sampled_batch()

    bundles = []
    for step in range(8):
        bundles += [check.updated("actor", engine(), batch, SKIPPED, step) for _ in range(2)]
        check.updated("actor", engine(), batch, TAKEN, step)

    assert {bundle.name for bundle in bundles[-3:] if bundle} == {
        path.name for path in tmp_path.iterdir()
    }
    first, second = (bundle / "weights.safetensors" for bundle in bundles[-2:] if bundle)
    assert first.samefile(second), "nothing changed between two skipped updates"


def test_a_new_bundle_of_an_earlier_step_stays(tmp_path):
    """A run that was resumed from an earlier checkpoint finds bundles of later steps."""
    for start in (8, 2):
        check = NonFinite(tmp_path, 2, "")
        for step in (start, start + 1):
            bundle = check.updated("actor", engine(), sampled_batch(), SKIPPED, step)
            check.updated("actor", engine(), sampled_batch(), TAKEN, step)
            assert bundle is not None and bundle.is_dir()


def test_all_ranks_make_sharded_weights_whole_whichever_bundles_are_left(tmp_path, monkeypatch):
    """Ranks that do not take part in a gather would let the others wait forever."""
    calls: list[torch.Tensor] = []
    monkeypatch.setattr(nonfinite, "whole", lambda tensor: calls.append(tensor) or tensor)
    ranks = [NonFinite(tmp_path, 3, "") for _ in range(3)]

    # the last ones remove the bundle of the first one before it makes another
    for order in (ranks, ranks[::-1]):
        numbers = []
        for rank in order:
            calls.clear()
            rank.updated("actor", engine(), sampled_batch(), SKIPPED, step=0)
            numbers.append(len(calls))
        assert len(set(numbers)) == 1, numbers

    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30, 1e5, -1100.0])
def test_weights_that_are_not_finite_or_garbage_go_no_further(tmp_path, value):
    broken = WeightsOnly(fine=torch.ones(2), broken=torch.tensor([1.0, value]))
    with pytest.raises(
        TrustError,
        match=r"step 4 .*\(1 tensors, 'broken' .* first.* saved",
    ):
        check = NonFinite(tmp_path, 3, "", {"actor": {"broken": 0.5, "fine": 0.5}})
        check.updated("actor", broken, sampled_batch(), TAKEN, step=3)


def test_weights_that_training_makes_raise_no_alarm(tmp_path):
    """Fresh zeros that have grown, a norm's large ones, a sum beyond float32."""
    large = torch.full((2**20,), 900.0)
    grown = WeightsOnly(zeros=torch.tensor([3.0, -40.0]), norm=torch.tensor([2000.0]), large=large)
    check = NonFinite(tmp_path, 3, "", {"actor": {"zeros": 0.0, "norm": 1900.0, "large": 900.0}})
    assert check.updated("actor", grown, sampled_batch(), TAKEN, step=3) is None
