"""Native draws against an inverse CDF in float64, and at its edges."""

import numpy as np
import pytest
import torch

from distflow.models.cpu_kernels import build as native
from distflow.models.cpu_kernels.decode_step import draw

pytestmark = pytest.mark.skipif(
    not native.is_there(), reason="wants a C compiler (Debian: apt-get install gcc)"
)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 1000, 5000])
def test_tokens_and_log_probs_are_those_of_float64(vocab_size, temperature):
    torch.manual_seed(vocab_size)
    logits = torch.randn(200, vocab_size) * 3
    uniform = torch.rand(200, dtype=torch.float64)
    drawn = draw(logits, temperature, uniform)
    assert drawn is not None
    tokens, log_probs = drawn
    exact = (logits / temperature).double().log_softmax(-1)
    cumulative = np.cumsum(exact.exp().numpy(), axis=-1)
    wanted = [
        np.searchsorted(row / row[-1], u, side="right")
        for row, u in zip(cumulative, uniform, strict=True)
    ]
    assert tokens.tolist() == wanted
    assert (log_probs - exact[torch.arange(200), tokens]).abs().max() < 2e-6


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("possible", [[0], [299], [256], [255, 256], [17, 18, 290]])
def test_impossible_tokens_are_never_drawn(possible, uniform):
    """Masked tokens at the borders of the vocabulary and of blocks, with the uniform number at its
    own borders."""
    for impossible in (float("-inf"), -1e30, 1.25 - 100):
        logits = torch.full((1, 300), impossible)
        logits[0, possible] = 1.25
        drawn = draw(logits, 1.0, torch.tensor([uniform], dtype=torch.float64))
        assert drawn is not None
        assert drawn[0].item() == possible[min(int(uniform * len(possible)), len(possible) - 1)]
        assert drawn[1].item() == pytest.approx(-np.log(len(possible)))


def test_log_probs_are_exact_for_unlikely_tokens():
    """The least number takes the first token, however little its mass is."""
    drawn = draw(torch.tensor([[-40.0, 40.0]]), 1.0, torch.zeros(1, dtype=torch.float64))
    assert drawn is not None
    assert (drawn[0].item(), drawn[1].item()) == (0, pytest.approx(-80.0))


def test_a_row_does_not_depend_on_its_batch():
    logits = torch.randn(50, 700)
    uniform = torch.rand(50, dtype=torch.float64)
    together = draw(logits, 0.7, uniform)
    threads = torch.get_num_threads()
    assert together is not None

    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for rows in (slice(0, 50), slice(7, 8), slice(20, 33)):
                alone = draw(logits[rows], 0.7, uniform[rows])
                assert alone is not None
                assert all(torch.equal(a, b[rows]) for a, b in zip(alone, together, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [0, 30])
@pytest.mark.parametrize("column", [0, 299, 300])
def test_logits_that_are_not_finite_are_told(bad, row, column):
    logits = torch.zeros(31, 301)
    logits[row, column] = bad
    assert draw(logits, 1.0, torch.full((31,), 0.5, dtype=torch.float64)) is None


def test_a_row_without_any_token_is_told():
    logits = torch.zeros(3, 301)
    logits[1] = float("-inf")
    assert draw(logits, 1.0, torch.full((3,), 0.5, dtype=torch.float64)) is None
