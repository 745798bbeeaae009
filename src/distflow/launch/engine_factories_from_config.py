"""Makes factories of engines and services from the config. The config is read once, here; a factory
holds plain values and module-level functions, so that it can be sent to the worker that builds the
part."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import signature
from typing import Any, Literal, cast

import torch

from distflow.builtin_names import ROLLOUT_ENGINES, TRAIN_ENGINES
from distflow.config import Config
from distflow.config.derived_settings import (
    agent_temperatures,
    config_of_policy,
    is_rl,
    is_sharded,
    optimizer_steps,
    policies_of_agents,
    response_limit,
    temperatures,
    trained_policies,
)
from distflow.config.keys.reward import scoring_models
from distflow.errors import UserError, blaming
from distflow.import_target import load
from distflow.launch import build_engines_on_worker as on_worker
from distflow.launch import configured_models
from distflow.launch.device_and_threads import choose_device, choose_dtype, threads_of
from distflow.models.cpu_kernels import build as native
from distflow.planning.model_memory import shares_storage
from distflow.rewards.judge_prompt_and_cache import judge_template
from distflow.rewards.pool.domain_pools import RewardSettings
from distflow.rewards.router import Overlong, RewardRouter
from distflow.rollout.servers.http_engine import HttpEngine
from distflow.runtime.judge_engine import ReplyStore
from distflow.runtime.spec import Factory
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import ScorerOptions

_AT_ONCE = {"kv_on_update", "num_threads"}


def make_factories(
    config: Config, engines: Collection[str], services: Collection[str], steps: int
) -> dict[str, Factory]:
    """Factories of these and of their parts. steps: training steps of the whole run. Raises
    UserError for an engine without a configured model."""
    factories: dict[str, Factory] = {
        "policy": partial(
            on_worker.build_policy,
            source=configured_models.policy_source(config),
            adapt=configured_models.policy_adapter(config),
            spread=_spread(config, "actor"),
        ),
        "tokenizer": partial(
            on_worker.build_tokenizer, load=configured_models.tokenizer_loader(config)
        ),
        "stop_token_ids": on_worker.build_stop_token_ids,
    }
    if "actor" in engines:
        factories["actor"] = partial(
            on_worker.build_actor, trainer=_trainer(config, "actor", steps)
        )
    if "critic" in engines:
        factories["critic"] = partial(
            on_worker.build_critic,
            source=configured_models.critic_source(config),
            spread=_spread(config, "critic"),
            trainer=_trainer(config, "critic", steps),
        )
    if "ref" in engines:
        settings = config.actor_rollout_ref
        options = _scorer_options(
            config,
            settings.ref.log_prob_max_token_len_per_gpu or settings.actor.ppo_max_token_len_per_gpu,
        )
        if settings.model.lora_rank:
            factories["ref"] = partial(on_worker.build_adapted_reference, options=options)
        else:
            source = configured_models.policy_source(config)
            spread = _spread(config, "ref")
            factories["ref"] = partial(
                on_worker.build_reference, source=source, spread=spread, options=options
            )
    factories |= _scoring_factories(config, engines)
    if "rollout" in engines:
        factories["rollout"] = _rollout_factory(config)
    if trained := trained_policies(config):
        factories |= _policy_factories(config, trained, engines, steps, factories)
    if "reward_fn" in services:
        router = partial(
            RewardRouter,
            RewardSettings.of(config),
            config.data.max_response_length,
            {name: response_limit(config, name) for name in config.data.domains},
            Overlong(config.reward.overlong.buffer_tokens, config.reward.overlong.factor),
        )
        factories["reward_fn"] = partial(on_worker.build_reward_router, make=router)
    return factories


def _policy_factories(
    config: Config,
    trained: Collection[str],
    engines: Collection[str],
    steps: int,
    single: Mapping[str, Factory],
) -> dict[str, Factory]:
    """Factories of the agents' policies, in place of those of one policy, `single`."""
    owner = policies_of_agents(config)
    every = [*dict.fromkeys((*trained, *policies_of_agents(config).values()))]
    sources = {
        name: configured_models.policy_source(config_of_policy(config, name)) for name in every
    }
    own = {name: sources.pop(name) for name in trained}
    factories: dict[str, Factory] = {"policy": partial(on_worker.build_policies, sources=own)}
    if "actor" in engines:
        trainers = {
            name: _trainer(config_of_policy(config, name), "actor", steps) for name in trained
        }
        engine = "distflow.training.multi_policy_engine:PolicyTrainer"
        trainers = {name: trainer._replace(engine=engine) for name, trainer in trainers.items()}
        factories["actor"] = partial(
            on_worker.build_policy_trainers, trainers=trainers, policies=owner
        )
    if "ref" in engines:
        options = cast("partial[object]", single["ref"]).keywords["options"]
        make = on_worker.build_policy_references
        factories["ref"] = partial(make, sources=own, policies=owner, options=options)
    if "rollout" in engines:
        of_one = cast("partial[object]", single["rollout"]).keywords
        taken = {name: of_one[name] for name in ("engine", "dtype", "shares", "options")}
        factories["rollout"] = partial(on_worker.build_policy_rollouts, frozen=sources, **taken)
    return factories


