"""No key is accepted that does nothing: each is changed, and an outcome that is named changes as
its words say."""

from pathlib import Path
from typing import Any

import pytest

from distflow.config import load_config
from distflow.config.keys.schema import schema_keys
from distflow.errors import ConfigError
from tests.e2e.keys import actor, advantages, algorithm, data, model, rollout, trainer
from tests.e2e.keys.case import QUICK_LOOKS, Case, error_of
from tests.e2e.keys.lab import Lab
from tests.user_code import forgotten

CASES: tuple[Case, ...] = (
    *algorithm.CASES,
    *advantages.CASES,
    *actor.CASES,
    *rollout.CASES,
    *data.CASES,
    *model.CASES,
    *trainer.CASES,
)
ELSEWHERE = {
    "actor_rollout_ref.rollout.workflow": "tests/environments/test_training.py",
    "actor_rollout_ref.rollout.workflow_kwargs": "tests/environments/test_training.py",
    "actor_rollout_ref.rollout.agents": "tests/pipelines/test_agents.py",
    "algorithm.agent_rewards": "tests/pipelines/test_agents.py",
    "actor_rollout_ref.model.gguf_file": "tests/models/test_gguf.py",
    "actor_rollout_ref.model.lora_merge": "tests/rollout/servers/test_vllm.py",
    "algorithm.domains": "tests/e2e/test_rlvr.py",
    "algorithm.filter_groups.mean_range": "tests/e2e/test_group_filters.py",
    "algorithm.filter_groups.should_accept": "tests/e2e/test_group_filters.py",
    "algorithm.reward_shift": "tests/pipelines/test_settings_by_domain.py",
    "algorithm.reward_scale": "tests/pipelines/test_settings_by_domain.py",
    "algorithm.reward_clip": "tests/pipelines/test_settings_by_domain.py",
    "algorithm.difficulty_mask": "tests/pipelines/test_settings_by_domain.py",
    "algorithm.length_weight": "tests/pipelines/test_settings_by_domain.py",
    "dag.policies": "tests/e2e/test_two_policies.py",
    "dag.policy": "tests/e2e/test_two_policies.py",
    "reward.limit_penalty.max_turns": "tests/environments/test_training.py",
    "reward.limit_penalty.context": "tests/environments/test_training.py",
    "reward.limit_penalty.length": "tests/environments/test_training.py",
    "reward.retries": "tests/rewards/pool/test_domain_pools.py",
    "reward.backoff_s": "tests/rewards/pool/test_domain_pools.py",
    "reward.domains": "tests/e2e/test_rlvr.py",
    "data.domains": "tests/e2e/test_domains.py",
    "data.image_key": "tests/e2e/test_images.py",
    "embodied_sampling.filter_accuracy": "tests/acting/test_srpo_nodes.py",
    "embodied_sampling.accuracy_lower_bound": "tests/acting/test_srpo_nodes.py",
    "embodied_sampling.accuracy_upper_bound": "tests/acting/test_srpo_nodes.py",
    "embodied_sampling.filter_truncated": "tests/acting/test_srpo_nodes.py",
    "embodied_sampling.oversample_factor": "tests/launch/test_data_sets.py",
    "algorithm.logprob_level": "tests/algorithms/test_objectives.py",
    "algorithm.reward_level": "tests/acting/test_episode_columns.py",
    "algorithm.sample_level": "tests/training/test_forked_samples.py",
    "srpo.embedder": "tests/acting/test_srpo_nodes.py",
    "srpo.eps": "tests/acting/test_srpo_nodes.py",
    "srpo.min_samples": "tests/acting/test_srpo_nodes.py",
    "srpo.max": "tests/acting/test_srpo_nodes.py",
    "srpo.steepness": "tests/acting/test_srpo_nodes.py",
    "srpo.reward_coef": "tests/acting/test_srpo_nodes.py",
    "data.chosen_key": "tests/e2e/test_preference_pairs.py",
    "data.rejected_key": "tests/e2e/test_preference_pairs.py",
    "reward_model.model.path": "tests/e2e/test_reward_model.py",
    "reward_model.weight": "tests/e2e/test_reward_model.py",
    "reward_model.models": "tests/e2e/test_reward_model.py",
    "reward_model.fsdp_config.param_offload": "tests/launch/test_engines.py",
    "data.skip_epochs": "tests/scheduling/test_skips.py",
    "data.solution_key": "tests/e2e/test_solutions.py",
    "data.broken_tests": "tests/e2e/test_solutions.py",
    "cost.gpu_hour": "tests/planning/test_predicted_run.py",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "tests/launch/test_make_spec.py",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "tests/launch/test_make_spec.py",
    "actor_rollout_ref.actor.fsdp_config.offload_policy": "tests/launch/test_engines.py",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "tests/planning/test_assign_ranks.py",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "tests/launch/test_engines.py",
    "critic.fsdp_config.param_offload": "tests/launch/test_make_spec.py",
    "critic.fsdp_config.optimizer_offload": "tests/launch/test_make_spec.py",
    "critic.fsdp_config.offload_policy": "tests/launch/test_engines.py",
    "actor_rollout_ref.actor.weight_update_mode": "tests/cluster/test_supervisor.py",
    "trainer.launcher": "tests/cluster/test_supervisor.py",
    "trainer.nnodes": "tests/planning/test_assign_ranks.py",
    "trainer.n_gpus_per_node": "tests/planning/test_assign_ranks.py",
    "trainer.allocation": "tests/planning/test_assign_ranks.py",
    "trainer.plan_from": "tests/launch/plans/test_measured_run.py",
    "profiler.enable": "tests/e2e/test_profiler.py",
    "profiler.steps": "tests/e2e/test_profiler.py",
    "trainer.devices": "tests/planning/test_assign_ranks.py",
    "trainer.worker_cpus": "tests/cluster/test_nodes.py",
    "reward.num_actors": "tests/cluster/test_reward_actors.py",
    "reward.actor_cpus": "tests/cluster/test_reward_actors.py",
    "trainer.worker_memory_mb": "tests/cluster/test_nodes.py",
    "trainer.worker_env": "tests/cluster/test_nodes.py",
    "trainer.worker_roles": "tests/cluster/test_nodes.py",
    "actor_rollout_ref.rollout.free_cache_engine": "tests/runtime/test_offload.py",
    "actor_rollout_ref.rollout.python": "tests/rollout/servers/test_vllm_command.py",
    "actor_rollout_ref.rollout.engine_kwargs": "tests/rollout/servers/test_vllm_command.py",
    "actor_rollout_ref.rollout.url": "tests/rollout/servers/test_lying_servers.py",
    "actor_rollout_ref.rollout.data_parallel_size": "tests/rollout/servers/test_fleet.py",
    "trainer.max_held_mb": "tests/cluster/test_sizes.py",
    "trainer.peers_timeout_s": "tests/cluster/test_training_worker_faults.py",
    "trainer.max_restarts": "tests/cluster/test_training_worker_faults.py",
    "trainer.slurm.partition": "tests/cluster/test_slurm_launcher.py",
    "trainer.slurm.account": "tests/cluster/test_slurm_launcher.py",
    "trainer.slurm.time": "tests/cluster/test_slurm_launcher.py",
    "trainer.slurm.cpus_per_node": "tests/cluster/test_slurm_launcher.py",
    "trainer.slurm.args": "tests/cluster/test_slurm_launcher.py",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "tests/planning/test_assign_ranks.py",  # noqa: E501
    "dag.generates": "tests/launch/test_make_spec.py",
    "dag.backend_threshold": "tests/planning/test_assign_ranks.py",
    "dag.apportion_strategy": "tests/planning/test_assign_ranks.py",
    "dag.model_sizes": "tests/launch/test_configured_models.py",
    "dag.consider_node_cohesion": "tests/planning/test_assign_ranks.py",
    "dag.consider_node_load": "tests/planning/test_assign_ranks.py",
}
"""Keys whose change is tested in another file."""

