"""Losses and corrections that need more than the loss's own columns, in whole runs."""

import pytest
import torch

from distflow.data.batch import Batch
from distflow.graph import PipelineError
from tests.e2e.runs import Playground, Run

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
SAVED = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.keep_last=9",
    "trainer.save_groups=all",
)
UPDATES = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2")


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path)


def recorded(run: Run, step: int = 1) -> Batch:
    return Batch.load(run.folder / "tokens" / f"{step:06d}.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "loss", "options", "share"),
    [
        ("grpo", "clip_cov", {"clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}, 0.2),
        ("ppo", "kl_cov", {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5}, 0.1),
    ],
)
def test_tokens_are_chosen_over_the_step_whatever_the_micro_batches(
    playground, preset, loss, options, share
):
    given = [f"+{ACTOR}.policy_loss_kwargs.{name}={value}" for name, value in options.items()]
    runs = [
        playground.run(
            preset,
            f"{ACTOR}.policy_loss={loss}",
            f"{ACTOR}.ppo_max_token_len_per_gpu={size}",
            *(*given, *UPDATES, *SAVED),
            name=f"micro-{size}",
        )
        for size in (4096, 1)
    ]
    batch = recorded(runs[0])
    chosen = batch.flat("selected_tokens")
    num_tokens = float(batch.flat("loss_mask").sum())
    assert float(chosen.sum()) == int(share * num_tokens) > 0
    assert runs[0].metrics()[0]["actor/cov_selected"] == pytest.approx(
        float(chosen.sum()) / num_tokens, rel=1e-6
    )
    assert torch.equal(chosen, recorded(runs[1]).flat("selected_tokens"))
    for name, weight in runs[0].weights(1).items():
        torch.testing.assert_close(runs[1].weights(1)[name], weight, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl", "dro", "cpgd"])
def test_a_loss_trains(playground, loss):
    drift = [f"+{ACTOR}.policy_loss_kwargs.policy_drift_coeff=0.5"] if loss == "cpgd" else []
    run = playground.run(
        "grpo", f"{ACTOR}.policy_loss={loss}", *drift, *UPDATES, "trainer.total_training_steps=2"
    )
    first, second = run.metrics()
    assert (
        first["actor/loss_term/pg"] > 0
        and first["actor/grad_norm"] > 0
        and second["actor/grad_norm"] > 0
    )
    assert ("actor/policy_drift" in first) == (loss == "cpgd")


def test_weights_are_of_whole_sequences_and_rejected_tokens_leave_every_count(playground):
    """The weight of a sequence is the product over all its tokens, also over those that are
    rejected by themselves."""
    run = playground.run(
        "ppo",
        "actor_rollout_ref.model.dtype=bfloat16",
        f"{CORRECTION}={{rollout_is: sequence, rollout_is_threshold: 100}}",
        f"{CORRECTION}.rollout_rs=[token_k2,seq_mean_k2]",
        f"{CORRECTION}.rollout_rs_threshold=[1e-6,1]",
        *SAVED,
    )
    batch = recorded(run)
    step = run.metrics()[0]
    made = batch["response_mask"]
    kept = batch["loss_mask"]
    gap = (batch["old_log_probs"].double() - batch["rollout_log_probs"].double()) * made
    assert torch.equal(kept, made * (gap.square() / 2 <= 1e-6))
    weights = gap.sum(-1, keepdim=True).exp().expand_as(gap) * made
    torch.testing.assert_close(
        batch["rollout_is_weights"].double() * made, weights, rtol=1e-5, atol=1e-6
    )
    assert step["rejection/masked"] == pytest.approx(1 - float(kept.sum() / made.sum()), abs=1e-6)
    assert step["rejection/seq_mean_k2_masked"] == 0.0
    wanted = -(batch["advantages"].double() * weights * kept).sum() / kept.sum()

    # 0 on a processor where engine and trainer round alike
    assert step["actor/pg_loss"] == pytest.approx(float(wanted), rel=2e-2, abs=1e-7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            [f"{ACTOR}.policy_loss=vanila", "trainer.imports=[json]"],
            "'actor_train': .*'vanila' .*'vanilla'",
        ),
        (
            [f"{ACTOR}.policy_loss=dro", f"+{ACTOR}.policy_loss_kwargs.beta=-1"],
            "beta .* 0 or above",
        ),
        (
            [f"{ACTOR}.policy_loss=kl_cov", f"+{ACTOR}.policy_loss_kwargs.kl_cov_ratio=2"],
            "kl_cov_ratio is a share",
        ),
        (
            [f"{ACTOR}.policy_loss=clip_cov", f"+{ACTOR}.policy_loss_kwargs.clip_cov_lower=2"],
            "clip_cov_lower",
        ),
        (
            [
                f"{ACTOR}.policy_loss=decoupled",
                f"+{ACTOR}.policy_loss_kwargs.rejection_sampling={{upper: 0.5}}",
            ],
            "above 1",
        ),
    ],
)
def test_what_no_loss_takes_is_refused_before_the_start(playground, options, said):
    with pytest.raises(PipelineError, match=said):
        playground.spec("grpo", *options)
    assert not (playground.folder / "run").exists()
