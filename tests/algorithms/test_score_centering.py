"""Score centering against the score that the sampler expects, computed over the whole vocabulary in
float64."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms.objectives import PolicyObjective
from distflow.algorithms.rollout_correction import Correction
from distflow.algorithms.score_centering import ScoreCentering
from distflow.config.rules.correction import CENTERED
from distflow.data.batch import Batch

VOCABULARY = 7
CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "truncated": Correction("token", 1.3),
    "truncated below 1": Correction("token", 0.8),
    "band": Correction("token", (0.7, 1.4)),
    "band without ratio 1": Correction("token", (0.2, 0.9)),
}


def weight(correction: Correction | None, ratio: float) -> float:
    """The weight of a token whose probability is `ratio` times the sampler's."""
    if correction is None:
        return 1.0
    threshold = correction.rollout_is_threshold
    if isinstance(threshold, tuple):
        return ratio if threshold[0] <= ratio <= threshold[1] else 0.0
    return min(ratio, threshold)


def expected_score(logits: Tensor, sampler: Tensor, correction: Correction | None) -> Tensor:
    """Σ_v q(v) w(v) ∇ log p(v) by the logits `(vocabulary,)`, token by token."""
    policy = logits.softmax(-1)
    total = torch.zeros_like(policy)
    for token in range(VOCABULARY):
        score = -policy.clone()
        score[token] += 1.0
        ratio = float(policy[token] / sampler[token]) if sampler[token] > 0 else 0.0
        total += sampler[token] * weight(correction, ratio) * score
    return total


def gradient_of_term(
    logits: Tensor, sampler: Tensor, correction: Correction | None, top: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    leaf = logits.clone().requires_grad_()
    log_probs = leaf.log_softmax(-1)[top]
    term, statistics = ScoreCentering(correction)(log_probs, sampler[top].log())
    term.backward()
    assert leaf.grad is not None
    return leaf.grad, statistics


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) * 1.5
    noise = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) * 0.4
    return logits, (logits + noise).softmax(-1)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_with_the_whole_vocabulary_it_is_the_expected_score(name: str, seed: int) -> None:
    logits, sampler = drawn(seed)
    top = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    found, statistics = gradient_of_term(logits, sampler, CORRECTIONS[name], top)
    expected = expected_score(logits, sampler, CORRECTIONS[name])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert float(statistics["centering_top_mass"]) == pytest.approx(1.0)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("scale", [0.6, 0.9, 1.0, 1.2, 1.6])
@pytest.mark.parametrize("number", [1, 3, 5])
def test_other_tokens_count_as_a_multiple_of_the_policy(
    name: str, scale: float, number: int
) -> None:
    """It is exact where the sampler's probabilities of all other tokens are that multiple."""
    logits, sampler = drawn(number)
    logits[sampler.argsort(descending=True)[:number]] += 3.0  # most of the probability
    policy = logits.softmax(-1)
    order = sampler.argsort(descending=True)
    top = order[:number]
    rest = order[number:]
    sampler = sampler.clone()
    sampler[rest] = scale * policy[rest]
    sampler[top] *= (1 - sampler[rest].sum()) / sampler[top].sum()

    found, statistics = gradient_of_term(logits, sampler, CORRECTIONS[name], top)
    assert float(statistics["centering_rho"]) == pytest.approx(scale)
    expected = expected_score(logits, sampler, CORRECTIONS[name])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_sampler_that_is_the_policy_needs_no_centering() -> None:
    logits, _ = drawn(3)
    for correction in CORRECTIONS.values():
        if weight(correction, 1.0) == 1.0:
            found, statistics = gradient_of_term(
                logits, logits.softmax(-1), correction, torch.arange(3)
            )
            assert float(found.abs().max()) < 1e-12
            assert float(statistics["centering_size"]) < 1e-12


def test_tokens_that_the_sampler_cuts_have_no_part() -> None:
    """With top_k, all of its probability is on a few tokens."""
    logits, sampler = drawn(4)
    cut = sampler.argsort(descending=True)[3:]
    sampler = sampler.clone()
    sampler[cut] = 0.0
    sampler /= sampler.sum()
    top = sampler.argsort(descending=True)[:5]
    found, statistics = gradient_of_term(logits, sampler, None, top)
    torch.testing.assert_close(found, expected_score(logits, sampler, None), rtol=0, atol=1e-12)
    assert float(statistics["centering_rho"]) == pytest.approx(0.0, abs=1e-9)


# The whole objective.

LENGTHS = (3, 1, 4)


