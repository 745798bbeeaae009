"""Where a config that speaks verl differs from what verl would train."""

from collections.abc import Iterable

from distflow.config.compose.loaded import Loaded
from distflow.config.derived_settings import is_rl, may_have_critic
from distflow.config.keys.schema import schema_keys
from distflow.config.migration.tables import find_names
from distflow.config.serialize import flatten, show_value

# What bounds memory, what names the run, and what comes to the same: nothing is trained otherwise.
_OF_NO_WEIGHT = (
    "trainer.project_name",
    "trainer.experiment_name",
    "algorithm.allow_group_of_one",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
)


def verl_preset(loaded: Loaded, accepted: Iterable[str]) -> str | None:
    """The preset that has verl's defaults, where keys of verl were accepted on one that has not."""
    speaks_verl = any("verl" in find_names(key) for key in accepted)
    if not speaks_verl or not is_rl(loaded.config) or any(map(is_verls, loaded.origins.values())):
        return None
    return "verl_ppo" if may_have_critic(loaded.config) else "verl_grpo"


def differing(loaded: Loaded, theirs: Loaded) -> list[tuple[str, str, str]]:
    """The keys that a preset of verl sets, that no user set here, and that differ: key, value here, value there."""
    here, there, infos = flatten(loaded.config), flatten(theirs.config), schema_keys()
    unused = () if may_have_critic(loaded.config) else ("algorithm.lam",)
    return [
        (key, show_value(infos[key], here[key]), show_value(infos[key], there[key]))
        for key in theirs.origins
        if key in infos and here[key] != there[key] and key not in (*_OF_NO_WEIGHT, *unused)
        if loaded.origin(key).startswith(("default", "presets/"))
    ]


def is_verls(origin: str) -> bool:
    """Whether a preset with verl's defaults set a key."""
    return origin.startswith("presets/verl_")
