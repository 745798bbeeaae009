"""Which token is scored from where: against plain forwards of single sequences."""

import pytest
import torch

from distflow.data.batch import Batch
from distflow.models.loading import load_model
from distflow.models.lora import add_lora
from distflow.training.engine import OneRank
from distflow.training.torch_engine import TorchScorer, micro_batches
from tests.tiny_models import write_tiny_model
from tests.training.batches import plain_outputs, plain_values, ragged_batch


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_outputs_are_those_of_each_sequence_alone(tmp_path, family, temperature):
    model = load_model(write_tiny_model(tmp_path / "m", family), dtype=torch.float64)
    batch = ragged_batch()
    scorer = TorchScorer(model, temperature=temperature)
    found = scorer.compute(batch, ("log_probs", "entropy"))
    expected = plain_outputs(model, batch, temperature)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("max_tokens", [1, 15, 20, 40, 10_000])
def test_forward_keeps_the_order_of_samples_however_they_are_packed(tmp_path, max_tokens):
    model = load_model(write_tiny_model(tmp_path / "m", "qwen3"))
    batch = ragged_batch()
    scored = TorchScorer(model, max_tokens_per_micro_batch=max_tokens).forward(
        batch, ("entropy", "log_probs")
    )
    expected = plain_outputs(model, batch)
    assert torch.equal(scored.lengths("response"), batch.lengths("response"))

    for name, values in expected.items():
        assert scored.flat(name).dtype == torch.float32 and not scored.flat(name).requires_grad
        torch.testing.assert_close(scored.flat(name), values, rtol=0, atol=1e-5, msg=name)

    assert scored["log_probs"].shape == (8, 14)


def test_values_are_those_before_each_token(tmp_path):
    critic = load_model(write_tiny_model(tmp_path / "m"), seed=1, critic=True)
    batch = ragged_batch()
    scored = TorchScorer(critic, max_tokens_per_micro_batch=20).forward(batch, ("values",))
    assert scored.names == ("values",)
    torch.testing.assert_close(
        scored.flat("values"), plain_values(critic, batch), rtol=0, atol=1e-5
    )


def test_one_token_responses_are_response_columns(tmp_path):
    """As many tokens as samples must not be taken for one entry a sample."""
    model = load_model(write_tiny_model(tmp_path / "m"))
    batch = ragged_batch([(3, 1), (2, 1), (4, 1)])
    scored = TorchScorer(model).forward(batch, ("log_probs", "entropy"))
    assert scored["log_probs"].shape == scored["entropy"].shape == (3, 1)
    assert batch.merge(scored)["log_probs"].shape == (3, 1)


@pytest.mark.parametrize("lengths", [[], [(4, 0), (2, 0)]])
def test_nothing_to_score_gives_empty_columns(tmp_path, lengths):
    model = load_model(write_tiny_model(tmp_path / "m"))
    scored = TorchScorer(model).forward(ragged_batch(lengths), ("log_probs",))
    assert len(scored) == len(lengths)
    assert scored.flat("log_probs").shape == (0,)


def test_a_sample_without_a_prompt_is_refused_by_name(tmp_path):
    model = load_model(write_tiny_model(tmp_path / "m"))
    batch = ragged_batch([(3, 2), (0, 2)])
    with pytest.raises(ValueError, match="sample 1-0"):
        TorchScorer(model).forward(batch, ("log_probs",))
    nameless = batch.only(name for name in batch.names if name != "uid")
    with pytest.raises(ValueError, match="number 1"):
        TorchScorer(model).compute(nameless, ("log_probs",))


def test_a_policy_without_its_adapter_is_the_reference(tmp_path):
    folder = write_tiny_model(tmp_path / "m")
    policy = add_lora(load_model(folder), rank=2)

    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)

    batch = ragged_batch()
    base = TorchScorer(load_model(folder)).forward(batch, ("log_probs",)).flat("log_probs")
    off = TorchScorer(policy, without_adapter=True).forward(batch, ("log_probs",)).flat("log_probs")
    on = TorchScorer(policy).forward(batch, ("log_probs",)).flat("log_probs")

    # without an adapter native code computes
    torch.testing.assert_close(off, base, rtol=0, atol=1e-5)
    assert (on - base).abs().max() > 1e-3


def test_bfloat16_by_autocast_is_near_float32(tmp_path):
    model = load_model(write_tiny_model(tmp_path / "m"))
    batch = ragged_batch()
    exact = TorchScorer(model).forward(batch, ("log_probs", "entropy"))
    rough = TorchScorer(model, compute_dtype=torch.bfloat16).forward(
        batch, ("log_probs", "entropy")
    )
    stored = TorchScorer(load_model(tmp_path / "m", dtype=torch.bfloat16)).forward(
        batch, ("log_probs", "entropy")
    )

    for name in ("log_probs", "entropy"):
        for other in (rough, stored):
            error = (other.flat(name) - exact.flat(name)).abs()
            assert 0 < error.max() < 0.2 and error.mean() < 0.05


def test_micro_batches_hold_every_sample_once_within_the_bound():
    batch = ragged_batch()
    lengths = batch.lengths("sequence")
    bins = micro_batches(batch, 16, OneRank())
    assert torch.equal(torch.cat(bins).sort().values, torch.arange(len(batch)))
    assert all(lengths[b].sum() <= 16 for b in bins)
    alone = micro_batches(batch, 10, OneRank())
    assert [3] in [b.tolist() for b in alone], (
        "a sample longer than the bound is a micro-batch of its own"
    )
    assert all(len(b) == 1 or lengths[b].sum() <= 10 for b in alone)


def test_samples_of_one_prompt_share_a_micro_batch_as_far_as_they_fit():
    prompts = torch.tensor([3, 3, 3, 3, 3, 4, 4, 3])
    batch = Batch(prompts, torch.tensor([2, 2, 2, 2, 2, 1, 1, 2]))
    tokens = {3: [7, 8, 9], 4: [7, 8, 9, 9]}
    batch["prompt_ids"] = torch.tensor(
        [token for length in prompts.tolist() for token in tokens[length]]
    )
    bins = [b.tolist() for b in micro_batches(batch, 16, OneRank())]
    assert sorted(bins) == [[0, 1, 2], [3, 4, 7], [5, 6]]
    assert sorted(b.tolist() for b in micro_batches(batch, 100, OneRank())) == [list(range(8))]
