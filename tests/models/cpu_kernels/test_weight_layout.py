"""Prepacked maps are the maps they were, whatever happens to their weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from distflow.models.cached_decoder import DecoderView
from distflow.models.cpu_kernels.weight_layout import PrepackedLinear, prepack
from distflow.rollout.engine_weights import copy_weights
from tests.tiny_models import tiny_config

needs_bf16 = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="wants a processor and a build of torch with products in bfloat16",
)


def plain_and_prepacked(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias, dtype=torch.bfloat16)
    packed = nn.Sequential(nn.Linear(48, 80, bias, dtype=torch.bfloat16))
    packed.load_state_dict({f"0.{name}": value for name, value in plain.state_dict().items()})
    prepack(packed)
    return plain, packed[0]  # type: ignore[return-value]


def far(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


@needs_bf16
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (300, 48), (2, 7, 48)])
def test_it_computes_what_the_map_does(bias: bool, shape: tuple[int, ...]) -> None:
    plain, packed = plain_and_prepacked(bias)
    assert type(packed) is PrepackedLinear
    x = torch.randn(shape, dtype=torch.bfloat16)
    exact = nn.functional.linear(
        x.double(), plain.weight.double(), plain.bias.double() if bias else None
    )
    with torch.inference_mode():
        assert packed(x).shape == plain(x).shape
        assert far(packed(x), exact) < 2**-8 * float(exact.detach().abs().max()) + 1e-3


def copied(weight: nn.Parameter, new: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(new)


def copied_while_inferring(weight: nn.Parameter, new: Tensor) -> None:
    with torch.inference_mode():
        weight.copy_(new)


def laid_elsewhere(weight: nn.Parameter, new: Tensor) -> None:
    weight.data = new.clone()


def laid_where_the_last_one_was(weight: nn.Parameter, new: Tensor) -> None:
    """As far as the allocator goes along."""
    weight.data = torch.zeros_like(new)
    weight.data = new.clone()


@needs_bf16
@pytest.mark.parametrize(
    "change", [copied, copied_while_inferring, laid_elsewhere, laid_where_the_last_one_was]
)
def test_every_change_of_the_weight_is_seen(change: Callable[[nn.Parameter, Tensor], None]) -> None:
    plain, packed = plain_and_prepacked()
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    for _ in range(3):
        new = torch.randn_like(plain.weight.detach())
        change(packed.weight, new)
        with torch.no_grad():
            expected = nn.functional.linear(x, new, packed.bias)
            assert far(packed(x), expected) < 0.1
            assert far(packed(x), plain(x)) > 1


@needs_bf16
def test_with_gradients_it_is_no_more_than_the_map() -> None:
    plain, packed = plain_and_prepacked()
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    for map_ in (plain, packed):
        map_(x).float().square().sum().backward()
    assert plain.weight.grad is not None
    assert packed.weight.grad is not None
    assert torch.equal(plain.weight.grad, packed.weight.grad)
    assert torch.equal(packed.to(torch.float32)(x.float()), plain.to(torch.float32)(x.float()))


@torch.inference_mode()
def test_a_weight_made_in_inference_mode_counts_no_changes_and_stays_as_it_is() -> None:
    plain, packed = plain_and_prepacked()
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    assert type(packed) is nn.Linear
    assert torch.equal(packed(x), plain(x))


def test_only_plain_maps_in_bfloat16_are_made_such() -> None:
    class Own(nn.Linear):
        pass

    others = nn.Sequential(
        nn.Linear(8, 8), Own(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.float16)
    )
    prepack(others)
    assert [type(map_) for map_ in others] == [nn.Linear, Own, nn.Linear]


@needs_bf16
@torch.no_grad()
def test_a_decoder_follows_the_weights_that_it_is_sent() -> None:
    """Of all kinds of maps, tied ones too."""

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = tiny_config("qwen2", tie_word_embeddings=True)
        return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()

    model = made(0)
    other = made(1)
    prepack(model)
    view = DecoderView(model)
    before = view.logits(view.prefill([(3, 4, 5)]).hidden)
    copy_weights(model, list(other.named_parameters()))
    expected = other(input_ids=torch.tensor([[3, 4, 5]])).logits[0, -1:]
    after = view.logits(view.prefill([(3, 4, 5)]).hidden)
    assert far(after, expected) < 0.05 * float(expected.abs().max())
    assert far(before, expected) > 0.5 * float(expected.abs().max())
