"""Draws against brute force: the distribution of every option, log-probs, and the edges of the
inverse CDF."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from distflow.models.cpu_kernels import build as native
from distflow.rollout.embedded.sampler import TILE_NUMBERS, Distribution, Draws, sample
from distflow.rollout.embedded.scheduler import Sequence, draw_inputs, sequences_of
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream
from tests.sparse_params import one_fast_in

PROMPT = (0, 3, 3)


@pytest.fixture(autouse=True, params=[True, False])
def is_native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws from the policy itself may be native."""
    if request.param and not native.is_there():
        pytest.skip("wants a C compiler (Debian: apt-get install gcc)")
    monkeypatch.setattr(native, "is_there", lambda: request.param)


LOGITS = [2.0, 1.5, -1.0, 0.7, 0.7, -3.0, 1.1, 0.0, 2.5, -0.4]


def brute_force(logits: list[float], seen: set[int], params: SamplingParams) -> list[float]:
    """The distribution that is drawn from, token by token in plain Python."""
    penalty = params.repetition_penalty
    scores = [
        (z / penalty if z > 0 else z * penalty) / params.temperature
        if token in seen
        else z / params.temperature
        for token, z in enumerate(logits)
    ]
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    allowed = set(order if params.top_k == -1 else order[: params.top_k])
    allowed |= {
        token for token in order if any(scores[token] == scores[other] for other in allowed)
    }
    total = sum(math.exp(scores[token]) for token in allowed)

    nucleus: set[int] = set()
    mass = 0.0
    for token in order:
        if token in allowed and mass < params.top_p * total:
            nucleus.add(token)
            mass += math.exp(scores[token])

    nucleus |= {
        token for token in allowed if any(scores[token] == scores[other] for other in nucleus)
    }
    highest = max(scores[token] for token in nucleus)
    kept = {token for token in nucleus if math.exp(scores[token] - highest) >= params.min_p}
    total = sum(math.exp(scores[token]) for token in kept)

    return [
        math.exp(scores[token]) / total if token in kept else 0.0 for token in range(len(scores))
    ]


