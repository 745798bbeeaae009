"""The auditor's formulas of the built-in policy losses against the losses, and errors planted into
the losses."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distflow.algorithms.losses import covariance
from distflow.algorithms.objectives import PolicyObjective
from distflow.algorithms.registry import find_policy_loss
from distflow.audit.audited_step.loss import Shares, _check_reported
from distflow.audit.audited_step.policy_loss_formulas import FORMULAS, Tokens, statistics
from distflow.audit.check import Wrong
from distflow.audit.record_groups_and_updates import UpdateRecord
from distflow.builtin_names import POLICY_LOSSES
from distflow.config import load_config
from distflow.config.keys.algorithm import RolloutCorrectionConfig
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.observe.run_reader import read_events
from tests.e2e.runs import Playground
from tests.sparse_params import one_fast_in

ACTOR = "actor_rollout_ref.actor"
FAST = (
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.optim.lr=1e-2",
    "trust.audit_freq=1",
)
OPTIONS = {
    "decoupled": {"behav_imp_weight_cap": 0.93},
    "dro": {"beta": 0.5},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5},
}
DEFAULTS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}


def test_every_built_in_loss_has_a_formula() -> None:
    assert FORMULAS.keys() == POLICY_LOSSES.keys()


@pytest.mark.parametrize("name", ["vanilla", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov"])
@pytest.mark.parametrize("spread", [0.05, 1.5])
def test_losses_and_gradients_are_those_of_the_formula(name: str, spread: float) -> None:
    draws = torch.Generator().manual_seed(1)
    old = -4 * torch.rand(8, 16, generator=draws)
    now = (old + spread * torch.randn(8, 16, generator=draws)).clamp(max=-1e-3).requires_grad_()
    columns = {
        "advantages": torch.randn(8, 16, generator=draws),
        "old_log_probs": old,
        "selected_tokens": (torch.rand(8, 16, generator=draws) < 0.3).float(),
    }
    loss = find_policy_loss(name)
    options = DEFAULTS | OPTIONS.get(name, {})
    call_options = {option: options[option] for option in loss.options if option in options}
    fields = {field: columns[field] for field in (*loss.reads, *loss.optional) if field in columns}
    found, _ = loss.fn(log_probs=now, loss_mask=torch.ones(8, 16), **fields, **call_options)
    (gradient,) = torch.autograd.grad(found.sum(), now)
    flat = now.detach().double().flatten().requires_grad_()
    sample = torch.arange(8).repeat_interleave(16)
    expected = FORMULAS[name](
        Tokens(flat, {n: c.double().flatten() for n, c in columns.items()}, sample), options
    )
    torch.testing.assert_close(found.double().flatten(), expected, rtol=1e-4, atol=1e-5)
    (wanted,) = torch.autograd.grad(expected.sum(), flat)
    torch.testing.assert_close(gradient.double().flatten(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted({*FORMULAS} - {"gpg"}))
def test_statistics_are_those_of_the_formula(name: str) -> None:
    draws = torch.Generator().manual_seed(4)
    old = -torch.rand(8, 16, generator=draws) * 3
    moved = 0.4 * torch.randn(8, 16, generator=draws) + 0.4 * torch.randn(8, 1, generator=draws)
    now = (old + moved).clamp(max=-1e-3)
    fields = {
        "advantages": torch.randn(8, 16, generator=draws),
        "old_log_probs": old,
        "selected_tokens": (torch.rand(8, 16, generator=draws) < 0.3).float(),
        "token_level_scores": torch.randn(8, generator=draws),
        "prox_log_probs": old - 0.1 + 0.05 * torch.randn(8, 16, generator=draws),
    }
    loss = find_policy_loss(name)
    options = DEFAULTS | {"clip_ratio_c": 1.05} | OPTIONS.get(name, {})
    options |= {"prox": "recompute", "correction": RolloutCorrectionConfig()}
    call_options = {option: options[option] for option in loss.options if option in options}
    given = {field: fields[field] for field in (*loss.reads, *loss.optional) if field in fields}
    _, found = loss.fn(log_probs=now, loss_mask=torch.ones(8, 16), **given, **call_options)
    columns = {n: fields[n].double().flatten() for n in ("advantages", "old_log_probs")}
    columns |= {"sample_score": fields["token_level_scores"].double().repeat_interleave(16)}
    columns |= (
        {"selected_tokens": fields["selected_tokens"].flatten()}
        if "selected_tokens" in given
        else {}
    )
    columns |= {"prox_log_probs": fields["prox_log_probs"].double().flatten()}
    tokens = Tokens(now.double().flatten(), columns, torch.arange(8).repeat_interleave(16))
    expected = statistics(name, tokens, options, 0.0)
    assert {*found} - {"ppo_kl"} <= {*expected}
    for key in {*found} - {"ppo_kl"}:
        assert (
            0
            < float(found[key].mean())
            == pytest.approx(float(expected[key].double().mean()), rel=1e-4)
        ), key


def run_with(folder: Path, name: str) -> Path:
    given = [
        f"+{ACTOR}.policy_loss_kwargs.{key}={value}" for key, value in OPTIONS.get(name, {}).items()
    ]
    clips = "clip_ratio_high" in find_policy_loss(name).options
    given += [f"{ACTOR}.clip_ratio=0.002"] if clips else []
    run = Playground(folder).run(
        "grpo", f"{ACTOR}.policy_loss={name}", *given, *FAST, "trainer.total_training_steps=2"
    )
    return run.folder


def halved(option: str) -> Callable[[Any, Mapping[str, Any]], None]:
    def plant(objective: Any, fields: Mapping[str, Any]) -> None:
        objective.options = {**objective.options, option: objective.options[option] / 2}

    return plant


def shifted(objective: Any, fields: Mapping[str, Any]) -> None:
    fields["selected_tokens"].copy_(fields["selected_tokens"].roll(1, dims=1))


PLANTED = {
    "dppo_tv": halved("clip_ratio_high"),
    "dppo_kl": halved("clip_ratio_high"),
    "dro": halved("beta"),
    "clip_cov": shifted,
    "kl_cov": halved("ppo_kl_coef"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", one_fast_in(8, PLANTED))
def test_a_run_is_proven_and_an_error_in_its_loss_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    audits = [
        event for event in read_events(run_with(tmp_path / "sound", name)) if event.kind == "audit"
    ]
    assert [event.fields["unproven"] for event in audits] == [{}, {}]
    assert all("loss" in event.fields["proven"] for event in audits)
    original = PolicyObjective._per_token

    def planted(
        self: PolicyObjective, current: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> Any:
        if not hasattr(self, "is_wrong"):
            self.is_wrong = True  # type: ignore[attr-defined]
            PLANTED[name](self, fields)
        return original(self, current, fields)

    monkeypatch.setattr(PolicyObjective, "_per_token", planted)
    with pytest.raises(TrustError, match=r"\(loss\)"):
        run_with(tmp_path / "wrong", name)


@pytest.mark.slow
def test_a_domain_with_the_loss_of_another_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    playground = Playground(tmp_path)
    own = "algorithm.domains={words: {policy_loss: sapo}}"
    names = ["sums", "words"] * 6
    rows = [{"prompt": f"{i}=", "answer": "7", "data_source": name} for i, name in enumerate(names)]
    playground.write_rows(rows)
    sound = playground.run("grpo", own, *FAST, "trainer.total_training_steps=1")
    assert "loss" in sound.audits()[0]["proven"]
    monkeypatch.setattr(
        PolicyObjective, "_terms_by_domain", swapped(PolicyObjective._terms_by_domain)
    )
    with pytest.raises(TrustError, match=r"\(loss\)"):
        playground.run("grpo", own, *FAST, "trainer.total_training_steps=1")


def swapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """The losses of both domains for each other's rows."""

    def planted(self: PolicyObjective, log_probs: torch.Tensor, micro: Batch, *rest: Any) -> Any:
        rows = micro.select(list(range(len(micro))))
        rows["domain"] = [{"sums": "words", "words": "sums"}[name] for name in micro["domain"]]
        return original(self, log_probs, rows, *rest)

    return planted


