"""Attention of short sequences against the formula in float64, token by token, for values and
gradients."""

import pytest
import torch
from torch import Tensor

from distflow.models import packed_attention
from distflow.models.packed_attention import attend_short


def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    out = torch.zeros_like(query)
    for n, head, t in torch.cartesian_prod(
        *(torch.arange(size) for size in query.shape[:3])
    ).tolist():
        keys = key[n, head // group, : t + 1]
        values = value[n, head // group, : t + 1]
        masses = (keys @ query[n, head, t] * scale).exp()
        out[n, head, t] = masses @ values / masses.sum()
    return out


def inputs(heads: int, kv_heads: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, h, tokens, 4) for h in (heads, kv_heads, kv_heads)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(4, 2, 7), (3, 3, 1), (6, 1, 5)])
@pytest.mark.parametrize("matrices_at_once", [1, 4, 100])
def test_values_and_gradients_are_those_of_the_formula(
    heads: int, kv_heads: int, tokens: int, matrices_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = heads // kv_heads * tokens * tokens
    monkeypatch.setattr(
        packed_attention, "_BLOCK_ELEMENTS", matrices_at_once * scores // torch.get_num_threads()
    )
    given = [x.requires_grad_() for x in inputs(heads, kv_heads, tokens, torch.float64)]
    weights = torch.randn(
        5, heads, tokens, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )
    expected = by_hand(*given, 0.3)
    ours = attend_short(*given, 0.3)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(attend_short(*given, 0.3), ours)
    found = torch.autograd.grad((ours * weights).sum(), given)
    for own, wanted in zip(
        found, torch.autograd.grad((expected * weights).sum(), given), strict=True
    ):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)


def test_in_float32_it_is_right_to_rounding() -> None:
    given = inputs(4, 2, 40, torch.float32)
    expected = by_hand(*(x.double() for x in given), 0.5)
    torch.testing.assert_close(attend_short(*given, 0.5).double(), expected, rtol=0, atol=1e-6)