def rows_of(
    count: int, prompt: tuple[int, ...] = PROMPT, seed: int = 0, **params: Any
) -> list[Sequence]:
    request = GenerateRequest(
        prompt, tuple(range(count)), SamplingParams(max_tokens=5, **params), Stream(seed, "t", 0, 0)
    )
    return sequences_of(0, request)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 3},
    "top-k with a tie at its edge": {"top_k": 5},
    "top-k of one": {"top_k": 1},
    "top-k above the vocabulary": {"top_k": 50},
    "top-p": {"top_p": 0.7},
    "top-p below the likeliest token": {"top_p": 0.05},
    "top-p with a tie at its edge": {"top_p": 0.88},
    "min-p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.8},
    "penalty that favours repeats": {"repetition_penalty": 0.6},
    "all": {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("name", one_fast_in(12, OPTIONS))
def test_frequencies_and_log_probs_of_each_option(name: str) -> None:
    sequences = rows_of(20_000, **OPTIONS[name])
    expected = np.array(brute_force(LOGITS, set(PROMPT), sequences[0].params))
    draws = sample(torch.tensor([LOGITS]).expand(len(sequences), -1), draw_inputs(sequences))
    counts = np.bincount(draws.token_ids.numpy(), minlength=len(LOGITS))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = (
        (counts - len(sequences) * expected)[possible] ** 2 / (len(sequences) * expected[possible])
    ).sum()
    assert chi_square < 30  # at most 9 degrees of freedom: P(> 30) is 4e-4

    tokens = draws.token_ids.numpy()
    assert draws.sampling_log_probs.exp().numpy() == pytest.approx(expected[tokens], rel=1e-5)
    policy = (
        torch.tensor(LOGITS, dtype=torch.float64)
        .div(sequences[0].params.temperature)
        .log_softmax(-1)
    )
    assert draws.rollout_log_probs.numpy() == pytest.approx(policy[tokens].numpy(), abs=1e-5)


@pytest.mark.parametrize("name", ["plain", "cold", "all"])
def test_greedy_takes_the_mode_of_the_penalised_distribution(name: str) -> None:
    (sequence,) = rows_of(1, greedy=True, **OPTIONS[name])
    expected = brute_force(LOGITS, set(PROMPT), sequence.params)
    draws = sample(torch.tensor([LOGITS]), draw_inputs([sequence]))
    assert draws.token_ids.item() == int(np.argmax(expected))
    assert draws.sampling_log_probs.exp().item() == pytest.approx(max(expected), rel=1e-5)


def with_possible(draws: Draws) -> Draws:
    """Which of the impossible tokens are among the likeliest is arbitrary."""
    ids = draws.top_ids.masked_fill(draws.top_log_probs.isinf(), -1)
    return draws._replace(top_ids=ids)


@pytest.mark.parametrize("vocab_size", [700, TILE_NUMBERS // 3])
def test_rows_with_different_options_are_drawn_as_if_alone(vocab_size: int) -> None:
    """Those that want the likeliest tokens find at least as many."""
    sequences = []
    for number, name in enumerate(OPTIONS):
        sequences += rows_of(5, seed=len(name), num_top=3 * (number % 3), **OPTIONS[name])
    torch.manual_seed(0)
    sequences = [sequences[i] for i in torch.randperm(len(sequences))]
    logits = torch.randn(len(sequences), vocab_size) * 2
    together = with_possible(sample(logits, draw_inputs(sequences)))

    for row, sequence in enumerate(sequences):
        alone = with_possible(sample(logits[row : row + 1], draw_inputs([sequence])))
        for own, column in zip(alone, together, strict=True):
            found = column[row : row + 1]
            wanted = found if own.dim() == 1 else found[:, : sequence.params.num_top]
            assert own.tolist() == wanted.tolist()


@pytest.mark.parametrize("name", ["plain", "cold", "top-k", "all"])
def test_the_likeliest_tokens_have_the_probabilities_of_the_distribution_drawn_from(
    name: str,
) -> None:
    (sequence,) = rows_of(1, num_top=4, **OPTIONS[name])
    expected = brute_force(LOGITS, set(PROMPT), sequence.params)
    draws = sample(torch.tensor([LOGITS]), draw_inputs([sequence]))
    (ids,), (log_probs,) = draws.top_ids.tolist(), draws.top_log_probs.tolist()
    assert len(set(ids)) == 4
    found = np.exp(log_probs)
    assert found == pytest.approx(sorted(expected)[:-5:-1], rel=1e-5)
    assert found == pytest.approx([expected[token] for token in ids], rel=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 1000, 5000])
def test_the_inverse_cdf_over_blocks_equals_one_over_the_vocabulary(vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    scores = torch.randn(64, vocab_size) * 3
    uniform = torch.rand(64, dtype=torch.float64)
    drawn = Distribution(scores).draw(uniform).tolist()

    for row in range(64):
        probs = np.exp(scores[row].double().numpy() - scores[row].max().item())
        cumulative = np.cumsum(probs) / probs.sum()
        assert drawn[row] == np.searchsorted(cumulative, uniform[row].item(), side="right")


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_impossible_tokens_are_never_drawn(uniform: float) -> None:
    """Masked tokens at the borders of the vocabulary and of blocks, with the uniform number at its
    own borders."""
    for possible in ([0], [299], [256], [255, 256], [17, 18, 290]):
        scores = torch.full((1, 300), float("-inf"))
        scores[0, possible] = 1.25
        token = Distribution(scores).draw(torch.tensor([uniform], dtype=torch.float64)).item()
        assert token == possible[min(int(uniform * len(possible)), len(possible) - 1)]


def test_a_wide_nucleus_is_found_in_the_whole_vocabulary() -> None:
    """Nearly flat over 1,500 tokens: the nucleus is wider than the first candidates."""
    (sequence,) = rows_of(1, top_p=0.9)
    torch.manual_seed(0)
    logits = torch.randn(1, 1500) * 0.01
    expected = brute_force(logits[0].tolist(), set(), sequence.params)
    sequences = rows_of(1000, top_p=0.9)
    draws = sample(logits.expand(1000, -1), draw_inputs(sequences))
    assert draws.sampling_log_probs.exp().numpy() == pytest.approx(
        np.array(expected)[draws.token_ids], rel=1e-4
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(logits, draw_inputs(rows_of(2)))