def _scoring_factories(config: Config, engines: Collection[str]) -> dict[str, Factory]:
    """Factories of reward models and judges."""
    configured_models.check_engines(config, engines)
    factories = dict[str, Factory]()
    models = scoring_models(config.reward_model)
    for name, model in ((name, models[name]) for name in models if name in engines):
        key, source = configured_models.scoring_source(config, name)
        if model.judge:
            with blaming(f"reward_model.models.{name}.template"):
                template = judge_template(model.template)
            target, options = _engine_options(config)
            dtype = compute_dtype(config)
            replies = ReplyStore(model.store, "", model.max_calls, model.max_tokens)
            spread = on_worker.Spread(dtype, model.param_offload) if model.sharded else None
            parts = on_worker.JudgeParts(
                target,
                dtype,
                options,
                spread,
                template,
                model.answer_tokens,
                replies,
                model.choices,
            )
            factories[name] = partial(on_worker.build_judge, key=key, source=source, parts=parts)
        else:
            scorer = _scorer_options(
                config, config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
            )
            spread = (
                on_worker.Spread(compute_dtype(config), model.param_offload)
                if is_sharded(config)
                else None
            )
            scorer["temperatures"] = {}
            scorer["agent_temperatures"] = {}
            factories[name] = partial(
                on_worker.build_reward_model, key=key, source=source, spread=spread, options=scorer
            )
    return factories


def compute_dtype(config: Config) -> torch.dtype:
    """The dtype that models compute in; trained weights are always float32."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[choose_dtype(config)]


def engine_dtype(config: Config) -> torch.dtype:
    """The dtype of the rollout engine's weights: its computing dtype, unless it casts them as the
    trainer does."""
    return torch.float32 if _engine_casts(config) else compute_dtype(config)


def _rounds_as_trainer(config: Config) -> bool:
    """Whether the rollout engine multiplies in a lower precision than the rest, like a trainer with
    autocast. A sharded trainer computes everything in the lower one."""
    is_low = compute_dtype(config) is not torch.float32 and not is_sharded(config)
    return is_low and config.actor_rollout_ref.rollout.name == "embedded"


def _engine_casts(config: Config) -> bool:
    """Whether the rollout engine has float32 weights, so that it rounds exactly where such a
    trainer does. Native code casts them at no cost; torch would cast all weights in every decode
    step."""
    rollout = config.actor_rollout_ref.rollout
    by_native = not (rollout.enforce_eager or rollout.batch_invariant)
    return (
        by_native
        and _rounds_as_trainer(config)
        and choose_device(config).type == "cpu"
        and native.is_there()
    )


def shares_weights(config: Config) -> bool:
    """Whether the rollout engine computes on the trainer's storage."""
    return shares_storage(config, choose_dtype(config))


