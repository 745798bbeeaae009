"""Which config keys are taken outside of nodes: by engines, loaders and the run itself, where those are in use."""

from distflow.config import Config
from distflow.config.program import is_rl
from distflow.graph import Program

ALWAYS = ("trainer", "dag", "data", "actor_rollout_ref.model", "actor_rollout_ref.actor.strategy", "trust")
ACTOR_ENGINE = (
    "actor_rollout_ref.actor.optim",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.max_grad_norm",
)
ANSWERS_ONLY = ("data.response_key",)
PROGRAM_CHOICE = ("algorithm.workflow_type", "algorithm.adv_estimator")


def taken_by_engines(program: Program, config: Config) -> set[str]:
    """Keys that something other than a node's function uses in this program."""
    taken = {*ALWAYS, *ACTOR_ENGINE, *PROGRAM_CHOICE}
    if "rollout" in program.engines:
        taken |= {"actor_rollout_ref.rollout", "actor_rollout_ref.actor.model_update_frequency", "async"}
        taken |= {"algorithm.filter_groups.max_num_gen_batches", "algorithm.filter_groups.when_exhausted"}
    if "ref" in program.engines:
        taken.add("actor_rollout_ref.ref")
    if "critic" in program.engines:
        taken.add("critic")
    if is_rl(config):
        taken.add("algorithm.allow_group_of_one")
    if config.algorithm.rollout_correction.level:
        taken.add("algorithm.rollout_correction")
    return taken
