"""Chunked log-probs and entropy against a float64 log-softmax of full logits."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from distflow.acting.action_head import ActionHead
from distflow.models.log_probs import likeliest_tokens, token_log_probs
from distflow.models.number_head import NumberTargets

ROWS = 23
WIDTH = 8
VOCABULARY = 17


def inputs(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=True).to(dtype)
    hidden = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    return head, hidden, torch.randint(VOCABULARY, (ROWS,))


def brute_force(
    logits: Tensor, targets: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by the definitions, over the tokens that have any probability."""
    log_probs = []
    entropies = []

    heats = (
        temperature
        if isinstance(temperature, Tensor)
        else torch.full((len(logits),), temperature, dtype=torch.float64)
    )
    for row, target, heat in zip(logits, targets, heats, strict=True):
        weights = torch.exp((row - row.max()) / heat)
        probs = weights / weights.sum()
        log_probs.append(torch.log(probs[target]))
        possible = probs[probs > 0]
        entropies.append(-(possible * possible.log()).sum())

    return torch.stack(log_probs), torch.stack(entropies)


EACH = torch.linspace(0.4, 2.0, ROWS, dtype=torch.float64)  # a temperature a row


@pytest.mark.parametrize("rows_in_chunk", [1, 4, ROWS - 1, ROWS, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, EACH])
def test_values_and_gradients_are_those_of_full_logits(
    rows_in_chunk: int, temperature: float | Tensor
) -> None:
    head, hidden, targets = inputs()
    weights = torch.randn(2, ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = brute_force(head(hidden), targets, temperature)
    wanted = torch.autograd.grad(
        (torch.stack(expected) * weights).sum(), [hidden, head.weight, head.bias]
    )

    found = token_log_probs(
        head,
        hidden,
        targets,
        temperature=temperature,
        vocabulary=VOCABULARY,
        chunk_elements=rows_in_chunk * VOCABULARY,
    )
    grads = torch.autograd.grad(
        (torch.stack(found) * weights).sum(), [hidden, head.weight, head.bias]
    )
    for ours, theirs in zip((*found, *grads), (*expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows_in_chunk", [4, ROWS])
def test_several_targets_of_a_row_have_the_log_probs_of_each(rows_in_chunk: int) -> None:
    """Also a target that is there twice."""
    head, hidden, first = inputs()
    targets = torch.stack([first, (first + 1) % VOCABULARY, first], 1)
    weights = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = head(hidden).log_softmax(-1).gather(1, targets)
    wanted = torch.autograd.grad((expected * weights).sum(), [hidden, head.weight, head.bias])

    found, _ = token_log_probs(
        head, hidden, targets, vocabulary=VOCABULARY, chunk_elements=rows_in_chunk * VOCABULARY
    )
    grads = torch.autograd.grad((found * weights).sum(), [hidden, head.weight, head.bias])
    for ours, theirs in zip((found, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows_in_chunk", [4, ROWS])
@pytest.mark.parametrize("temperature", [1.0, EACH])
@pytest.mark.parametrize("num_tokens", [None, 9])
def test_the_likeliest_tokens_are_those_of_full_logits(
    rows_in_chunk: int,
    temperature: float | Tensor,
    num_tokens: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distflow.models.log_probs.BLOCK_ELEMENTS", 3 * VOCABULARY)
    head, hidden, targets = inputs()
    found = likeliest_tokens(
        head,
        hidden,
        targets,
        5,
        num_tokens=num_tokens,
        temperature=temperature,
        vocabulary=VOCABULARY,
        chunk_elements=rows_in_chunk * VOCABULARY,
    )
    for row, (log_prob, ids, log_probs) in enumerate(zip(*found, strict=True)):
        heat = temperature[row] if isinstance(temperature, Tensor) else temperature
        probs = torch.softmax(head(hidden[row]) / heat, 0)
        assert float(log_prob) == pytest.approx(float(probs[targets[row]].log()), abs=1e-12)
        by_probability = sorted(range(num_tokens or VOCABULARY), key=lambda id: -float(probs[id]))
        assert ids.tolist() == by_probability[:5]
        torch.testing.assert_close(log_probs, probs[ids].log().detach(), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [4096, 8192])
def test_memory_is_a_small_part_of_full_logits(num_tokens: int) -> None:
    """At a vocabulary of 151,936: the peak of the resident memory, forward and backward, over
    tokens with 16 targets each, and without gradient. The head is narrow, since copies of its
    gradient do not grow with the tokens. Two chunks come first: torch's first checkpoint imports
    modules of 74 MiB."""
    script = """
import resource, sys, torch
from distflow.models.log_probs import likeliest_tokens, token_log_probs
num_tokens = int(sys.argv[2])
torch.manual_seed(0)
head = torch.nn.Linear(8, 151_936, bias=False)
hidden = torch.randn(num_tokens, 8, requires_grad=True)
ids = torch.randint(151_936, (num_tokens, 16))
head.weight.grad = torch.zeros_like(head.weight)
options = {"vocabulary": 151_936, "with_entropy": False}
first, _ = token_log_probs(head, hidden[:8], ids[:8], chunk_elements=4 * 151_936, **options)
first.sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "policy":
    found, _ = token_log_probs(head, hidden, ids, **options)
    found.sum().backward()
else:
    likeliest_tokens(head, hidden.detach(), ids[:, 0], 16, vocabulary=151_936)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / (4 * num_tokens * 151_936))
"""
    for which in ("policy", "teacher"):
        done = subprocess.run(
            [sys.executable, "-c", script, which, str(num_tokens)],
            capture_output=True,
            text=True,
            check=True,
        )
        share = float(done.stdout)
        assert share <= 0.1, (which, share)


def test_logits_of_minus_infinity_leave_entropy_and_gradients_finite() -> None:
    head, hidden, targets = inputs()
    forbidden = torch.zeros(VOCABULARY, dtype=torch.float64)
    forbidden[[0, 5]] = -torch.inf
    targets = targets.where((targets != 0) & (targets != 5), torch.tensor(3))

    def masked_head(states: Tensor) -> Tensor:
        return head(states) + forbidden

    log_probs, entropies = token_log_probs(
        masked_head, hidden, targets, vocabulary=VOCABULARY, chunk_elements=50
    )
    expected = brute_force(masked_head(hidden), targets, 1.0)
    torch.testing.assert_close(log_probs, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(entropies, expected[1], rtol=0, atol=1e-12)
    (log_probs.sum() + entropies.sum()).backward()
    assert hidden.grad.isfinite().all() and head.weight.grad.isfinite().all()


def test_the_softmax_of_bfloat16_logits_is_in_float32() -> None:
    head, hidden, targets = inputs(torch.bfloat16)
    log_probs, entropies = token_log_probs(
        head, hidden, targets, temperature=0.7, vocabulary=VOCABULARY
    )
    expected = brute_force(head(hidden).double(), targets, 0.7)
    assert log_probs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies.double(), expected[1], rtol=0, atol=1e-5)


def test_full_logits_never_exist() -> None:
    head, hidden, targets = inputs(torch.float32)
    largest = []
    saved = []

    def watched_head(states: Tensor) -> Tensor:
        largest.append(states.shape[0])
        return head(states)

    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        log_probs, entropies = token_log_probs(
            watched_head, hidden, targets, vocabulary=VOCABULARY, chunk_elements=3 * VOCABULARY
        )

    assert max(saved, default=0) < ROWS * VOCABULARY
    (log_probs + entropies).sum().backward()
    assert max(largest) <= 3


def test_without_entropy_there_is_none() -> None:
    head, hidden, targets = inputs()
    for chunk_elements in (40, 4000):
        log_probs, entropies = token_log_probs(
            head,
            hidden,
            targets,
            vocabulary=VOCABULARY,
            with_entropy=False,
            chunk_elements=chunk_elements,
        )
        assert entropies is None
        torch.testing.assert_close(
            log_probs, brute_force(head(hidden), targets, 1.0)[0], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), torch.linspace(0, 1, ROWS)])
def test_a_temperature_without_a_softmax_is_refused(temperature: float | Tensor) -> None:
    head, hidden, targets = inputs()
    with pytest.raises(ValueError, match="temperature"):
        token_log_probs(head, hidden, targets, temperature=temperature, vocabulary=VOCABULARY)


def test_the_entropy_alone_has_its_gradient() -> None:
    head, hidden, targets = inputs()
    expected = brute_force(head(hidden), targets, 1.0)[1]
    (wanted,) = torch.autograd.grad(expected.square().sum(), [hidden])
    entropies = token_log_probs(head, hidden, targets, vocabulary=VOCABULARY)[1]
    assert entropies is not None
    (found,) = torch.autograd.grad(entropies.square().sum(), [hidden])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_rows_beyond_a_block_have_their_own_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distflow.models.log_probs.BLOCK_ELEMENTS", 4 * VOCABULARY)
    test_values_and_gradients_are_those_of_full_logits(1000, 0.6)


def test_a_second_backward_pass_over_the_same_log_probs_is_refused() -> None:
    head, hidden, targets = inputs()
    log_probs, _ = token_log_probs(head, hidden, targets, vocabulary=VOCABULARY)
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        log_probs.sum().backward()


@pytest.mark.parametrize("rows_in_chunk", [1, 4, ROWS, 1000])
def test_numbers_of_actions_have_the_density_of_their_normal_distribution(
    rows_in_chunk: int,
) -> None:
    """Mean: the target's own logit. Standard deviation: e^-3 to e, by tanh of the next logit. By
    plain loops."""
    head, hidden, targets = inputs()
    targets = targets.clamp(max=VOCABULARY - 2)
    values = torch.linspace(-3, 3, ROWS, dtype=torch.float64)
    is_action = torch.arange(ROWS) % 3 > 0
    weights = torch.randn(2, ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = head(hidden)

    log_probs, entropies = (list(each) for each in brute_force(logits, targets, 1.0))
    for row in is_action.nonzero()[:, 0].tolist():
        mean = logits[row, targets[row]]
        raw = logits[row, targets[row] + 1]
        std = torch.exp(-3 + 2 * (torch.tanh(raw) + 1))
        log_probs[row] = -0.5 * ((values[row] - mean) / std) ** 2 - torch.log(
            std * math.sqrt(2 * math.pi)
        )
        entropies[row] = 0.5 * torch.log(2 * math.pi * math.e * std**2)

    expected = torch.stack(log_probs), torch.stack(entropies)
    wanted = torch.autograd.grad(
        (torch.stack(expected) * weights).sum(), [hidden, head.weight, head.bias]
    )
    found = token_log_probs(
        head,
        hidden,
        NumberTargets(targets, values, is_action, ActionHead(0).normals(targets, values)),
        vocabulary=VOCABULARY,
        chunk_elements=rows_in_chunk * VOCABULARY,
    )
    grads = torch.autograd.grad(
        (torch.stack(found) * weights).sum(), [hidden, head.weight, head.bias]
    )
    for ours, theirs in zip((*found, *grads), (*expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
