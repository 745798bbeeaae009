"""A key that is set changes what a run does: each is changed, and the outcome that is named beside
it is another one. Keys that many tests set, and see the effect of, are not repeated here."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.key_lab import ACTOR, MODEL, ROLLOUT, Lab, same


@dataclass(frozen=True)
class Change:
    """One key that matters."""

    key: str
    value: str
    """In YAML."""
    shows: str
    """The outcome that changes."""
    to: Any = None
    """What it is afterwards, if that is not for a formula to say."""
    given: tuple[str, ...] = ()
    """Overrides on both sides."""
    base: str = "grpo"
    keeps: str = ""
    """An outcome that is as before."""
    also: tuple[str, ...] = ()
    """Overrides that the changed value comes with."""


TWO = ("trainer.total_training_steps=2",)
THREE = ("trainer.total_training_steps=3",)
FOUR = ("trainer.total_training_steps=4",)
MOVING = (*TWO, f"{ACTOR}.optim.lr=0.01")
VALIDATED = ("data.val_files={lab}/val.jsonl",)
BFLOAT16 = (
    f"{MODEL}.dtype=bfloat16",
    f"{ROLLOUT}.enforce_eager=true",  # native code rounds as the trainer does
    "trust.canary_freq=0",
)
ALGORITHM = "algorithm"
CORRECTION = "algorithm.rollout_correction"
WEIGHED = (*BFLOAT16, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=100")
REJECTED = (f"{CORRECTION}.rollout_rs=token_k2", f"{CORRECTION}.rollout_rs_threshold=1e-6")
NO_KL = ("algorithm.use_kl_in_reward=false",)
KL = "algorithm.kl_ctrl"
ADAPTIVE = (f"{KL}.type=adaptive", f"{KL}.target_kl=0.1", f"{KL}.horizon=100")
REINFORCE = ("algorithm.adv_estimator=reinforce",)
ONE_TURN = (f"{ROLLOUT}.workflow=multi_turn", f"{ROLLOUT}.workflow_kwargs={{max_turns: 1}}")
FORMAT = ("reward.functions.default=[custom,{name: format, weight: 0}]",)
FLAT = ("data.shuffle=false", f"{ALGORITHM}.filter_groups.max_num_gen_batches=1")
KL_LOSS = (*MOVING, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.5")
GOOD = "loss 1 0.5 1.5 10"
BAD = "loss -1 0.5 1.5 10"
FAR = "loss -1 0.368 0.368 0.368"
LONG = ("data.train_files={lab}/long.jsonl",)
UNFILTERED = (*LONG, "data.filter_overlong_prompts=false")
CHAT = ("data.prompt_format=chat", "data.max_prompt_length=64")
ANSWERED = (*VALIDATED, "trainer.val_before_train=true")
SAMPLED = (*ANSWERED, f"{ROLLOUT}.val_kwargs.n=4")
SAVING = (*THREE, "trainer.save_freq=1", "trainer.keep_last=1", "trainer.test_freq=1", *VALIDATED)
BEST = (*SAVING, "trainer.keep_best=true", f"{ROLLOUT}.val_kwargs.n=8", f"{ACTOR}.optim.lr=0")


def of_optimizer(role: str, other: str, base: str, group: str) -> list[Change]:
    """Keys of an optimizer, of its mini-batches and its schedule."""
    optim = f"{group}.optim"
    falling = (*FOUR, f"{optim}.scheduler=linear_with_warmup", f"{optim}.warmup_ratio=0.5")
    sgd = (f"{optim}.optimizer=sgd", f"{optim}.weight_decay=0", f"{group}.max_grad_norm=1000")
    moved = f"moved {role}"
    rate = f"metric {role}/lr"
    keeps = f"moved {other}" if other else ""

    def change(key: str, value: str, shows: str, to: Any = None, *given: str) -> Change:
        of_one_step = keeps if given != falling else ""
        return Change(f"{group}.{key}", value, shows, to, given, base, of_one_step)

    return [
        change("optim.optimizer", "sgd", moved),
        change("optim.weight_decay", "0.5", moved),
        change("optim.betas", "[0.5,0.9]", f"moments {role}"),
        change("optim.eps", "1.0", moved),
        change("max_grad_norm", "0.01", moved, None, *sgd),
        change("ppo_epochs", "3", f"updates {role}", 3),
        change("ppo_max_token_len_per_gpu", "40", f"learning {role}", False),
        change("optim.scheduler", "constant_with_warmup", rate, [0, 5e-4, 1e-3, 1e-3], *falling),
        change("optim.warmup_ratio", "0.25", rate, [0, 1e-3, 2e-3 / 3, 1e-3 / 3], *falling),
        change("optim.lr_warmup_steps", "3", rate, [0, 1e-3 / 3, 2e-3 / 3, 1e-3], *falling),
        change("optim.min_lr_ratio", "0.5", rate, [0, 5e-4, 1e-3, 7.5e-4], *falling),
    ]


def of_normalization(name: str) -> list[Change]:
    group = f"{ALGORITHM}.{name}"
    of_group = (*REINFORCE, f"{group}.mean_level=group")
    of_batch = (*REINFORCE, f"{group}.mean_level=batch", f"{group}.std_level=batch")
    with_std = (*of_group, f"{group}.std_level=group")
    shows = "column advantages"

    return [
        Change(f"{group}.mean_level", "group", shows, given=REINFORCE),
        Change(f"{group}.mean_leave1out", "true", shows, given=of_group),
        Change(f"{group}.std_level", "batch", shows, given=of_group),
        Change(f"{group}.std_unbiased", "false", shows, given=with_std),
        Change(f"{group}.eps", "0.5", shows, given=of_batch),
        Change(f"{group}.group_size", "2", shows, given=of_group),
    ]


def of_validation(key: str, value: str) -> Change:
    return Change(f"{ROLLOUT}.val_kwargs.{key}", value, "answers response", given=SAMPLED)


def of_rows(key: str, value: str, shows: str, to: Any = None, *given: str) -> Change:
    return Change(f"data.{key}", value, shows, to, given)


def alg(key: str, value: str, shows: str, *given: str, **more: Any) -> Change:
    return Change(f"{ALGORITHM}.{key}", value, shows, given=given, **more)


ADVANTAGES = (
    alg("adv_estimator_kwargs.f_norm", "2", "column advantages", "algorithm.adv_estimator=gpg"),
    alg("gamma", "0.5", "column returns", *NO_KL, "algorithm.lam=1.0", base="ppo"),
    alg("lam", "0", "column returns", *NO_KL, base="ppo"),
    alg("bootstrap_truncated", "true", "column returns", *NO_KL, "algorithm.lam=0", base="ppo"),
    alg("norm_adv_by_std_in_grpo", "false", "column advantages"),
    alg("adv_epsilon", "1.0", "column advantages"),
    alg("allow_group_of_one", "true", "error", f"{ROLLOUT}.n=1", to=""),
    alg("scale_rewards", "batch", "column advantages"),
    alg("advantage_clip", "0.5", "column advantages"),
    alg("mask_truncated", "true", "column loss_mask"),
    alg("mask_max_turns", "true", "column loss_mask", *ONE_TURN),
    alg("mask_long_errors", "5", "column loss_mask"),
    alg("mask_type", "all", "column advantages", "algorithm.mask_truncated=true"),
    alg("whiten_rewards", "true", "column advantages", *REINFORCE),
    alg("difficulty_weight", "[0.5, 2.0]", "column advantages"),
    *of_normalization("reward_norm"),
    *of_normalization("adv_norm"),
)
KL_IN_REWARD = (
    alg("use_kl_in_reward", "false", "column token_level_rewards", *MOVING, base="ppo"),
    alg("kl_penalty", "abs", "column token_level_rewards", *MOVING, base="ppo"),
    alg("kl_ctrl.kl_coef", "0.5", "metric actor/kl_coef", base="ppo", to=[0.5]),
    alg(
        "kl_ctrl.type",
        "adaptive",
        "metric actor/kl_coef",
        *THREE,
        base="ppo",
        also=ADAPTIVE[1:],
    ),
    alg(
        "kl_ctrl.target_kl",
        "1e-9",
        "metric actor/kl_coef",
        *THREE,
        "algorithm.kl_penalty=abs",
        *ADAPTIVE,
        base="ppo",
    ),
    alg("kl_ctrl.horizon", "50", "metric actor/kl_coef", *THREE, *ADAPTIVE, base="ppo"),
    alg(
        "kl_ctrl.mean",
        "sequence",
        "metric actor/reward_kl_penalty",
        *MOVING,
        *ADAPTIVE,
        base="ppo",
    ),
)
OFF_POLICY = (
    alg("recompute_old_log_probs", "false", "column old_log_probs", *BFLOAT16),
    Change(f"{CORRECTION}.rollout_is", "sequence", "column rollout_is_weights", given=WEIGHED),
    Change(f"{CORRECTION}.rollout_is_threshold", "0.5", "column rollout_is_weights", given=WEIGHED),
    Change(
        f"{CORRECTION}.rollout_is_threshold",
        "[1.0,100]",
        "column rollout_is_weights",
        given=WEIGHED,
    ),
    Change(
        f"{CORRECTION}.rollout_is_batch_normalize",
        "true",
        "column rollout_is_weights",
        given=WEIGHED,
    ),
    Change(
        f"{CORRECTION}.rollout_rs",
        "token_k2",
        "column loss_mask",
        given=BFLOAT16,
        also=REJECTED[1:],
    ),
    Change(
        f"{CORRECTION}.rollout_rs_threshold",
        "1000",
        "column loss_mask",
        given=(*BFLOAT16, *REJECTED),
    ),
)
FILTERS = (
    alg("filter_groups.metric", "format", "samples response", *FORMAT, base="dapo"),
    alg("filter_groups.when_exhausted", "continue", "error", *FLAT, base="dapo", to=""),
)


def of_actor(key: str, value: str, shows: str, *given: str, **more: Any) -> Change:
    return Change(f"{ACTOR}.{key}", value, shows, given=given, **more)


UPDATES = (
    *of_optimizer("actor", "", "grpo", ACTOR),
    *of_optimizer("critic", "actor", "ppo", "critic"),
    of_actor("policy_loss", "gpg", "metric actor/pg_loss"),
    of_actor("policy_loss_kwargs.tau_pos", "2.0", GOOD, f"{ACTOR}.policy_loss=sapo", keeps=BAD),
    of_actor("prox", "interpolate", "columns", f"{ACTOR}.policy_loss=decoupled"),
    of_actor("loss_agg_mode", "seq-mean-token-mean", "metric actor/grad_norm"),
    of_actor(
        "loss_scale_factor",
        "2.0",
        "metric actor/grad_norm",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    of_actor("clip_ratio", "0.4", GOOD, to=round(-(0.5 + 1.4 + 1.4) / 3, 5)),
    of_actor("clip_ratio_low", "0.4", BAD, to=round((0.6 + 1.5 + 3) / 3, 5), keeps=GOOD),
    of_actor("clip_ratio_high", "0.4", GOOD, to=round(-(0.5 + 1.4 + 1.4) / 3, 5), keeps=BAD),
    of_actor("clip_ratio_c", "5.0", BAD, to=round((0.8 + 1.5 + 5) / 3, 5), keeps=GOOD),
    of_actor("off_policy_mask_threshold", "0.5", FAR, f"{ACTOR}.entropy_coef=0", to=0.0, keeps=BAD),
    of_actor("entropy_coef", "0.1", "metric actor/loss", keeps="metric actor/pg_loss"),
    of_actor("kl_loss_coef", "2.0", "metric actor/loss", *KL_LOSS),
    of_actor("kl_loss_type", "mse", "metric actor/kl_loss", *KL_LOSS),
    Change(
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "40",
        "scoring ref",
        False,
        (f"{ACTOR}.use_kl_loss=true",),
        keeps="learning actor",
    ),
    Change("critic.loss_agg_mode", "seq-mean-token-sum", "metric critic/vf_loss", base="ppo"),
    Change(
        "critic.value_loss",
        "huber",
        "metric critic/vf_loss",
        base="ppo",
        also=("critic.huber_delta=0.1",),
    ),
    Change(
        "critic.huber_delta",
        "0.1",
        "metric critic/vf_loss",
        given=("critic.value_loss=huber",),
        base="ppo",
    ),
    Change(
        "critic.cliprange_value",
        "1e-5",
        "metric critic/vf_clipfrac",
        given=("critic.ppo_epochs=3",),
        base="ppo",
    ),
    Change("trainer.critic_warmup", "1", "updates actor", 1, TWO, "ppo", "updates critic"),
)


def of_rollout(key: str, value: str, shows: str, *given: str, **more: Any) -> Change:
    return Change(f"{ROLLOUT}.{key}", value, shows, given=given, **more)


NO_STOPS = f"{ROLLOUT}.stop=[]"
GENERATION = (
    of_rollout("temperature", "0.3", "metric actor/entropy", base="ppo"),
    of_rollout("top_k", "1", "samples response"),
    of_rollout("top_p", "0.5", "samples response"),
    of_rollout("min_p", "0.999", "samples response"),
    of_rollout("repetition_penalty", "1e6", "samples response", NO_STOPS, f"{ROLLOUT}.top_k=1"),
    of_rollout("stop", "['A','B','C','D','E','F']", "samples response", NO_STOPS),
    of_rollout("num_threads", "3", "engine num_threads", "async.max_staleness=1", to=3),
    of_rollout("batch_invariant", "true", "engine batch_invariant", to=True),
    of_rollout("max_num_seqs", "8", "decode_rows", NO_STOPS, to=8),
    of_rollout("val_kwargs.greedy", "false", "answers kind", *SAMPLED, to=["sampled"] * 24),
    of_rollout("val_kwargs.n", "4", "answers kind", *ANSWERED),
    of_validation("temperature", "0.001"),
    of_validation("top_p", "0.001"),
    of_validation("top_k", "1"),
    Change("async.max_concurrent_rollouts", "1", "groups_at_once", 1, (NO_STOPS,)),
)
DATA = (
    of_rows("prompt_key", "other_prompt", "rows prompt_text", [f"what is {i}?" for i in range(12)]),
    of_rows("answer_key", "other_answer", "rows ground_truth", [f"x{i}" for i in range(12)]),
    of_rows("domain_key", "other_source", "rows domain", ["elsewhere"] * 12),
    of_rows(
        "tag_key", "other_answer", "held_out_rows tag", [f"x{i}" for i in range(6)], *VALIDATED
    ),
    of_rows("prompt_format", "chat", "rows prompt_text", None, CHAT[1]),
    of_rows("prompt_template", "'Q:{prompt}'", "rows prompt_text"),
    of_rows("system_prompt", "be brief", "rows prompt_text", None, *CHAT),
    of_rows("tools_key", "other_tools", "rows prompt_text", None, *CHAT),
    of_rows("enable_thinking", "true", "rows prompt_text", None, *CHAT),
    of_rows("apply_chat_template_kwargs", "{date_string: today}", "rows prompt_text", None, *CHAT),
    of_rows("filter_overlong_prompts", "false", "refused_rows", None, *LONG),
    of_rows("truncation", "left", "rows prompt_text", None, *UNFILTERED, "data.truncation=right"),
    of_rows("truncation", "middle", "rows prompt_text", None, *UNFILTERED, "data.truncation=right"),
    of_rows("bad_rows", "skip", "refused_rows", "", "data.train_files={lab}/bad.jsonl"),
    of_rows("train_max_samples", "5", "rows ground_truth", ["1", "3", "5", "7", "9"]),
    of_rows("val_max_samples", "2", "held_out_rows ground_truth", ["1", "3"], *VALIDATED),
    of_rows("shuffle", "false", "samples prompt"),
    of_rows("sampler", "{lab}/sampler.py:backwards", "samples prompt"),
    of_rows("seed", "7", "samples prompt"),
    Change("data.response_key", "other_response", "samples response", base="sft"),
    Change(
        "data.messages_key",
        "other_messages",
        "rows prompt_text",
        given=("data.train_files={lab}/talks.jsonl", "data.max_prompt_length=64"),
        base="sft",
    ),
)

LORA = (f"{MODEL}.lora_rank=4",)
MODELS = (
    Change(f"{MODEL}.init", "random", "policy model.embed_tokens.weight"),
    Change(f"{MODEL}.enable_gradient_checkpointing", "true", "layer_calls"),
    Change(f"{MODEL}.lora_rank", "3", "policy trained"),
    Change(f"{MODEL}.lora_alpha", "32", "metric actor/grad_norm", given=LORA),
    Change(f"{MODEL}.target_modules", "[q_proj]", "policy trained", given=LORA),
)


def of_trainer(key: str, value: str, shows: str, to: Any = None, *given: str) -> Change:
    return Change(f"trainer.{key}", value, shows, to, given)


CHECKPOINTS = "files checkpoints/step-*"
TRAINER = (
    of_trainer("project_name", "mine", "run_dir"),
    of_trainer("experiment_name", "mine", "run_dir"),
    of_trainer("val_before_train", "true", "validated", [0], *VALIDATED),
    of_trainer("test_freq_epochs", "1", "validated", [3, 4], *FOUR, *VALIDATED),
    of_trainer("save_freq_epochs", "1", CHECKPOINTS, ["step-000003", "step-000004"], *FOUR),
    of_trainer("keep_best", "true", CHECKPOINTS, ["step-000001", "step-000003"], *SAVING),
    of_trainer("keep_best_metric", "val_correct/all/mean@8", CHECKPOINTS, None, *BEST),
    of_trainer("save_groups", "none", "files tokens/*.safetensors", []),
    of_trainer(
        "save_groups_last",
        "1",
        "files tokens/*.safetensors",
        ["000002.safetensors"],
        *TWO,
        "trainer.save_groups=last_k",
    ),
    of_trainer("seed", "2", "samples response"),
    Change(
        "trust.canary_freq",
        "2",
        "metric canary/mean_abs",
        given=(*TWO, f"{MODEL}.dtype=bfloat16"),
    ),
    Change("dag.enable_perf", "true", "metric perf/actor_train"),
    Change("reward.overlong.buffer_tokens", "4", "samples score"),
    Change(
        "reward.overlong.factor",
        "0.5",
        "samples score",
        given=("reward.overlong.buffer_tokens=4",),
    ),
    Change("custom_reward_function.name", "constant", "samples score", [0.5] * 16),
)
CHANGES = (
    *ADVANTAGES,
    *KL_IN_REWARD,
    *OFF_POLICY,
    *FILTERS,
    *UPDATES,
    *GENERATION,
    *DATA,
    *MODELS,
    *TRAINER,
)
QUICK = ("run_dir", "rows", "held_out_rows", "refused_rows", "policy", "engine", "loss")
"""Outcomes that no run is made for."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            change,
            id=f"{change.key}={change.value}",
            marks=[] if change.shows.split()[0] in QUICK else [pytest.mark.slow],
        )
        for change in CHANGES
    ],
)
def test_a_change_shows(change, lab):
    changed = (*change.given, f"{change.key}={change.value}", *change.also)
    before = lab.look(change.base, change.given, change.shows)
    after = lab.look(change.base, changed, change.shows)
    assert not same(before, after)
    assert change.to is None or same(after, change.to)

    if change.keeps:
        kept = lab.look(change.base, change.given, change.keeps)
        assert same(lab.look(change.base, changed, change.keeps), kept)
