"""The kernels in Triton: on a CUDA device, or by Triton's interpreter on a CPU, in float32 alone.

`make test-slow` installs Triton where torch is a build for CPUs.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    sys.path.append(str(Path(__file__).parents[3] / ".triton"))
pytest.importorskip("triton", reason="wants Triton, which `make test-slow` installs")
pytestmark = pytest.mark.slow

from distflow.models.cached_decoder import DecoderView  # noqa: E402
from distflow.models.gpu_kernels import training_layer  # noqa: E402
from distflow.models.gpu_kernels.decode_step import PagedStep, add_norm, attend, silu_mul  # noqa: E402
from tests.rollout.drive import make_model  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 64


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `transformers` has it. x: `(rows, heads, dim)`; cos, sin: `(rows, dim)`."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert (found.double() - expected.double()).abs().max() <= tolerance * max(
        1.0, expected.abs().max().item()
    )


@pytest.mark.parametrize(
    "heads, kv_heads, dim, width", [(14, 2, 64, 3), (4, 4, 32, 9), (8, 1, 128, 6)]
)
def test_attention_reads_pages_where_they_lie_and_writes_its_token(heads, kv_heads, dim, width):
    """Positions at the ends of pages and of the parts that one instance reads, against each row by
    hand in float64."""
    positions = torch.tensor([0, 63, 64, width * PAGE - 1, width * 32 + 5], device=DEVICE)
    rows = len(positions)
    tables = (
        (torch.randperm(rows * width, generator=torch.Generator().manual_seed(1)) + 1)
        .view(rows, width)
        .to(DEVICE)
    )
    keys = numbers(rows * width + 1, kv_heads, PAGE, dim)
    values = numbers(rows * width + 1, kv_heads, PAGE, dim, seed=1)
    angles = (
        torch.rand(width * PAGE, dim // 2, generator=torch.Generator().manual_seed(2))
        .repeat(1, 2)
        .to(DEVICE)
        * 6
    )
    cos = angles.cos()
    sin = angles.sin()
    query = numbers(rows, heads, dim)
    key = numbers(rows, kv_heads, dim, seed=3)
    value = numbers(rows, kv_heads, dim, seed=4)
    old_keys = keys.clone()
    old_values = values.clone()
    signed = torch.cat((-sin[:, : dim // 2], sin[:, dim // 2 :]), -1)
    found = attend(query, key, value, keys, values, tables, positions, (cos, signed), dim**-0.5)

    queries, new = (
        rotated(each.double(), cos[positions].double(), sin[positions].double())
        for each in (query, key)
    )

    for row, position in enumerate(positions.tolist()):
        page = tables[row, position // PAGE]
        offset = position % PAGE
        old_keys[page, :, offset] = new[row].float()
        old_values[page, :, offset] = value[row]
        own_keys, own_values = (
            each[tables[row]].transpose(0, 1).flatten(1, 2).double()
            for each in (old_keys, old_values)
        )

        for head in range(heads):
            of_head = head // (heads // kv_heads)
            scores = own_keys[of_head, : position + 1] @ queries[row, head] * dim**-0.5
            close(found[row, head], scores.softmax(-1) @ own_values[of_head, : position + 1])

    close(keys, old_keys)
    assert torch.equal(values, old_values)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_step_is_that_of_torchs_operations(family):
    model = make_model(family, head_dim=32).to(DEVICE)
    plain = DecoderView(model)
    view = DecoderView(model)
    view._kernels = PagedStep(model, None)
    shape = (view.num_layers, 7, view.num_kv_heads, PAGE, view.head_dim)
    keys = numbers(*shape)
    values = numbers(*shape, seed=1)
    own_keys = keys.clone()
    own_values = values.clone()
    tokens = torch.tensor([5, 6, 7], device=DEVICE)
    positions = torch.tensor([3, 70, 100], device=DEVICE)
    tables = torch.tensor([[1, 2], [3, 4], [5, 6]], device=DEVICE)

    with torch.no_grad():
        expected = plain.decode_paged(tokens, positions, keys, values, tables)
        close(view.decode_paged(tokens, positions, own_keys, own_values, tables), expected)
        view._check_against_module()

    close(own_keys, keys)
    close(own_values, values)


def test_a_sum_is_normed_and_kept():
    hidden = numbers(3, 100)
    delta = numbers(3, 100, seed=1)
    weight = numbers(100, seed=2)
    total = hidden + delta
    found = add_norm(hidden, delta, weight, 1e-5, torch.float32)
    close(hidden, total)
    close(found, torch.nn.functional.rms_norm(total, (100,), weight, 1e-5))


def test_a_gate_opens():
    gate = numbers(5, 700)
    up = numbers(5, 700, seed=1)
    close(silu_mul(gate, up), torch.nn.functional.silu(gate) * up)


# Of a training forward: results and gradients against autograd by the formulas in float64.


def compare(ours: Any, formula: Any, *inputs: Tensor) -> None:
    sides = []
    for function, kind in ((ours, torch.float32), (formula, torch.float64)):
        given = [each.detach().to(kind).requires_grad_() for each in inputs]
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = [
            numbers(*output.shape, seed=9 + index).to(kind) for index, output in enumerate(outputs)
        ]
        sum(
            (output * weight).sum() for output, weight in zip(outputs, weights, strict=True)
        ).backward()
        sides.append([*outputs, *(each.grad for each in given)])

    for found, expected in zip(*sides, strict=True):
        close(found, expected)


@pytest.mark.parametrize("rows", [1, 700])
def test_norms_of_sums(rows):
    """More rows than instances: each sums several."""

    def ours(x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return training_layer.add_norm(
            x, added, SimpleNamespace(weight=weight, variance_epsilon=1e-5), torch.float32
        )

    def formula(x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x + added, torch.nn.functional.rms_norm(x + added, (24,), weight, 1e-5)

    compare(ours, formula, numbers(rows, 24), numbers(rows, 24, seed=1), numbers(24, seed=2))


def test_the_first_norm_has_nothing_added():
    def ours(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return training_layer.add_norm(
            x, None, SimpleNamespace(weight=weight, variance_epsilon=1e-5), torch.float32
        )

    compare(
        ours,
        lambda x, weight: (x, torch.nn.functional.rms_norm(x, (24,), weight, 1e-5)),
        numbers(5, 24),
        numbers(24),
    )


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("rows", [3, 40])
def test_heads_are_normed_and_rotated(rows, has_norms):
    heads = 6
    kv_heads = 2
    dim = 16
    angles = (
        torch.rand(rows, dim // 2, generator=torch.Generator().manual_seed(5)).repeat(1, 2) * 6
    ).to(DEVICE)
    key_projection = SimpleNamespace(weight=torch.empty(kv_heads * dim, 1))

    def ours(projected: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        named = {
            f"{name}_norm": SimpleNamespace(weight=norm, variance_epsilon=1e-5)
            for name, norm in zip("qk", norms, strict=False)
        }
        attention = SimpleNamespace(head_dim=dim, k_proj=key_projection, **named)
        return training_layer.split_heads(projected, angles.cos(), angles.sin(), attention)

    def formula(projected: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        queries, keys, values = projected.unflatten(1, (-1, dim)).split(
            (heads, kv_heads, kv_heads), 1
        )

        if norms:
            queries, keys = (
                torch.nn.functional.rms_norm(each, (dim,), norm, 1e-5)
                for each, norm in zip((queries, keys), norms, strict=True)
            )

        cos = angles.cos().to(projected.dtype)
        sin = angles.sin().to(projected.dtype)
        return rotated(queries, cos, sin), rotated(keys, cos, sin), values

    norms = (numbers(dim, seed=7), numbers(dim, seed=8)) if has_norms else ()
    compare(ours, formula, numbers(rows, (heads + 2 * kv_heads) * dim), *norms)


def test_gates():
    def formula(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    compare(training_layer.gate, formula, numbers(3, 2 * 1100))
