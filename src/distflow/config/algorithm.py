"""Keys of `algorithm`: advantages, KL in the reward, corrections and filters."""

from dataclasses import dataclass

from distflow.config.keys import group, key
from distflow.config.names import ESTIMATORS, KL_TYPES


@dataclass(frozen=True)
class KLControlConfig:
    """The coefficient of the KL penalty in the reward."""

    type: str = key("fixed", "whether the coefficient stays or follows a target", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "coefficient of the penalty; where it starts if adaptive", minimum=0)
    target_kl: float | None = key(None, "KL per token that the adaptive controller aims at", above=0)
    horizon: int | None = key(None, "samples over which the adaptive controller closes the gap", minimum=1)


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance weights against the mismatch of rollout engine and trainer."""

    level: str | None = key(
        None, "what one weight covers; null is off (off-policy correction)", choices=("token", "sequence", "geometric")
    )
    mode: str = key(
        "truncate",
        "truncate: weights above the cap become the cap; mask: tokens outside the band are left out",
        choices=("truncate", "mask"),
    )
    cap: float = key(2.0, "largest weight", above=0)
    floor: float | None = key(None, "low end of the band in mask mode (IcePop); null is no low end", above=0)


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling: groups whose samples are all as right as each other are dropped and replaced."""

    enable: bool = key(False, "drop groups without a signal and refill the batch")
    metric: str = key(
        "acc",
        "what must differ in a group: acc, the verifier's verdict; score (seq_reward), penalties too; or the name of a "
        "reward function",
    )
    max_num_gen_batches: int = key(10, "at most so many batches of prompts are tried for one step", minimum=1)
    when_exhausted: str = key(
        "error", "when those are used up: stop, or go on with the groups there are", choices=("error", "continue")
    )


@dataclass(frozen=True)
class AlgorithmConfig:
    """How rewards become advantages."""

    adv_estimator: str = key("grpo", "advantage estimator", choices=tuple(ESTIMATORS), open_names=True)
    adv_estimator_kwargs: dict[str, object] = key({}, "options of the chosen estimator by name")
    workflow_type: str = key(
        "DEFAULT",
        "selects the program where no preset and no dag key does; DEFAULT goes by adv_estimator",
        choices=("DEFAULT", "DAPO", "EMBODIED"),
        later=("EMBODIED",),
    )
    gamma: float = key(1.0, "discount from token to token", minimum=0, maximum=1)
    lam: float = key(0.95, "lambda of GAE", minimum=0, maximum=1)
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the group's standard deviation; false is Dr. GRPO")
    adv_epsilon: float = key(1e-6, "added to that standard deviation", above=0)
    allow_group_of_one: bool = key(False, "accept rollout.n=1 with an estimator that compares the samples of a group")
    bootstrap_truncated: bool = key(
        False, "GAE continues a truncated response with the critic's last value, not with 0"
    )
    use_kl_in_reward: bool = key(False, "subtract the KL to the reference from the rewards of tokens")
    kl_penalty: str = key("kl", "estimator of the KL in the reward", choices=KL_TYPES, later=("full",))
    kl_ctrl: KLControlConfig = group(KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = group(RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig)
