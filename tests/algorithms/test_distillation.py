"""The terms of distillation against plain float64 formulas over whole distributions, with their
gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algorithms.losses.distillation import Distillation, divergence
from distflow.algorithms.objectives import PolicyObjective
from distflow.data.batch import Batch
from tests.references import distillation as reference

KINDS = ("forward_kl", "reverse_kl", "jsd")
TOKENS = 6
VOCABULARY = 9


def drawn(seed: int, k: int, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy, probabilities of the teacher, and its k likeliest tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
    teacher = torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
    probs = (scale * teacher).softmax(-1)
    return logits.requires_grad_(), probs, probs.topk(k).indices


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000), k=st.integers(1, VOCABULARY - 1), beta=st.floats(0.05, 0.95))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_a_divergence_and_its_gradient_are_those_of_the_lumped_distributions(
    kind: Any, seed: int, k: int, beta: float
) -> None:
    logits, teacher, ids = drawn(seed, k)
    cotangents = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    policy = logits.softmax(-1)
    expected = [
        reference.divergence(
            reference.lumped(teacher[row], ids[row]),
            reference.lumped(policy[row], ids[row]),
            kind,
            beta,
        )
        for row in range(TOKENS)
    ]
    (wanted,) = torch.autograd.grad((torch.stack(expected) * cotangents).sum(), [logits])

    at_ids = logits.log_softmax(-1).gather(1, ids)
    found = divergence(at_ids, teacher.log().gather(1, ids), kind, beta)
    (gradient,) = torch.autograd.grad((found * cotangents).sum(), [logits])
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000), k=st.integers(1, VOCABULARY - 1))
@settings(derandomize=True, max_examples=30, deadline=None)
def test_a_divergence_is_at_most_that_over_the_whole_vocabulary(
    kind: Any, seed: int, k: int
) -> None:
    logits, teacher, ids = drawn(seed, k)
    policy = logits.detach().softmax(-1)
    found = divergence(policy.log().gather(1, ids), teacher.log().gather(1, ids), kind, 0.3)
    for row in range(TOKENS):
        full = reference.divergence(teacher[row], policy[row], kind, 0.3)
        assert -1e-9 <= float(found[row]) <= float(full) + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_vocabulary_is_exact_up_to_the_least_mass_of_the_others(kind: Any) -> None:
    logits, teacher, ids = drawn(1, VOCABULARY)
    policy = logits.detach().softmax(-1)
    found = divergence(policy.log().gather(1, ids), teacher.log().gather(1, ids), kind, 0.3)
    for row in range(TOKENS):
        full = reference.divergence(teacher[row], policy[row], kind, 0.3)
        assert float(found[row]) == pytest.approx(float(full), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_like_its_teacher_has_no_divergence_and_no_gradient(kind: Any) -> None:
    _, teacher, ids = drawn(2, 4)
    log_probs = teacher.log().gather(1, ids).requires_grad_()
    found = divergence(log_probs, log_probs.detach(), kind, 0.5)
    (gradient,) = torch.autograd.grad(found.sum(), [log_probs])
    assert float(found.detach().abs().max()) < 1e-12
    # The gradient by logits is 0; that by log-probs may be one that all logits share.
    logits = teacher.log().requires_grad_()
    (of_logits,) = torch.autograd.grad(
        (logits.log_softmax(-1).gather(1, ids) * gradient).sum(), [logits]
    )
    assert float(of_logits.abs().max()) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_and_certain_tokens_stay_finite(kind: Any) -> None:
    """A token without any mass by the teacher, one by the policy, and no mass for the others."""
    teacher = torch.tensor([[0.0, -torch.inf], [-1e-8, -18.0], [-torch.inf, -torch.inf]])
    policy = torch.tensor([[-0.7, -0.7], [-90.0, -1e-7], [-0.7, -0.7]]).requires_grad_()
    found = divergence(policy, teacher, kind)
    (gradient,) = torch.autograd.grad(found.sum(), [policy])
    assert found.isfinite().all() and gradient.isfinite().all()
    if kind == "forward_kl":  # it learns a token that the policy has almost excluded
        assert float(gradient[1, 0]) == pytest.approx(-1, abs=1e-3)


def batch_of(signal: str, k: int = 3) -> tuple[Batch, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    batch = Batch(torch.tensor([2, 1, 2]), torch.tensor([3, 4, 2]))
    tokens = 9
    batch["response_mask"] = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 1.0])
    batch["advantages"] = torch.randn(tokens, generator=generator).double()
    batch["acc"] = torch.tensor([1.0, 0.0, 1.0]).double()
    batch["teacher_log_probs"] = -3 * torch.rand(tokens, generator=generator)
    batch["kl_weights"] = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1, 1.0])
    outputs = {
        "log_probs": -2 * torch.rand(tokens, generator=generator, dtype=torch.float64),
        "entropy": torch.rand(tokens, generator=generator, dtype=torch.float64),
    }
    if signal == "top_k":
        logits = torch.randn(tokens, VOCABULARY, generator=generator, dtype=torch.float64)
        teacher = torch.randn(tokens, VOCABULARY, generator=generator, dtype=torch.float64)
        top = teacher.log_softmax(-1).topk(k)
        batch["teacher_top_ids"] = top.indices
        batch["teacher_top_log_probs"] = top.values
        outputs["teacher_top_log_probs"] = logits.log_softmax(-1).gather(1, top.indices)
    return batch, {name: values.requires_grad_() for name, values in outputs.items()}


@pytest.mark.parametrize("signal", ["sampled", "top_k"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_adds_its_terms_token_by_token(signal: Any, weighted: bool) -> None:
    """Coefficients 0.7 (rewards), 0.4 (teacher) and 0.2 (likelihood), in one micro-batch and in
    three."""
    batch, outputs = batch_of(signal)
    rl = torch.ones(9)
    ce = batch["acc"].repeat_interleave(batch.lengths("response"))
    if weighted:
        rl = torch.linspace(0, 2, 9)
        ce = torch.linspace(1, 0, 9).double()
        batch["rl_weights"] = rl
        batch["ce_weights"] = ce

    total = torch.zeros((), dtype=torch.float64)
    for token in range(9):
        if not batch.flat("response_mask")[token]:
            continue
        log_prob = outputs["log_probs"][token]
        scored = batch.flat("kl_weights")[token].double()
        advantage = 0.7 * rl[token].double() * batch.flat("advantages")[token]
        if signal == "sampled":
            gap = batch.flat("teacher_log_probs")[token] - log_prob.detach()
            advantage = advantage + 0.4 * scored * gap
        else:
            own = outputs["teacher_top_log_probs"][token].exp()
            theirs = batch.flat("teacher_top_log_probs")[token].double().exp()
            pair = [torch.cat([each, 1 - each.sum(0, keepdim=True)]) for each in (theirs, own)]
            total = total + 0.4 * scored * reference.divergence(*pair, "jsd", 0.3)
        # the ratio is 1, and its gradient that of the log-prob
        total = total - advantage * torch.exp(log_prob - log_prob.detach())
        total = total - 0.2 * ce[token] * log_prob
    total = total / batch.flat("response_mask").sum()
    leaves = [each for name, each in outputs.items() if name != "entropy"]
    wanted = torch.autograd.grad(total, leaves)

    objective = PolicyObjective(
        "vanilla",
        derives_old=True,
        distillation=Distillation(signal, "jsd", 0.3, rl_coef=0.7, kl_coef=0.4, ce_coef=0.2),
    )
    counts = objective.counts(batch)
    for parts in ([[0, 1, 2]], [[1], [2], [0]]):
        loss = torch.zeros((), dtype=torch.float64)
        sums = dict[str, float]()
        for rows in parts:
            micro = batch.select(rows)
            places = torch.isin(batch.rows(), torch.tensor(rows)).nonzero()[:, 0]
            padded = {name: micro.pad(out[places], "response") for name, out in outputs.items()}
            share, measured = objective(padded, micro, counts)
            loss = loss + share
            for name, value in measured.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        found = torch.autograd.grad(loss, leaves)
        torch.testing.assert_close(loss, total, rtol=1e-6, atol=1e-7)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)

        metrics = objective.finish(sums, counts)
        assert metrics["teacher_scored"] == pytest.approx(4 / 8)  # one scored token is masked
        gaps = outputs["log_probs"].detach() - batch.flat("teacher_log_probs")
        counted = batch.flat("response_mask") * batch.flat("kl_weights")
        assert metrics["teacher_kl"] == pytest.approx(float((gaps * counted).sum() / 8), rel=1e-5)


def test_a_log_ratio_is_bounded() -> None:
    batch, outputs = batch_of("sampled")
    batch["teacher_log_probs"] = torch.full((9,), -1e6)
    added = Distillation("sampled", "jsd", 0.5, rl_coef=0.0, kl_coef=1.0, ce_coef=0.0)
    padded = batch.pad(outputs["log_probs"], "response")
    found = added.advantages(batch["advantages"], padded, batch)
    assert float(found.min()) == -20
