"""The built-in names that a config may choose from: one table that needs no torch, tested against the registries."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: what it is, and what it cannot do without."""

    description: str
    needs_group: bool = False
    needs_critic: bool = False


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss: what it is, and which of the actor's clips it takes."""

    description: str
    clips: bool = False
    dual_clips: bool = False


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator("generalised advantage estimation over a critic's values", needs_critic=True),
    "grpo": Estimator("score less the group's mean, over its standard deviation", needs_group=True),
    "rloo": Estimator("score less the mean of the group's other samples", needs_group=True),
    "reinforce": Estimator("discounted reward-to-go without a baseline"),
    "reinforce_plus_plus": Estimator("discounted reward-to-go, whitened over the global batch"),
    "reinforce_plus_plus_baseline": Estimator(
        "score less the group's mean, whitened over the global batch", needs_group=True
    ),
    "remax": Estimator("score less that of a greedy sample of the same prompt"),
    "opo": Estimator("score less the length-weighted mean of the group", needs_group=True),
    "cpgd": Estimator("as grpo, under its name there", needs_group=True),
    "gspo": Estimator("as grpo, under its name there", needs_group=True),
    "gpg": Estimator(
        "score less the group's mean, scaled up by the share of samples without a reward", needs_group=True
    ),
    "grpo_passk": Estimator("only the group's best sample, by its lead over the second best", needs_group=True),
}

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss("PPO's clipped ratio with dual clip and clip-higher", clips=True, dual_clips=True),
    "decoupled": PolicyLoss("PPO around a proximal policy, with capped behaviour weights", clips=True, dual_clips=True),
    "gspo": PolicyLoss("one clipped ratio a sequence", clips=True),
    "cpgd": PolicyLoss("policy gradient with a clipped log-prob in place of a ratio", clips=True),
    "gpg": PolicyLoss("plain policy gradient"),
    "cispo": PolicyLoss("clipped importance weights; no token loses its gradient", clips=True),
    "topr": PolicyLoss("tapered off-policy REINFORCE"),
    "sapo": PolicyLoss("a soft gate in place of the clip"),
    "gmpo": PolicyLoss("geometric mean of clipped token ratios", clips=True),
}

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

_SAMPLED_KL_TYPES = ("kl", "abs", "mse", "low_var_kl")
KL_TYPES = (*_SAMPLED_KL_TYPES, "full", *(f"{name}+" for name in _SAMPLED_KL_TYPES))

REWARDS: dict[str, str] = {
    "math": "the last boxed answer (or number) equals the ground truth, by math-verify",
    "exact_match": "the answer's text equals the ground truth",
    "format": "the response has the wanted form",
    "custom": "the function of custom_reward_function",
}

PIPELINES: dict[str, str] = {
    "grpo": "group-relative policy optimisation: no critic",
    "ppo": "actor and critic with GAE",
    "dapo": "GRPO with dynamic sampling",
    "sft": "supervised fine-tuning on given responses",
}

TRAIN_ENGINES = ("torch", "fsdp", "megatron")
ROLLOUT_ENGINES = ("embedded", "hf", "vllm", "sglang")
OPTIMIZERS = ("adamw", "adamw_8bit", "sgd")
SCHEDULERS = ("constant", "constant_with_warmup", "linear_with_warmup", "cosine_with_warmup")
TRACKERS = ("console", "tensorboard", "wandb")
DTYPES = ("bfloat16", "float32")
