"""Layers by native code against the module itself in float64 and, in bfloat16, under autocast:
states, and the gradient of every weight."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distflow.models import native_layers
from distflow.models.choose_attention import choose_attention
from distflow.models.cpu_kernels import build as native
from distflow.models.loading import load_model
from distflow.models.lora import add_lora
from distflow.models.native_layers import runs_natively
from distflow.models.packed_forward import (
    attach_packed_forward,
    packed_hidden_states,
)
from distflow.models.packed_layout import shared_prefixes
from distflow.training.torch_engine import checkpoint_activations
from tests.models.cpu_kernels.test_decode_step import VARIANTS, make
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(
    not native.is_there(), reason="wants a C compiler (Debian: apt-get install gcc)"
)

LENGTHS = torch.tensor([5, 1, 70, 24, 25, 130, 3, 48])
ROWS = int(LENGTHS.sum())


def trainable(family: str = "llama", **changes: Any) -> Any:
    model = make(family, **changes).train()
    attach_packed_forward(model)
    assert choose_attention(model) == "distflow_packed"
    return model


def tokens(alike: int = 9) -> Tensor:
    ids = torch.randint(3, 90, (ROWS,), generator=torch.Generator().manual_seed(2))
    for row in ids.split(LENGTHS.tolist()):
        row[:alike] = torch.arange(3, 3 + alike)[: len(row)]
    return ids


def states_and_gradients(
    model: Any, ids: Tensor, shares: bool, low: bool = False
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Of a weighted sum of the last hidden states."""
    sharing = shared_prefixes(ids, LENGTHS) if shares else None
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        states = packed_hidden_states(model, ids, LENGTHS, sharing=sharing)
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(4))
    model.zero_grad()
    (states * weights.to(states.dtype)).sum().backward()

    return states.detach(), {
        name: p.grad for name, p in model.named_parameters() if "lm_head" not in name
    }