@pytest.mark.parametrize("name", one_fast_in(2, ["clip_cov", "kl_cov"]))
def test_tokens_that_are_selected_by_another_covariance_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = covariance.token_covariance
    monkeypatch.setattr(covariance, "token_covariance", lambda *given: -original(*given))
    with pytest.raises(
        TrustError, match=rf"\(loss\): {name} must select \d+ of the step's \d+ tokens"
    ):
        run_with(tmp_path, name)


@pytest.mark.slow
def test_tokens_that_are_drawn_by_other_numbers_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = covariance.token_draws
    monkeypatch.setattr(covariance, "token_draws", lambda *given: 1 - original(*given))
    with pytest.raises(
        TrustError, match=r"\(loss\): clip_cov must select \d+ of the step's \d+ tokens"
    ):
        run_with(tmp_path, "clip_cov")


def test_the_critics_loss_does_not_stand_for_a_policy_loss_without_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FORMULAS, "vanilla")
    run = Playground(tmp_path).run("ppo", "trainer.total_training_steps=1")
    (audit,) = [event for event in read_events(run.folder) if event.kind == "audit"]
    assert audit.fields["unproven"].keys() == {"loss"}
    assert audit.fields["unproven"]["loss"].startswith("the loss 'vanilla' has no formula")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [True, False])
