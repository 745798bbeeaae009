"""Options without an effect: those whose switch is off, and weights of 0 of terms that are on."""

from collections.abc import Iterator
from dataclasses import dataclass

from distflow.config.keys.declare import dotted
from distflow.config.keys.schema import Config, schema_keys
from distflow.config.rules import ACTOR, MODEL, Finding
from distflow.config.serialize import changed_from_default, flatten


@dataclass(frozen=True)
class Switch:
    """A key of a group, and the options of the group that have an effect only if it is on.

    on: its value then (or `also`), or an example where any but null, false and 0 will do. why: else without effect.
    """

    group: str
    name: str
    options: tuple[str, ...]
    on: str
    why: str
    also: str = ""


_OF_A_CLUSTER = (
    *("trainer.nnodes", "trainer.devices", "trainer.worker_roles"),
    *("trainer.worker_cpus", "trainer.worker_memory_mb", "trainer.worker_env", "trainer.max_held_mb"),
    *("dag.apportion_strategy", "dag.model_sizes", "dag.consider_node_cohesion"),
    *("dag.consider_node_load", "reward.num_actors", f"{ACTOR}.weight_update_mode"),
)
_ALIKE = "the local launcher starts identical processes on one machine"
_ENDS_WITH_IT = "the local launcher does not restart processes (the same command resumes); a Slurm job is requeued"
_OF_SLURM = tuple(name for name in schema_keys() if name.startswith("trainer.slurm."))
_OF_SHARDS = (".fsdp_size", ".offload_policy", ".ref.fsdp_config.param_offload")
_FOR_SHARDS = tuple(name for name in schema_keys() if name.endswith(_OF_SHARDS))
_CORRECTION = ("rollout_is_threshold", "rollout_is_batch_normalize")
_SWITCHES = (
    Switch("algorithm", "use_kl_in_reward", ("kl_ctrl.type",), "true", "there is no KL in the reward to control"),
    Switch("algorithm.kl_ctrl", "type", ("target_kl", "horizon", "mean"), "adaptive", "a fixed coefficient ignores it"),
    Switch("algorithm.rollout_correction", "rollout_is", _CORRECTION, "token", "the correction is off"),
    Switch("algorithm.reward_norm", "mean_level", ("mean_leave1out",), "group", "no mean is subtracted"),
    Switch("algorithm.reward_norm", "std_level", ("std_unbiased", "eps"), "group", "it does not divide by a deviation"),
    Switch("algorithm.adv_norm", "mean_level", ("mean_leave1out",), "group", "no mean is subtracted"),
    Switch("algorithm.adv_norm", "std_level", ("std_unbiased", "eps"), "group", "it does not divide by a deviation"),
    Switch(ACTOR, "loss_agg_mode", ("loss_scale_factor",), "seq-mean-token-sum-norm", "no other mode uses it"),
    Switch("critic", "value_loss", ("huber_delta",), "huber", "the squared error has no bound"),
    Switch(MODEL, "lora_rank", ("lora_alpha", "target_modules"), "16", "there are no adapters"),
    Switch("reward.overlong", "buffer_tokens", ("factor",), "1024", "the penalty has no zone"),
    Switch("reward", "num_actors", ("actor_cpus",), "1", "there are no reward actors"),
    Switch("trainer", "keep_best", ("keep_best_metric",), "true", "no best checkpoint is kept"),
    Switch("trainer", "save_groups", ("save_groups_last",), "last_k", "other values do not count steps"),
    Switch("", f"{ACTOR}.strategy", _FOR_SHARDS, "fsdp", "each rank has whole weights"),
    Switch("", "trainer.launcher", _OF_A_CLUSTER, "ray", _ALIKE, also="slurm"),
    Switch("", "trainer.launcher", ("trainer.max_restarts",), "ray", _ENDS_WITH_IT, also="slurm"),
    Switch("", "trainer.launcher", _OF_SLURM, "slurm", "there is no Slurm job", also="ray"),
)


def unused_options(config: Config) -> Iterator[Finding]:
    """Every option that is set has an effect."""
    values, keys = flatten(config), schema_keys()
    for switch in _SWITCHES:
        key = dotted(switch.group, switch.name)
        has_names = isinstance(keys[key].default, str)
        if not (values[key] in (switch.on, switch.also) if has_names else values[key]):
            options = (dotted(switch.group, option) for option in switch.options)
            for option in changed_from_default(values, options):
                yield Finding((option, key), switch.why, f"set {key}={switch.on}, or remove it")


_TERMS = (
    ("algorithm.use_kl_in_reward", "false", "algorithm.kl_ctrl.kl_coef", "0.001"),
    (f"{ACTOR}.use_kl_loss", "false", f"{ACTOR}.kl_loss_coef", "0.001"),
    ("reward.overlong.buffer_tokens", "0", "reward.overlong.factor", "1.0"),
)
"""(switch of a term, its value for off, weight of the term, an example of that)."""


def zero_weights(config: Config) -> Iterator[Finding]:
    """A term that is on has a weight."""
    values = flatten(config)
    for switch, off, weight, example in _TERMS:
        if values[switch] and values[weight] == 0:
            yield Finding(
                (weight, switch), "the term is on but has the weight 0", f"set it to {example}, or {switch}={off}"
            )


RULES = (unused_options, zero_weights)