LATER: dict[str, Any] = {
    "actor_rollout_ref.model.model_type": "llama",
}
"""Keys of parts that are not there yet: any value but the default is refused."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.key, marks=[] if case.look in QUICK_LOOKS else [pytest.mark.slow]
        )
        for case in CASES
    ],
)
def test_a_change_shows(case: Case, lab: Lab) -> None:
    with forgotten("tests.e2e.keys.losses"):  # what one case imports must not be there in the next
        before = case.look(lab, case.base, case.given)
        after = case.look(lab, case.base, (*case.given, *case.changes))
    try:
        case.check(before, after)
    except AssertionError as error:
        errors = [
            f"{name}: {error_of(side)!r}" for name, side in (("before", before), ("after", after))
        ]
        raise AssertionError(
            f"{case.key} should change: {case.outcome} ({', '.join(errors)})"
        ) from error


def test_every_key_has_its_case() -> None:
    cases = {case.key for case in CASES}
    assert set(schema_keys()) == cases | set(ELSEWHERE) | set(LATER)
    assert all((Path(__file__).parents[2] / path).is_file() for path in ELSEWHERE.values())
    assert set(LATER) == {key for key, info in schema_keys().items() if info.spec.later is True}


@pytest.mark.parametrize("key", LATER)
def test_a_key_of_a_part_that_is_not_there_is_refused(key: str) -> None:
    needed = ["actor_rollout_ref.model.path=x", "data.train_files=x.jsonl"]
    with pytest.raises(ConfigError, match=key):
        load_config("grpo", [*needed, f"{key}={LATER[key]}"])
