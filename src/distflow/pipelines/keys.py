"""Which config keys are taken outside of nodes: by engines, loaders and the run itself, where those are in use.

A key that nothing takes is refused where it was set. Two pairs are exempt, since one is what the other falls back on
and presets set it: `trainer.total_epochs` beside `total_training_steps`, `warmup_ratio` beside `lr_warmup_steps`.
"""

from pathlib import Path

from distflow.config import Config
from distflow.config.actor import OptimConfig
from distflow.config.program import CUSTOM, find_estimator, is_rl, program_name
from distflow.config.schema import schema_keys
from distflow.graph import Program
from distflow.pipelines.engines import rollout_settings, shares_weights

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
GROUPS = ("trainer", "dag", "data", "trust", MODEL)
"""Groups of which every program takes all, but for what `_idle` names."""


def taken_by_engines(program: Program, config: Config) -> set[str]:
    """Keys that something other than a node's function uses in this program."""
    taken = {*GROUPS, f"{ACTOR}.strategy", f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.max_grad_norm"}
    taken |= {f"{ACTOR}.optim", "async.max_concurrent_rollouts"}
    if "rollout" in program.engines:
        taken |= {ROLLOUT, f"{ACTOR}.model_update_frequency", "async"}
        # A group may be dropped for want of verdicts too, and is replaced within the same bounds.
        taken |= {"algorithm.filter_groups.max_num_gen_batches", "algorithm.filter_groups.when_exhausted"}
    if "ref" in program.engines:
        taken.add("actor_rollout_ref.ref")
    if "critic" in program.engines:
        taken.add("critic")
    if any(not node.contract.is_async for node in program.experience):
        taken.add("reward.timeout_s")
    if program_name(config) != CUSTOM and is_rl(config):
        taken.add("algorithm.workflow_type")
    if _permits_group_of_one(config):
        taken.add("algorithm.allow_group_of_one")
    return _without(taken, _idle(program, config))


def _idle(program: Program, config: Config) -> set[str]:
    """Keys of groups in use that do nothing beside the values of others."""
    data, trainer = config.data, config.trainer
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    idle = {f"{ACTOR}.optim.{name}" for name in _idle_of_optimizer(config.actor_rollout_ref.actor.optim)}
    idle |= {f"critic.optim.{name}" for name in _idle_of_optimizer(config.critic.optim)}
    if is_rl(config):
        idle.add("data.response_key")
    if not data.shuffle:
        idle.add("data.seed")
    if not data.val_files:
        idle.add(f"{ROLLOUT}.val_kwargs")
    if not data.val_files and trainer.test_freq > 0:
        idle.add("trainer.test_freq")
    if rollout.val_kwargs.n == 0:
        idle |= {f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k")}
    if "max_num_seqs" not in rollout_settings(config):
        idle.add(f"{ROLLOUT}.max_num_seqs")
    if model.path is None or model.path.startswith("builtin:") or Path(model.path).expanduser().is_dir():
        idle.add(f"{MODEL}.revision")
    if trainer.save_freq <= 0:
        idle.add("trainer.keep_last")
    if "rollout" not in program.engines:
        idle.add("trust.canary_freq")
    if shares_weights(config) and config.trust.canary_freq > 0:
        idle.add("trust.canary_freq")  # an engine on the trainer's own weights is compared once, at the start
    if "reward" not in program.takes:
        idle.add("trust.certify_rewards")
    return idle


def _idle_of_optimizer(optim: OptimConfig) -> set[str]:
    idle = {"betas", "eps"} if optim.optimizer == "sgd" else set()
    return idle | ({"warmup_ratio", "lr_warmup_steps"} if optim.scheduler == "constant" else set())


def _permits_group_of_one(config: Config) -> bool:
    estimator = find_estimator(config)
    return is_rl(config) and bool(estimator and estimator.needs_group) and config.actor_rollout_ref.rollout.n == 1


def _without(taken: set[str], idle: set[str]) -> set[str]:
    """The keys below `taken` that are not below `idle`, each by itself."""
    return {key for key in schema_keys() if _is_below(key, taken) and not _is_below(key, idle)}


def _is_below(key: str, groups: set[str]) -> bool:
    return any(key == group or key.startswith(f"{group}.") for group in groups)