@pytest.mark.parametrize("largest", [native_layers.LARGEST, 0])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_states_and_gradients_are_those_of_the_module_in_float64(
    variant, shares, largest, monkeypatch
):
    """largest: of 0 every model counts as a large one."""
    monkeypatch.setattr(native_layers, "LARGEST", largest)
    family, changes = VARIANTS[variant]
    model = trainable(family, **changes)
    exact = copy.deepcopy(model).double()
    attach_packed_forward(exact)
    assert runs_natively(model.model) and not runs_natively(exact.model)
    ours, found = states_and_gradients(model, tokens(), shares)
    expected, wanted = states_and_gradients(exact, tokens(), shares=False)
    torch.testing.assert_close(
        ours.double(), expected, rtol=0, atol=2e-5 * float(expected.abs().max())
    )
    assert found.keys() == wanted.keys()

    for name, gradient in wanted.items():
        assert gradient is not None and found[name] is not None, name
        largest = float(gradient.abs().max())
        assert largest > 0
        torch.testing.assert_close(
            found[name].double(),
            gradient,
            rtol=0,
            atol=3e-5 * largest,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_bfloat16_it_rounds_where_autocast_does_and_errs_no_more(variant, shares):
    family, changes = VARIANTS[variant]
    model = trainable(family, **changes)
    ids = tokens()
    plain = copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    for other in (plain, exact):
        attach_packed_forward(other)
    keep_from_native_code(plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert runs_natively(model.model) and not runs_natively(plain.model)
    ours, found = states_and_gradients(model, ids, shares, low=True)
    by_torch, theirs = states_and_gradients(plain, ids, shares, low=True)
    expected, wanted = states_and_gradients(exact, ids, shares=False)
    assert ours.dtype == torch.float32
    assert distance(ours, by_torch) < 0.25 * distance(by_torch, expected)

    for name, gradient in wanted.items():
        of_model = found[name]
        of_autocast = theirs[name]
        assert gradient is not None and of_model is not None and of_autocast is not None
        assert of_model.dtype == torch.float32
        assert 0 < distance(of_model, gradient) < 1.5 * distance(of_autocast, gradient), name


def keep_from_native_code(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, made: None)


def distance(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences."""
    return float((found.double() - expected.double()).square().mean().sqrt())


def test_a_rows_bits_depend_on_neither_threads_nor_neighbours():
    model = trainable()
    ids = tokens()
    threads = torch.get_num_threads()

    found = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            found.append(states_and_gradients(model, ids, shares=False))
    finally:
        torch.set_num_threads(threads)

    for states, gradients in found[1:]:
        assert torch.equal(states, found[0][0])
        for name, gradient in gradients.items():
            first = found[0][1][name]
            assert gradient is not None and first is not None
            torch.testing.assert_close(
                gradient, first, rtol=0, atol=3e-5 * float(first.abs().max())
            )

    start = int(LENGTHS[:5].sum())
    with torch.no_grad():
        alone = packed_hidden_states(model, ids[start : start + 130], LENGTHS[5:6])
    assert torch.equal(alone, found[0][0][start : start + 130])


@pytest.mark.parametrize("low", [False, True])
def test_the_same_call_gives_the_same_gradient_bit_for_bit(low):
    model = trainable("qwen3", head_dim=24)
    ids = tokens()
    (states, first), (again, second) = (
        states_and_gradients(model, ids, shares=True, low=low) for _ in range(2)
    )
    assert torch.equal(states, again)
    assert all(torch.equal(first[name], second[name]) for name in first)  # type: ignore[arg-type]


@pytest.mark.parametrize("low", [False, True])
def test_what_is_not_trained_gets_no_gradient_and_changes_no_other(low):
    model = trainable()
    ids = tokens()
    _, expected = states_and_gradients(model, ids, shares=False, low=low)
    frozen = [name for name in expected if "layers.0" in name or "up_proj" in name]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    _, found = states_and_gradients(model, ids, shares=False, low=low)
    assert all(found[name] is None for name in frozen)
    assert all(torch.equal(found[name], expected[name]) for name in expected if name not in frozen)  # type: ignore[arg-type]


@pytest.mark.parametrize("low", [False, True])
def test_what_is_not_finite_stays_where_it_is(low):
    model = trainable()
    ids = tokens(alike=0)
    ids[50] = 2

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        model.model.embed_tokens.weight[2, 3] = float("nan")
        states = packed_hidden_states(model, ids, LENGTHS)

    touched = ~torch.isfinite(states).all(-1)
    assert touched[50:76].all(), "from the token on"
    assert not touched[:6].any() and not touched[76:].any(), "in its own sequence"


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _own_module(model: Any) -> None:
    old = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = _Doubled(old.in_features, old.out_features, bias=False)


def _hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, made: 2 * made)


def _own_forward(model: Any) -> None:
    layer = model.model.layers[0]
    plain = layer.forward
    layer.forward = lambda *given, **named: 2 * plain(*given, **named)


def _low_weight(model: Any) -> None:
    model.model.layers[0].mlp.to(torch.bfloat16)


def _adapter(model: Any) -> None:
    add_lora(model, rank=2)


def _dropout(model: Any) -> None:
    model.config.attention_dropout = 0.1


@pytest.mark.parametrize(
    "change",
    [_own_module, _hook, _own_forward, _low_weight, _adapter, _dropout, checkpoint_activations],
)
def test_what_is_changed_in_a_model_is_computed_by_the_model(change):
    model = trainable()
    change(model)
    assert not runs_natively(model.model)


def test_a_hook_takes_part():
    model = trainable()
    ids = tokens()
    with torch.no_grad():
        before = packed_hidden_states(model, ids, LENGTHS)
        _hook(model)
        assert (packed_hidden_states(model, ids, LENGTHS) - before).abs().max() > 0.01


def test_dropout_is_of_training_alone():
    model = trainable()
    _dropout(model)
    assert not runs_natively(model.model) and runs_natively(model.eval().model)


def test_float16_is_torchs():
    model = trainable()
    with torch.autocast("cpu", torch.float16):
        assert not runs_natively(model.model)


def test_beyond_the_largest_products_are_torchs(monkeypatch):
    """By bits: the same numbers in another order."""
    sizes = {"hidden_size": 64, "intermediate_size": native_layers.LARGEST // 64}
    fits = trainable(**sizes)

    exceeds = trainable(hidden_size=64, intermediate_size=sizes["intermediate_size"] + 1)
    for model, changes in ((fits, True), (exceeds, False)):
        assert runs_natively(model.model)
        with monkeypatch.context() as patched:
            states = packed_hidden_states(model, tokens(), LENGTHS)
            patched.setattr(native_layers, "LARGEST", 0)
            assert (
                torch.equal(states, packed_hidden_states(model, tokens(), LENGTHS)) is not changes
            )


def test_value_models_run_natively_too(tmp_path):
    assert runs_natively(load_model(write_tiny_model(tmp_path / "m"), seed=1, critic=True).model)