def test_a_statistic_of_the_decoupled_loss_with_the_wrong_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    original = PolicyObjective._per_token

    def planted(
        self: PolicyObjective, current: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> Any:
        loss, found = original(self, current, fields)
        return loss, {**found, "behave_kl": -found["behave_kl"] if wrong else found["behave_kl"]}

    monkeypatch.setattr(PolicyObjective, "_per_token", planted)
    with (
        pytest.raises(TrustError, match=r"\(loss\): the behave_kl of a mini-batch")
        if wrong
        else nullcontext()
    ):
        Playground(tmp_path).run(
            "async_grpo", *FAST, "async.max_staleness=2", "trainer.total_training_steps=4"
        )


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        ([{"": (3.0, 3.0), "entropy": (0.5, 0.5), "pg_clipfrac": (0.25, 0.25)}], ""),
        ([{"": (3.0, 3.0), "entropy": (0.5, 0.5)}], "pg_clipfrac"),
        ([{"": (3.0, 3.0), "entropy": (1.0, 1.0), "pg_clipfrac": (0.25, 0.25)}], "entropy"),
        ([{}], ""),  # it has not recorded all of its samples
        ([], ""),  # it has found another error before
    ],
)
def test_metrics_of_a_mini_batch_are_the_sums_of_the_ranks_shares(
    tmp_path: Path, other: list[Shares], wrong: str
) -> None:
    config = load_config("grpo", Playground(tmp_path).overrides("run")).config
    reported = {"loss": 2.0, "entropy": 1.5, "pg_clipfrac": 0.3}
    batch = Batch(torch.tensor([1]), torch.tensor([1]))
    update = UpdateRecord(
        "actor", None, PolicyObjective(), batch, metrics=reported, share=(1.0, 2.0)
    )  # type: ignore[arg-type]
    update.totals = {"tokens": 5.0}
    recorded: Any = SimpleNamespace(config=config, run=SimpleNamespace(compared=set()))
    with pytest.raises(Wrong, match=f"the {wrong} of a mini-batch") if wrong else nullcontext():
        _check_reported(
            recorded,
            update,
            [{"": (2.0, 2.0), "entropy": (1.0, 1.0), "pg_clipfrac": (0.0, 0.125)}, *other],
        )
