"""Settles what follows from config and pipeline: the plan, the use of the data, what workers need,
and sampling of training and validation prompts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distflow.config import Config
from distflow.config.derived_settings import (
    frozen_models,
    is_one_process,
    is_own_reference,
    is_rl,
    is_sharded,
    own_setting,
    response_limit,
    validates,
)
from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.launch.configured_models import check_layouts, model_sizes, prediction
from distflow.launch.devices import choose_device, refuse_offload_here
from distflow.launch.engines import make_factories
from distflow.launch.plan_data import data_plan
from distflow.launch.rollout_engines import shares_weights
from distflow.launch.threads import check_cores
from distflow.planning.assign_ranks import plan_devices
from distflow.planning.model_memory import is_judge
from distflow.planning.plan import Plan, RankPlan
from distflow.rollout.engine import SamplingParams
from distflow.runtime.spec import Factory, Offloads, WorkerNeeds
from distflow.scheduling.data_plan import DataPlan


@dataclass(frozen=True)
class RunSettings:
    """What config and pipeline settle of a run; see `Spec`."""

    plan: Plan
    data: DataPlan
    needs: WorkerNeeds
    offloads: Mapping[str, Offloads]
    factories: Mapping[str, Factory]
    predicted: Mapping[str, Any]


def settle_run(config: Config, pipeline: BoundPipeline, num_rows: Mapping[str, int]) -> RunSettings:
    """num_rows: by domain, as for `data_plan`. Raises UserError with the key."""
    data = data_plan(config, num_rows)
    plan = make_plan(config, pipeline)
    url = config.actor_rollout_ref.rollout.url

    num_rollout = sum("rollout" in rank.engines for rank in plan.ranks)
    if url and num_rollout > 1:
        raise UserError(
            f"actor_rollout_ref.rollout.url={','.join(url)}: each of {num_rollout} rollout workers "
            "would load weights into that server: let one worker generate with all of them "
            "(trainer.allocation), or remove the key, so that each starts its own"
        )

    return RunSettings(
        plan,
        data,
        worker_needs(config, plan.ranks),
        _offloads(config, pipeline, plan),
        make_factories(config, pipeline.engines, pipeline.services, data.total_steps),
        prediction(config, pipeline, plan, sum(num_rows.values())),
    )


def make_plan(config: Config, pipeline: BoundPipeline) -> Plan:
    """Which worker runs which nodes. Raises UserError with the key."""
    device = choose_device(config)
    refuse_offload_here(config, device)
    plan = plan_devices(
        pipeline, config, str(device), partial(model_sizes, config, pipeline.engines)
    )
    check_layouts(config, plan.layouts)
    if config.trainer.launcher == "local" and not is_one_process(config):
        check_cores(plan)
    return plan


def sampling_params(config: Config, domain: str = "") -> SamplingParams:
    """Sampling parameters for training prompts, with the domain's own settings."""
    longest = response_limit(config, domain)
    if not is_rl(config):
        return SamplingParams(longest)

    own = partial(own_setting, config, domain, config.actor_rollout_ref.rollout)
    correction = config.algorithm.rollout_correction
    return SamplingParams(
        longest,
        num_top=correction.score_centering_top_k if correction.score_centering else 0,
        stop=tuple(own("stop")),
        **{
            name: own(name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        },
    )


def validation_params(
    config: Config, sampling: SamplingParams
) -> tuple[SamplingParams | None, SamplingParams | None, int]:
    """Parameters for validation prompts from `rollout.val_kwargs`: greedy, sampled, and the number
    of samples."""
    if not validates(config) or not is_rl(config):
        return None, None, 0

    settings = config.actor_rollout_ref.rollout.val_kwargs
    base = SamplingParams(sampling.max_tokens, stop=sampling.stop)
    greedy = replace(base, greedy=True) if settings.greedy else None

    sampled = None
    if settings.n:
        sampled = replace(
            base,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
        )

    return greedy, sampled, settings.n


def worker_needs(config: Config, ranks: Sequence[RankPlan]) -> WorkerNeeds:
    """Raises UserError for a role that no workers of the plan have exclusively."""
    _check_worker_roles(config.trainer.worker_roles, ranks)
    roles = {}
    for role, own in config.trainer.worker_roles.items():
        roles[role] = _needs_of(config, own)
    return replace(_needs_of(config, {}), roles=roles)


def _check_worker_roles(named: Collection[str], ranks: Sequence[RankPlan]) -> None:
    """Raises UserError for a role without workers of its own. named: in `trainer.worker_roles`."""
    of_ranks = []
    for rank in ranks:
        if rank.training_nodes:
            roles = {*rank.engines, "training"} - {"rollout"}
        else:
            roles = {"rollout"}
        of_ranks.append(roles)

    everyone = ", ".join(sorted(set().union(*of_ranks)))
    for role in named:
        if sum(role in roles for roles in of_ranks) in (0, len(ranks)):
            raise UserError(
                f"trainer.worker_roles: {role} has no workers of its own in the plan, whose roles "
                f"are {everyone}: separate them with '+' in trainer.allocation, or set "
                "trainer.worker_cpus, worker_memory_mb and worker_env for all"
            )

    for roles in of_ranks:
        shared = sorted(roles & {*named} - {"training"})
        if len(shared) > 1:
            raise UserError(
                f"trainer.worker_roles: {' and '.join(shared)} share a worker: name one of them"
            )


def _needs_of(config: Config, own: Mapping[str, Any]) -> WorkerNeeds:
    """own: those of the settings of all workers that a role has otherwise."""
    trainer = config.trainer
    env = {**trainer.worker_env, **own.get("worker_env", {})}
    return WorkerNeeds(
        own.get("worker_cpus", trainer.worker_cpus),
        own.get("worker_memory_mb", trainer.worker_memory_mb),
        {name: str(value) for name, value in env.items()},
    )


def _offloads(config: Config, pipeline: BoundPipeline, plan: Plan) -> dict[str, Offloads]:
    """Offloading by role. What is always on the host is not moved. Raises UserError for weights
    that another engine uses."""
    settings = {
        "actor": config.actor_rollout_ref.actor.fsdp_config,
        "critic": config.critic.fsdp_config,
    }

    offloads = {}
    for role in sorted(pipeline.engines & settings.keys()):
        offload = settings[role]
        if offload.param_offload or offload.optimizer_offload:
            offloads[role] = Offloads(
                weights=offload.param_offload, moments=offload.optimizer_offload
            )

    for role, model in frozen_models(config).items():
        is_whole = is_judge(config, role) or not is_sharded(config)
        if role in pipeline.engines and model.param_offload and is_whole:
            offloads[role] = Offloads(weights=True, moments=False)

    if "actor" in offloads and offloads["actor"].weights:
        _check_offloaded_actor(config, plan)
    return offloads


def _check_offloaded_actor(config: Config, plan: Plan) -> None:
    """Raises UserError if another engine computes with the actor's weights."""
    beside = set[str]()
    for rank in plan.ranks:
        if "actor" in rank.engines:
            beside |= {*rank.engines}

    why = ""
    if "rollout" in beside and shares_weights(config):
        why = (
            "the rollout engine computes with the same float32 weights: model.dtype=bfloat16 gives "
            "it its own"
        )
    elif "ref" in beside and is_own_reference(config):
        why = "the reference computes with the same weights, its adapter switched off"

    if why:
        raise UserError(
            f"actor_rollout_ref.actor.fsdp_config.param_offload=true: {why}; or remove it"
        )
