"""Native attention of packed sequences against the formula in float64, token by token, for values
and gradients."""

import pytest
import torch
from torch import Tensor

from distflow.models.cpu_kernels import build as native
from distflow.models.cpu_kernels.training_layer import attend
from distflow.models.packed_layout import Sequences, Sharing, shared_prefixes

pytestmark = pytest.mark.skipif(
    not native.is_there(), reason="wants a C compiler (Debian: apt-get install gcc)"
)

LENGTHS = (5, 1, 70, 24, 25, 130, 3, 48)


def by_hand(
    queries: Tensor, keys: Tensor, values: Tensor, places: list[list[int]], scale: float
) -> Tensor:
    """places: of each sequence the rows of its tokens; a row that several have sees the same tokens
    in each."""
    group = queries.shape[1] // keys.shape[1]
    mixed = {}
    for rows in places:
        for count, row in enumerate(rows, start=1):
            seen = torch.tensor(rows[:count])
            if row not in mixed:
                k, v = (x[seen].repeat_interleave(group, 1) for x in (keys, values))
                masses = torch.einsum("hd,thd->ht", queries[row] * scale, k).softmax(-1)
                mixed[row] = torch.einsum("ht,thd->hd", masses, v)

    return torch.stack([mixed[row] for row in range(len(queries))])


def packed(lengths: tuple[int, ...], alike: int) -> tuple[Tensor, Sharing | None]:
    """Lengths, and what is shared where each sequence but the fourth begins with the same `alike`
    tokens."""
    ids = [
        torch.cat(
            (
                torch.arange(alike) + (1000 if number == 3 else 0),
                torch.arange(length) + 2000 + 500 * number,
            )
        )
        for number, length in enumerate(lengths)
    ]
    cut = [row[:length] for row, length in zip(ids, lengths, strict=True)]

    return torch.tensor(lengths), shared_prefixes(torch.cat(cut), torch.tensor(lengths))


def places_of(lengths: Tensor, sharing: Sharing | None) -> list[list[int]]:
    place = torch.arange(int(lengths.sum())) if sharing is None else sharing.place
    return [part.tolist() for part in place.split(lengths.tolist())]


def inputs(rows: int, heads: int, kv_heads: int, dim: int, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        size * torch.randn(rows, h, dim, generator=generator) for h in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("alike", [0, 1, 9, 40])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 3, 10), (6, 1, 80), (2, 1, 64)]
)
def test_values_and_gradients_are_those_of_the_formula(heads, kv_heads, dim, alike):
    lengths, sharing = packed(LENGTHS, alike)
    rows = int(lengths.sum()) if sharing is None else len(sharing.positions)
    given = [x.requires_grad_() for x in inputs(rows, heads, kv_heads, dim)]
    exact = [x.detach().double().requires_grad_() for x in given]
    weights = torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(4))
    ours = attend(*given, Sequences.of(lengths, sharing), 0.3)
    expected = by_hand(*exact, places_of(lengths, sharing), 0.3)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)

    found = torch.autograd.grad((ours * weights).sum(), given)
    for own, wanted in zip(
        found, torch.autograd.grad((expected * weights).sum(), exact), strict=True
    ):
        torch.testing.assert_close(
            own.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max())
        )


@pytest.mark.parametrize("size", [30.0, 1e-3])
def test_scores_far_apart_and_all_alike(size):
    lengths, sharing = packed(LENGTHS, 9)
    assert sharing is not None
    given = inputs(len(sharing.positions), 2, 1, 32, size)
    expected = by_hand(*(x.double() for x in given), places_of(lengths, sharing), 0.3)
    ours = attend(*given, Sequences.of(lengths, sharing), 0.3).double()
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3 * size)


def test_neither_threads_nor_neighbours_change_a_bit():
    lengths, sharing = packed(LENGTHS, 9)
    assert sharing is not None
    given = [x.requires_grad_() for x in inputs(len(sharing.positions), 4, 2, 24)]
    threads = torch.get_num_threads()

    found = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            ours = attend(*given, Sequences.of(lengths, sharing), 0.3)
            found.append([ours, *torch.autograd.grad(ours.square().sum(), given)])
    finally:
        torch.set_num_threads(threads)

    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    rows = torch.tensor(places_of(lengths, sharing)[5])
    alone = attend(*(x[rows] for x in given), Sequences.of(lengths[5:6], None), 0.3)

    # those before are computed with the first sequence
    assert torch.equal(alone[9:], found[0][0][rows[9:]])


def test_tensors_that_lie_otherwise():
    lengths, _ = packed(LENGTHS, 0)
    given = inputs(int(lengths.sum()), 4, 2, 16)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in given]
    sequences = Sequences.of(lengths, None)
    ours = attend(*turned, sequences, 0.3)
    assert torch.equal(ours, attend(*given, sequences, 0.3))
    (one,) = torch.autograd.grad(
        ours.transpose(0, 1).mul(torch.arange(4.0)[:, None, None]).sum(), turned[:1]
    )
    assert torch.isfinite(one).all() and not one[:, 0].any() and one[:, 1].any()


def test_what_is_not_finite_comes_out_as_such():
    lengths, _ = packed((5, 40), 0)
    for which in range(3):
        given = inputs(45, 2, 1, 16)
        given[which][20, 0, 3] = float("nan")
        mixed = attend(*given, Sequences.of(lengths, None), 0.3)
        assert not torch.isfinite(mixed[20]).all()
        assert torch.isfinite(mixed[:5]).all()