def policy_batch(logits: Tensor, sampler: Tensor, top_k: int) -> Batch:
    """Samples with two masked tokens, and the sampler's likeliest tokens."""
    lengths = torch.tensor(LENGTHS)
    num_tokens = int(lengths.sum())
    generator = torch.Generator().manual_seed(9)
    batch = Batch(torch.ones(3, dtype=torch.int64), lengths)
    ids = torch.multinomial(sampler, 1, generator=generator)[:, 0]
    batch["response_ids"] = ids
    mask = torch.ones(num_tokens)
    mask[[0, 5]] = 0
    batch["response_mask"] = mask
    batch["advantages"] = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    rollout = sampler.log().gather(-1, ids[:, None])[:, 0]
    batch["prox_log_probs"] = log_probs
    batch["old_log_probs"] = log_probs
    batch["rollout_log_probs"] = rollout
    batch["scores"] = torch.tensor([1.0, 0.0, 1.0])
    likeliest = sampler.topk(top_k, dim=-1)
    batch["top_ids"] = likeliest.indices
    batch["top_log_probs"] = likeliest.values.log()
    return batch


def outputs_of(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    """What the train engine computes; NaN outside the mask."""
    scores = logits.log_softmax(-1)
    poison = torch.where(batch.flat("loss_mask") > 0, 0.0, float("nan"))
    flat = {
        "log_probs": scores.gather(-1, batch.flat("response_ids")[:, None])[:, 0] + poison,
        "entropy": -(scores.exp() * scores).sum(-1) + poison,
        "top_log_probs": scores.gather(-1, batch.flat("top_ids")) + poison[:, None],
    }
    return {name: batch.pad(values, "response") for name, values in flat.items()}


OPTIONS: Mapping[str, dict[str, Any]] = {
    "decoupled": {"behav_imp_weight_mode": "disabled"},
}
SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "token-mean": lambda mask: mask / mask.sum(),
    "seq-mean-token-sum": lambda mask: mask / len(LENGTHS),
}


@pytest.mark.parametrize("mode", SHARES)
@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("loss", CENTERED)
def test_the_gradient_of_each_loss_is_that_of_centered_scores(
    loss: str, name: str, mode: str
) -> None:
    """−A (w(a) s(a) − E_q[w s]) of each token under the mask, in parts of the batch too."""
    correction = CORRECTIONS[name]
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(LENGTHS)
    logits = torch.randn(num_tokens, VOCABULARY, generator=generator, dtype=torch.float64)
    noise = torch.randn(num_tokens, VOCABULARY, generator=generator, dtype=torch.float64)
    sampler = (logits + 0.4 * noise).softmax(-1)
    batch = policy_batch(logits, sampler, VOCABULARY)
    mask = batch.flat("loss_mask")
    policy = logits.softmax(-1)

    weights = torch.zeros(num_tokens, dtype=torch.float64)
    expected = torch.zeros_like(logits)
    shares = SHARES[mode](mask)
    for place, token in enumerate(batch.flat("response_ids").tolist()):
        ratio = float(policy[place, token] / sampler[place, token])
        weights[place] = weight(correction, ratio)
        score = -policy[place].clone()
        score[token] += 1.0
        centered = weights[place] * score - expected_score(
            logits[place], sampler[place], correction
        )
        expected[place] = -batch.flat("advantages")[place] * centered * shares[place]

    batch["rollout_is_weights"] = weights
    objective = PolicyObjective(
        loss,
        OPTIONS.get(loss, {}),
        loss_agg_mode=mode,
        weights_field="rollout_is_weights" if correction else None,
        centering=ScoreCentering(correction),
    )
    counts = objective.counts(batch)
    lengths = list(LENGTHS)

    for parts in ([[0, 1, 2]], [[2], [0, 1]], [[1], [2], [], [0]]):
        leaf = logits.clone().requires_grad_()
        sums = dict[str, float]()
        for rows in parts:
            part = batch.select(rows)
            own = torch.cat([leaf.split(lengths)[row] for row in rows] or [leaf[:0]])
            total, statistics = objective(outputs_of(own, part), part, counts)
            total.backward()
            for key, value in statistics.items():
                sums[key] = sums.get(key, 0.0) + float(value)

        # weights and sampler's log-probs are stored in float32
        torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-6)
        metrics = objective.finish(sums, counts)
        assert metrics["centering_top_mass"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["centering_size"] > 0
        assert metrics["loss_term/centering"] > 0


def test_it_reads_the_columns_of_the_sampler() -> None:
    plain = PolicyObjective("vanilla")
    centered = PolicyObjective("vanilla", centering=ScoreCentering())
    assert {*centered.reads} - {*plain.reads} == {"top_ids", "top_log_probs"}
    assert {*centered.outputs} - {*plain.outputs} == {"top_log_probs"}