def _trainer(config: Config, role: Literal["actor", "critic"], steps: int) -> on_worker.Trainer:
    settings = config.actor_rollout_ref
    trained = config.critic if role == "critic" else settings.actor
    optim = trained.optim
    updates = optimizer_steps(config, role, steps)
    moments = dict[str, Any]()
    warm_up = dict[str, Any]()
    if optim.optimizer != "sgd":
        moments = {"betas": optim.betas, "eps": optim.eps}
    if optim.scheduler != "constant":
        warm_up = {"warmup_ratio": optim.warmup_ratio, "warmup_steps": optim.lr_warmup_steps}
        warm_up |= {"min_lr_ratio": optim.min_lr_ratio}
    merging = (
        {}
        if role == "critic" or not settings.model.lora_rank
        else {"merge_adapter": settings.model.lora_merge}
    )
    max_tokens = trained.ppo_max_token_len_per_gpu or settings.actor.ppo_max_token_len_per_gpu
    return on_worker.Trainer(
        TRAIN_ENGINES[settings.actor.strategy].target,
        partial(
            make_optimizer, optim.optimizer, lr=optim.lr, weight_decay=optim.weight_decay, **moments
        ),
        partial(make_schedule, optim.scheduler, total_steps=max(updates, 1), **warm_up),
        {
            **_scorer_options(config, max_tokens),
            **merging,
            "max_grad_norm": trained.max_grad_norm,
            "gradient_checkpointing": settings.model.enable_gradient_checkpointing,
        },
    )


def _scorer_options(config: Config, max_tokens: int | None) -> ScorerOptions:
    settings = config.actor_rollout_ref
    return {
        "max_tokens_per_micro_batch": max_tokens,
        "temperature": settings.rollout.temperature if is_rl(config) else 1.0,
        "temperatures": temperatures(config) if is_rl(config) else {},
        "agent_temperatures": agent_temperatures(config) if is_rl(config) else {},
        "compute_dtype": None if is_sharded(config) else compute_dtype(config),
    }


def _spread(config: Config, role: Literal["actor", "critic", "ref"]) -> on_worker.Spread | None:
    """The sharding; None if every rank has the whole model."""
    if not is_sharded(config):
        return None
    settings = config.actor_rollout_ref
    if role == "ref":
        return on_worker.Spread(compute_dtype(config), settings.ref.fsdp_config.param_offload)
    trained = config.critic.fsdp_config if role == "critic" else settings.actor.fsdp_config
    return on_worker.Spread(compute_dtype(config), trained.offload_policy)


def _rollout_factory(config: Config) -> Factory:
    target, options = _engine_options(config)
    if "num_threads" in options:
        options["num_threads"] = threads_of(config)[1]
    if _rounds_as_trainer(config):
        options["compute_dtype"] = compute_dtype(config)
    dtype = engine_dtype(config)
    source = configured_models.policy_source(config)
    if ROLLOUT_ENGINES[config.actor_rollout_ref.rollout.name].in_server:
        if config.trainer.launcher == "local":
            cast(type[HttpEngine], load(target)).check(options)
        options["longest"] = config.data.max_prompt_length + config.data.max_response_length
        num_servers = config.actor_rollout_ref.rollout.data_parallel_size
        if num_servers > 1 and choose_device(config).type != "cpu":
            raise UserError(
                f"actor_rollout_ref.rollout.data_parallel_size={num_servers}: all servers of a "
                "worker would use the "
                "same device: let several workers generate, each with a server of its own "
                "(trainer.allocation), or "
                "start the servers yourself and name them in actor_rollout_ref.rollout.url"
            )
        return partial(
            on_worker.build_rollout_of_server,
            engine=target,
            empty=partial(
                on_worker.empty_policy,
                source,
                None
                if config.actor_rollout_ref.model.lora_merge
                else configured_models.policy_adapter(config),
                dtype,
            ),
            options=options,
            servers=on_worker.OwnServers(num_servers, config.trainer.run_dir / ".meeting-server-"),
        )
    return partial(
        on_worker.build_rollout,
        engine=target,
        dtype=dtype,
        source=source if config.actor_rollout_ref.model.lora_rank or is_sharded(config) else None,
        shares=shares_weights(config),
        options=options,
    )


def _engine_options(config: Config) -> tuple[str, on_worker.Options]:
    """The engine's class, whose keyword-only parameters are the keys of `rollout` that it takes,
    and their values. Keys that only matter if generation and training run at once are only read
    then."""
    settings = config.actor_rollout_ref.rollout
    target = ROLLOUT_ENGINES[config.actor_rollout_ref.rollout.name].target
    parameters = signature(cast(Callable[..., object], load(target))).parameters.values()
    taken = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in dir(settings)}
    if config.async_.max_staleness == 0:
        taken -= _AT_ONCE
    options = {name: getattr(settings, name) for name in sorted(taken)}
    if "engine_kwargs" in options:
        options["engine_kwargs"] = settings.engine_kwargs.get(settings.name, {})
    return target, options
