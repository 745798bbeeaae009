"""Taking weights: all or nothing, ties, casts; and the hashes of receipts."""

from typing import Any

import pytest
import torch

from distflow.rollout.engine_weights import (
    EngineWeights,
    PartialWeightsError,
    check_shared,
    copy_weights,
    stripe_hashes,
)
from tests.rollout.drive import FIRST, make_model


def weights_of(model: Any, **changes: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
    named = {
        **dict(model.named_parameters()),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return [(name, tensor) for name, tensor in named.items() if tensor is not None]


def test_all_parameters_are_copied_and_hashed():
    target = make_model(seed=0)
    source = make_model(seed=1)
    hashes = copy_weights(target, source.named_parameters())
    assert hashes == stripe_hashes(source.named_parameters())
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, "model.norm.weight: missing"),
        ({"model__norms__weight": torch.zeros(3)}, "model.norms.weight: unknown"),
        ({"lm_head__weight": torch.zeros(98, 16)}, r"lm_head.weight: shape \(98, 16\), expected"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changes(changes, message):
    target = make_model(seed=0)
    source = make_model(seed=1)
    before = stripe_hashes(target.named_parameters())
    with pytest.raises(ValueError, match=message):
        copy_weights(target, weights_of(source, **changes))
    assert stripe_hashes(target.named_parameters()) == before


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (lambda model: weights_of(model, model__norm__weight=None), "model.norm.weight: missing"),
        (
            lambda model: weights_of(model, model__norms__weight=torch.zeros(3)),
            "model.norms.weight: unknown",
        ),
        (
            lambda model: [*weights_of(model), ("lm_head.weight", torch.zeros(1))],
            "lm_head.weight: shape",
        ),
        (
            lambda model: [*weights_of(model), *weights_of(model)[:1]],
            "embed_tokens.weight: sent twice",
        ),
    ],
)
def test_what_comes_one_after_another_and_does_not_fit_is_told_apart(sent, message):
    target = make_model(seed=0)
    source = make_model(seed=1)
    with pytest.raises(PartialWeightsError, match=message):
        copy_weights(target, iter(sent(source)))
    assert torch.equal(target.model.embed_tokens.weight, source.model.embed_tokens.weight), (
        "what came first is in"
    )


def test_an_engine_without_its_memory_stays_so_if_the_next_weights_are_rejected():
    model = make_model()
    weights = EngineWeights(model, shared=False)
    hashes = stripe_hashes(model.named_parameters())
    weights.release()
    with pytest.raises(ValueError, match=r"model\.norm\.weight: missing"):
        weights.load(FIRST, FIRST, weights_of(make_model(seed=1), model__norm__weight=None))
    assert weights.hashes() == hashes
    with pytest.raises(RuntimeError, match="has released its weights"):
        weights.check_whole()
    weights.load(FIRST, FIRST, weights_of(make_model()))
    weights.check_whole()
    assert stripe_hashes(model.named_parameters()) == weights.hashes() == hashes


@pytest.mark.parametrize(("arrive", "error"), [(list, ValueError), (iter, PartialWeightsError)])
def test_tied_weights_may_come_under_either_name_or_both_if_equal(arrive, error):
    target, source = (make_model(seed=seed, tie_word_embeddings=True) for seed in (0, 1))
    tied = source.lm_head.weight
    for changes in (
        {"lm_head__weight": tied, "model__embed_tokens__weight": None},
        {"lm_head__weight": None},
        {"lm_head__weight": tied.detach().clone()},
    ):
        with torch.no_grad():
            target.lm_head.weight.zero_()
        copy_weights(target, arrive(weights_of(source, **changes)))
        assert torch.equal(target.lm_head.weight, tied)

    with pytest.raises(error, match=r"model\.embed_tokens\.weight and lm_head\.weight"):
        copy_weights(target, arrive(weights_of(source, lm_head__weight=tied + 1)))


def test_a_receiver_of_another_type_is_hashed_in_its_own():
    target = make_model(seed=0).to(torch.bfloat16)
    source = make_model(seed=1)
    hashes = copy_weights(target, source.named_parameters())
    assert hashes == stripe_hashes(source.named_parameters(), dtype=torch.bfloat16)
    assert hashes != stripe_hashes(source.named_parameters())


def test_shared_weights_must_be_the_same_storage():
    model = make_model()
    check_shared(model, model.named_parameters())
    check_shared(model, ())

    with pytest.raises(ValueError, match=r"1 sent tensors .* elsewhere \(model\.norm\.weight\)"):
        check_shared(
            model, weights_of(model, model__norm__weight=model.model.norm.weight.detach().clone())
        )


def stripe_hash(tensor: torch.Tensor) -> str:
    return stripe_hashes([("weight", tensor)])["weight"]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (1024,), (1025,), (333, 77)])
def test_the_stripe_hash_sees_values_shape_and_type(shape):
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    assert stripe_hash(tensor) == stripe_hash(tensor.clone())
    assert stripe_hash(tensor) != stripe_hash(tensor.double())
    assert stripe_hash(tensor) != stripe_hash(tensor[None])
    if tensor.numel():
        assert stripe_hash(tensor) != stripe_hash(tensor + 1e-3)
    strided = torch.stack((tensor, tensor), dim=-1)[..., 0]
    assert stripe_hash(strided) == stripe_hash(tensor)


def test_the_stripe_covers_the_columns_of_a_matrix():
    """With an even stride a matrix of 1,024 rows would be sampled in its first column only."""
    tensor = torch.zeros(1024, 512)
    changed = tensor.clone()
    changed[:, 1:] = 1.0
    assert stripe_hash(tensor) != stripe_hash(changed)
