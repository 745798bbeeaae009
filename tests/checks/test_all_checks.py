"""The checks in healthy runs and with user functions: silence, or one message with the finding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distflow.checks import log_probs, rewards
from distflow.checks.all_checks import CHECKS
from distflow.errors import TrustError
from distflow.observe.run_reader import read_events
from distflow.pipelines.nodes import updates
from distflow.rollout.embedded import host_lane as embedded
from tests.e2e.runs import Playground, Run
from tests.user_code import forgotten

slow = pytest.mark.slow  # a run each, or several

ALWAYS = ("trust.check_freq=1", "trainer.total_training_steps=3")
TWO = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2")
ACTOR = "actor_rollout_ref.actor"
ALGORITHM = "algorithm"
HEALTHY = {
    "grpo": ("grpo", *TWO),
    "ppo": ("ppo", *TWO),
    "dapo": ("dapo", "reward.overlong.buffer_tokens=4"),
    "lora": ("grpo", "actor_rollout_ref.model.lora_rank=2"),
    "bfloat16": ("grpo", "actor_rollout_ref.model.dtype=bfloat16"),
    "hf": ("grpo", "actor_rollout_ref.rollout.name=hf"),
    "decoupled": ("grpo", f"{ACTOR}.policy_loss=decoupled", *TWO),
    "gspo": (
        "grpo",
        f"{ACTOR}.policy_loss=gspo",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        *TWO,
    ),
    "truncated": (
        "grpo",
        *(
            f"actor_rollout_ref.rollout.{key}"
            for key in ("top_p=0.9", "top_k=20", "min_p=0.01", "temperature=0.7")
        ),
    ),
    "corrected": (
        "grpo",
        *(
            f"{ALGORITHM}.rollout_correction.{key}"
            for key in ("rollout_is=geometric", "rollout_is_threshold=[0,2]")
        ),
    ),
    "rejected": (
        "grpo",
        f"{ALGORITHM}.rollout_correction.rollout_rs=[token_k1]",
        f"{ALGORITHM}.rollout_correction.rollout_rs_threshold=[[0.9999999,1.0000001]]",
    ),
    "rewards by all so far": (
        "grpo",
        *(f"{ALGORITHM}.reward_norm.{key}" for key in ("mean_level=running", "std_level=running")),
        *(
            f"{ALGORITHM}.{key}"
            for key in ("use_kl_in_reward=true", "whiten_rewards=true", "adv_estimator=reinforce")
        ),
    ),
    "weights of samples": (
        "grpo",
        *(f"{ALGORITHM}.{key}" for key in ("difficulty_weight=[0.5,2]", "length_weight=[1,0.3]")),
        *(
            f"{ALGORITHM}.{key}"
            for key in ("difficulty_mask=[0.1,0.9]", "mask_long_errors=8", "mask_truncated=true")
        ),
        "actor_rollout_ref.rollout.stop=['1','a','e','o','u',' ']",
    ),
    "out of baselines too": (
        "grpo",
        *(
            f"{ALGORITHM}.{key}"
            for key in ("mask_long_errors=6", "mask_truncated=true", "mask_type=all")
        ),
        *(
            f"{ALGORITHM}.{key}"
            for key in (
                "reward_norm.mean_level=running",
                "use_kl_in_reward=true",
                "whiten_rewards=true",
            )
        ),
        *(f"{ALGORITHM}.{key}" for key in ("adv_estimator=reinforce", "difficulty_weight=[0.5,2]")),
        "actor_rollout_ref.rollout.stop=['1','a','e','o','u',' ']",
    ),
    "off-policy sequences": (
        "grpo",
        f"{ACTOR}.off_policy_mask_threshold=0.001",
        f"{ACTOR}.optim.lr=3e-2",
        f"{ACTOR}.optim.scheduler=constant",
        *TWO,
    ),
}
NOT_CHECKED = {"lora": {"weights"}}


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path)


def steps(run: Run) -> list[dict[str, Any]]:
    """What the checks of each step have recorded."""
    return [fields for fields in run.checks() if fields["of"] == "step"]


KEYS = {
    "grpo": {"ref_log_prob"},
    "ppo": {"ref_log_prob", "values", "old_log_probs"},
}
"""Of each preset the columns that are compared with the models' own forward."""


ELSEWHERE = {"resume", "turns", "validation", "episodes"}


@pytest.mark.parametrize("preset", KEYS)
def test_a_run_with_default_settings_proves_every_check_that_applies(
    playground, monkeypatch, preset
):
    """Checks look for parts by type or attribute: one that no longer finds its part must not
    disappear unnoticed."""
    compared = set[str]()
    compare = log_probs._same
    monkeypatch.setattr(
        log_probs,
        "_same",
        lambda step, sample, column, _: compared.add(column) or compare(step, sample, column, _),
    )
    run = playground.run(preset, "trainer.total_training_steps=2", "trust.check_rewards=true")
    everything = {check.name for check in CHECKS}
    first, second = steps(run)
    assert {*first["passed"]} == everything - ELSEWHERE
    assert {*second["passed"]} == everything - ELSEWHERE - {"data"}
    assert first["not_checked"] == second["not_checked"] == {}
    assert compared == KEYS[preset] and run.notes("warning") == []


@slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_passes_all_checks_silently(playground, name):
    run = playground.run(*HEALTHY[name], *ALWAYS)
    assert run.notes("warning") == []
    assert [{*fields["not_checked"]} for fields in steps(run)] == [NOT_CHECKED.get(name, set())] * 3
    assert {"responses", "draws", "loss", "optimizer"} <= {*steps(run)[0]["passed"]}
    assert "3 steps were checked whole" in (run.folder / "report.html").read_text()


@slow
def test_supervised_steps_pass_the_checks(playground):
    gone = (
        "reward.functions",
        "reward.num_workers",
        "custom_reward_function.path",
        "actor_rollout_ref.rollout.n",
    )
    run = playground.run("sft", "data.response_key=answer", *ALWAYS, *(f"~{key}" for key in gone))
    assert {*steps(run)[0]["passed"]} >= {
        "responses",
        "masks",
        "loss",
        "gradients",
        "optimizer",
    }
    assert run.notes("warning") == []


@slow
def test_the_first_steps_and_powers_of_two_are_checked(playground):
    keys = ("trust.check_freq=1000", "trainer.total_training_steps=19", "trainer.save_freq=11")
    run = playground.run("grpo", *keys)
    checked = [event.step for event in read_events(run.folder) if event.kind == "checks"]
    assert checked == [*range(1, 10), 17, 19]
    playground.run("grpo", *keys)
    assert len(steps(run)) == len(checked), "a finished run takes no step"


NONDETERMINISTIC = {
    "clock": ("import time\n", "time.perf_counter_ns() % 1000 / 1000"),
    "counting": ("from itertools import count\nCOUNT = count()\n", "float(next(COUNT) % 5)"),
}


@slow
@pytest.mark.parametrize("kind", NONDETERMINISTIC)
def test_a_nondeterministic_reward_function_is_reported_once(playground, kind):
    head, value = NONDETERMINISTIC[kind]
    playground.write_reward(
        f"{head}\ndef compute_score(data_source, solution_str, ground_truth): return {value}\n"
    )
    run = playground.run("grpo", *ALWAYS, "trust.check_rewards=false")
    (warning,) = run.notes("warning")
    assert "reward function 'custom' is not deterministic: for sample" in warning
    assert dict(steps(run)[-1]["not_checked"]).keys() == {"reward_results"}


@slow
def test_a_check_that_raises_is_reported_and_has_no_other_effect(playground, monkeypatch):
    monkeypatch.setattr(rewards, "_check_total", lambda *_: 1 / 0)
    run = playground.run("grpo", *ALWAYS)
    (warning,) = run.notes("warning")
    assert warning == "the check 'rewards' could not be made: ZeroDivisionError: division by zero"
    assert len(run.metrics()) == 3


MODULE = """
import torch
from distflow.algorithms import agg_loss, register_adv_est, register_policy_loss

@register_adv_est("padded_mean")
def padded_mean(token_level_rewards, response_mask, group_index):
    advantages = (token_level_rewards - token_level_rewards.mean()) * response_mask
    return advantages, advantages

@register_adv_est("mixed")
def mixed(token_level_rewards, response_mask, group_index):
    scores = (token_level_rewards * response_mask).sum(-1)
    advantages = (scores - scores.mean())[:, None] * response_mask
    return advantages, advantages

@register_adv_est("sound")
def sound(token_level_rewards, response_mask, group_index):
    scores = (token_level_rewards * response_mask).sum(-1)
    means = torch.stack([scores[group_index == g].mean() for g in group_index])
    advantages = (scores - means)[:, None] * response_mask
    return advantages, advantages

@register_adv_est("noisy")
def noisy(token_level_rewards, response_mask, group_index):
    advantages = torch.rand_like(response_mask) * response_mask
    return advantages, advantages

@register_policy_loss("padded_loss")
def padded_loss(log_probs, advantages, loss_mask):
    return -log_probs * (advantages - advantages.mean()) * loss_mask, {}

@register_policy_loss("sound_loss")
def sound_loss(log_probs, advantages, loss_mask):
    return -log_probs * advantages * loss_mask, {}

@register_policy_loss("ratio_loss")
def ratio_loss(log_probs, old_log_probs, advantages, loss_mask):
    return -(log_probs - old_log_probs).exp() * advantages * loss_mask, {}

@register_policy_loss("scalar_loss")
def scalar_loss(old_log_prob, log_prob, advantages, response_mask, **kwargs):
    zero = torch.zeros(())
    return -(log_prob * advantages * response_mask).sum() / response_mask.sum(), zero, zero, zero

@register_policy_loss("aggregated_loss")
def aggregated_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, **kwargs):
    zero = torch.zeros(())
    return agg_loss(-log_prob * advantages, response_mask, loss_agg_mode), zero, zero, zero
"""
USERS = {
    "padded_mean": (
        f"{ALGORITHM}.adv_estimator=padded_mean",
        "padded_mean gives different",
    ),
    "mixed": (f"{ALGORITHM}.adv_estimator=mixed", "mixed gives different"),
    "noisy": (f"{ALGORITHM}.adv_estimator=noisy", "make it deterministic"),
    "sound": (f"{ALGORITHM}.adv_estimator=sound", None),
    "padded_loss": (
        f"{ACTOR}.policy_loss=padded_loss",
        "the loss 'padded_loss' gives a sample alone other gradients",
    ),
    "scalar_loss": (f"{ACTOR}.policy_loss=scalar_loss", None),
    "ratio_loss": (f"{ACTOR}.policy_loss=ratio_loss", None),
    "aggregated_loss": (f"{ACTOR}.policy_loss=aggregated_loss", None),
    "sound_loss": (f"{ACTOR}.policy_loss=sound_loss", None),
}


