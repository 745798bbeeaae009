"""How a run goes, from the config: what the worker is told besides its program, its data and its parts."""

from dataclasses import replace

from distflow.config import Config
from distflow.config.by_domain import validates
from distflow.config.program import is_sharded
from distflow.config.watch import peek
from distflow.graph import NodeRole, Program
from distflow.pipelines.factories import shares_weights
from distflow.planning.plan import Plan
from distflow.runtime.blame import is_ours
from distflow.runtime.residence import Offloads
from distflow.runtime.spec import RunOptions, WorkerNeeds


def run_options(config: Config, program: Program, plan: Plan) -> RunOptions:
    """What means nothing in this run is looked at without being read, so that it is refused where it was set."""
    trainer, trust = config.trainer, config.trust
    goes_elsewhere = any("rollout" in rank.engines and not rank.learning for rank in plan.ranks)
    has_val = validates(config)
    certify = trust.certify_rewards if "judge" in program.services else False
    return RunOptions(
        seed=trainer.seed,
        update_frequency=config.actor_rollout_ref.actor.model_update_frequency if "rollout" in program.engines else 1,
        weight_update_mode=(config if goes_elsewhere else peek(config)).actor_rollout_ref.actor.weight_update_mode,
        val_before_train=trainer.val_before_train,
        # Off is always understood; a frequency means something only where there is something to validate on.
        test_freq=trainer.test_freq if has_val or peek(trainer).test_freq <= 0 else 0,
        save_freq=trainer.save_freq,
        keep_last=trainer.keep_last if trainer.save_freq > 0 else None,
        keep_best=trainer.keep_best_metric if trainer.keep_best else None,
        save_groups=trainer.save_groups,
        save_groups_last=trainer.save_groups_last,
        logger=trainer.logger,
        launcher=trainer.launcher,
        resume=trainer.resume_mode,
        run_dir=trainer.run_dir,
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        enable_perf=config.dag.enable_perf,
        worker=_worker_needs(config if trainer.launcher == "ray" else peek(config), _is_judged(program)),
        max_held_mb=(trainer if trainer.launcher == "ray" else peek(trainer)).max_held_mb,
        peers_timeout_s=(trainer if trainer.launcher == "ray" else peek(trainer)).peers_timeout_s,
        timeout_s=config.reward.timeout_s if _has_deadline(program) else peek(config).reward.timeout_s,
        engine_timeout_s=(config if "rollout" in program.engines else peek(config)).actor_rollout_ref.rollout.timeout_s,
        canary_freq=_canary_freq(config, program),
        audit_freq=trust.audit_freq,
        on_mismatch=trust.on_mismatch if "rollout" in program.engines else "warn",
        certify=certify,
        solution_columns=_solution_columns(config) if certify else {},
        max_error_share=(config if _is_judged(program) else peek(config)).reward.max_error_share,
        max_skipped=trust.max_skipped_updates,
        unmoved_after=trust.unmoved_after,
        offloads=_offloads(config, program) if is_sharded(config) else {},
    )


def _solution_columns(config: Config) -> dict[str, tuple[str | None, str]]:
    data = config.data
    found: dict[str, tuple[str | None, str]] = {"": (data.solution_key, data.answer_key)}
    for name, domain in data.domains.items():
        solution = data.solution_key if domain.solution_key is None else domain.solution_key
        found[name] = solution, domain.answer_key or data.answer_key
    return found


def _worker_needs(config: Config, is_judged: bool) -> WorkerNeeds:
    trainer, reward = config.trainer, config.reward
    env = {name: str(value) for name, value in trainer.worker_env.items()}
    needs = WorkerNeeds(trainer.worker_cpus, trainer.worker_memory_mb, env)
    return replace(needs, num_judges=reward.num_actors, judge_cpus=reward.actor_cpus) if is_judged else needs


def _offloads(config: Config, program: Program) -> dict[str, Offloads]:
    """Of what is trained, by role. What stays on the host always is not moved."""
    settings = {"actor": config.actor_rollout_ref.actor.fsdp_config, "critic": config.critic.fsdp_config}
    found = {
        role: Offloads(weights=own.param_offload, moments=own.optimizer_offload)
        for role, own in settings.items()
        if role in program.engines
    }
    return {role: own for role, own in found.items() if own.weights or own.moments}


def _has_deadline(program: Program) -> bool:
    return any(not (node.contract.is_async and is_ours(node)) for node in program.experience)


def _is_judged(program: Program) -> bool:
    return any(node.node_role is NodeRole.REWARD for node in program.experience)


def _canary_freq(config: Config, program: Program) -> int:
    """On shared weights the engine is compared at the start only, so that the number means nothing beyond on or off."""
    if "rollout" not in program.engines:
        return 0
    plain = peek(config).trust.canary_freq
    return 1 if plain > 0 and shares_weights(config) else config.trust.canary_freq
