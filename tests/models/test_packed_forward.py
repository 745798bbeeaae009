"""The model's pass as one method: a wrapper that gathers weights around it changes nothing."""

import copy

import pytest
import torch

from distflow.models.loading import load_model
from tests.models.families import FAMILIES
from tests.models.fsdp_worker import OUTPUTS, SHARES, make_model, run
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model


@pytest.mark.slow
def test_sharded_by_fsdp_it_gives_the_same_outputs_and_gradients(tmp_path):
    write_tiny_model(tmp_path / "model", "qwen3")
    write_tiny_model(tmp_path / "recurrent", "qwen3_5_text", **FAMILIES["qwen3_5_text"].changes)
    run_ranks("tests.models.fsdp_worker", 2, tmp_path)

    for kind, outputs in OUTPUTS.items():
        expected = run(make_model(kind, tmp_path), kind, SHARES[0] + SHARES[1])
        ranks = [torch.load(tmp_path / f"{kind}-{rank}.pt") for rank in range(2)]
        assert any(
            float(value.abs().max()) > 0.1 for name, value in expected.items() if "gradient" in name
        )

        for name, value in expected.items():
            found = [rank.get(name, torch.zeros(0)) for rank in ranks]
            together = torch.cat(found) if name in outputs else found[0]

            # by which the rounding of sums in another order goes
            largest = max(1.0, float(value.abs().max()))
            torch.testing.assert_close(
                together, value.detach(), rtol=0, atol=1e-5 * largest, msg=f"{kind}: {name}"
            )

        assert ranks[0].keys() == expected.keys()


def test_a_copy_runs_on_its_own_weights(tmp_path):
    model = load_model(write_tiny_model(tmp_path / "model"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    one, two = (run(m, "policy", [0, 1, 2])["log_probs"] for m in (model, other))
    assert (one - two).abs().max() > 0.1