@slow
@pytest.mark.parametrize("name", USERS)
def test_what_users_functions_give_for_a_sample_or_group_alone(playground, monkeypatch, name):
    override, message = USERS[name]
    (playground.folder / "users_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(playground.folder))
    code = "trainer.imports=[users_code]"
    with forgotten("users_code"):
        run = playground.run("grpo", override, code, *ALWAYS, f"{ACTOR}.use_kl_loss=false")
    check = "loss" if "loss" in name else "advantages"

    if message is None:
        assert run.notes("warning") == []
        assert all(check in fields["passed"] for fields in steps(run))
        return

    (warning,) = run.notes("warning")
    assert message in warning
    assert all(check in fields["not_checked"] for fields in steps(run))
    assert any(f"{check} (the" in note for note in run.notes("info"))


# A pipeline that asks nobody for old log-probs: the ratio to them is 1.
SHORT = """
from distflow import NodeRole, Pipeline

def short():
    nodes, pipeline = "distflow.pipelines.nodes:", Pipeline("short", "")
    pipeline.add_node("answer", func=nodes + "generate", deps=[], node_role=NodeRole.ROLLOUT)
    pipeline.add_node("judge", func=nodes + "compute_reward", deps=["answer"], node_role=NodeRole.REWARD)
    pipeline.add_node("compare", func=nodes + "compute_advantage", deps=["judge"], node_role=NodeRole.ADVANTAGE)
    pipeline.add_node("train", func=nodes + "train_actor", deps=["compare"], node_role=NodeRole.ACTOR)
    return pipeline.build()
"""  # noqa: E501


@slow
def test_the_loss_of_a_pipeline_without_old_log_probs_is_proven(playground):
    (playground.folder / "short.py").write_text(SHORT)
    pipeline = (f"dag.pipeline={playground.folder}/short.py:short",)
    run = playground.run("grpo", *pipeline, *ALWAYS, *TWO, f"{ACTOR}.use_kl_loss=false")
    assert run.notes("warning") == []
    assert all({"loss", "gradients"} <= {*fields["passed"]} for fields in steps(run))


@slow
def test_a_built_in_loss_that_is_given_by_its_name_is_proven_too(playground, monkeypatch):
    """As loops and nodes of users give it."""
    original = updates.policy_objective
    by_name = lambda *given: replace(original(*given), loss="vanilla")  # noqa: E731
    monkeypatch.setattr(updates, "policy_objective", by_name)
    run = playground.run("grpo", *ALWAYS, *TWO)
    assert all({"loss", "gradients"} <= {*fields["passed"]} for fields in steps(run))


def apart(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """Have the engine give log-probs that are off by a little."""
    original: Any = embedded.sample

    def planted(logits: Any, rows: Any) -> Any:
        draws = original(logits, rows)
        return draws._replace(rollout_log_probs=draws.rollout_log_probs - by)

    monkeypatch.setattr(embedded, "sample", planted)


@slow
@pytest.mark.parametrize("answer", ["stop", "warn"])
def test_on_mismatch(playground, monkeypatch, answer):
    apart(monkeypatch, 5e-4)
    scored = "algorithm.recompute_old_log_probs=true"
    given = ("grpo", f"trust.on_mismatch={answer}", scored, *ALWAYS)

    if answer == "stop":
        with pytest.raises(TrustError, match=r"above 0\.0001, and trust\.on_mismatch=stop"):
            playground.run(*given)
        return

    run = playground.run(*given)
    (warning,) = run.notes("warning")
    assert "rollout_correction.rollout_is=token" in warning


def test_the_docs_have_the_present_table():
    docs = (Path(__file__).parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")
    table = "".join(
        f"| {check.name} | {check.statement} | {check.needs} | {check.limit} |\n"
        for check in CHECKS
    )
    assert table in docs, f"put these rows into the table of docs/trust.md:\n{table}"
