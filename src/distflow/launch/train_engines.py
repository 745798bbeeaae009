"""Builds train engines and the reference from the config, on their worker."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn

from distflow.builtin_names import TRAIN_ENGINES
from distflow.config import Config
from distflow.config.derived_settings import (
    agent_temperatures,
    is_own_reference,
    is_rl,
    is_sharded,
    optimizer_steps,
    temperatures,
)
from distflow.errors import UserError, blaming
from distflow.import_target import load
from distflow.launch.configured_models import (
    compute_dtype,
    critic_source,
    load_adapted,
    policy_adapter,
    policy_source,
    source_of,
)
from distflow.models.loading import load_model
from distflow.models.sharding import Sharding
from distflow.runtime.spec import Get
from distflow.training.engine import TrainEngine
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import ScorerOptions, TorchScorer


def build_policy(config: Config, get: Get, device: torch.device) -> nn.Module:
    """The policy's model: sharded where it is trained, whole where it only generates."""
    on_host = config.actor_rollout_ref.actor.fsdp_config.offload_policy
    sharding = None
    if get.planned("actor"):
        sharding = sharding_of(config, get, on_host)
    return load_adapted(policy_source(config), policy_adapter(config), device, sharding)


def sharding_of(config: Config, get: Get, on_host: bool) -> Sharding | None:
    """How a model is sharded over the ranks; None if every rank has it whole. on_host: its weights
    are in host memory. Raises UserError if there is one rank."""
    if not is_sharded(config) or not get("shards"):
        return None

    sharding: Sharding | None = get("sharding")
    if sharding is None:
        raise UserError(
            "actor.strategy=fsdp shards weights over the training processes, but this run has only "
            "one: set trainer.n_gpus_per_node=2, or actor.strategy=torch"
        )

    return replace(sharding, compute_dtype=compute_dtype(config), on_host=on_host)


def build_actor(config: Config, steps: int, get: Get, device: torch.device) -> TrainEngine:
    engine = TRAIN_ENGINES[config.actor_rollout_ref.actor.strategy].target
    return make_trainer(config, "actor", steps, get, get("policy"), engine)


def build_critic(config: Config, steps: int, get: Get, device: torch.device) -> TrainEngine:
    sharding = sharding_of(config, get, config.critic.fsdp_config.offload_policy)
    with blaming("critic.model.path"):
        model = load_model(**critic_source(config), critic=True, sharding=sharding, device=device)
    engine = TRAIN_ENGINES[config.actor_rollout_ref.actor.strategy].target
    return make_trainer(config, "critic", steps, get, model, engine)


def make_trainer(
    config: Config,
    role: Literal["actor", "critic"],
    steps: int,
    get: Get,
    model: nn.Module,
    engine: str,
    **own: object,
) -> TrainEngine:
    """The train engine of a model. engine: "module:Class". own: further arguments of its
    constructor."""
    settings = config.actor_rollout_ref
    trained = config.critic if role == "critic" else settings.actor
    optim = trained.optim
    moments = dict[str, Any]()
    if optim.optimizer != "sgd":
        moments = {"betas": optim.betas, "eps": optim.eps}
    optimizer = make_optimizer(
        optim.optimizer, model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay, **moments
    )

    warm_up = dict[str, Any]()
    if optim.scheduler != "constant":
        warm_up = {
            "warmup_ratio": optim.warmup_ratio,
            "warmup_steps": optim.lr_warmup_steps,
            "min_lr_ratio": optim.min_lr_ratio,
        }

    updates = max(optimizer_steps(config, role, steps), 1)
    if role == "actor" and settings.model.lora_rank:
        own["merge_adapter"] = settings.model.lora_merge
    max_tokens = trained.ppo_max_token_len_per_gpu or settings.actor.ppo_max_token_len_per_gpu
    make = cast(Callable[..., TrainEngine], load(engine))

    return make(
        model,
        optimizer=optimizer,
        schedule=make_schedule(optim.scheduler, total_steps=updates, **warm_up),
        group=get("collective"),
        max_grad_norm=trained.max_grad_norm,
        gradient_checkpointing=settings.model.enable_gradient_checkpointing,
        **scorer_options(config, max_tokens),
        **own,
    )


def build_reference(config: Config, get: Get, device: torch.device) -> TorchScorer:
    """The initial policy, or another model: the policy with its adapter switched off, or a model of
    its own."""
    options = reference_options(config)
    if is_own_reference(config):
        return TorchScorer(get("policy"), without_adapter=True, group=get("collective"), **options)
    sharding = sharding_of(config, get, config.actor_rollout_ref.ref.fsdp_config.param_offload)
    key, source = source_of(config, "ref")
    with blaming(key):
        model = load_model(**source, sharding=sharding, device=device)
    return TorchScorer(model.requires_grad_(False), group=get("collective"), **options)


def reference_options(config: Config) -> ScorerOptions:
    settings = config.actor_rollout_ref
    own = settings.ref.log_prob_max_token_len_per_gpu
    return scorer_options(config, own or settings.actor.ppo_max_token_len_per_gpu)


def scorer_options(config: Config, max_tokens: int | None) -> ScorerOptions:
    """max_tokens: of a micro-batch; None: by the device."""
    options: ScorerOptions = {
        "max_tokens_per_micro_batch": max_tokens,
        "compute_dtype": None if is_sharded(config) else compute_dtype(config),
    }
    if is_rl(config):
        options["temperature"] = config.actor_rollout_ref.rollout.temperature
        options["temperatures"] = temperatures(config)
        options["agent_temperatures"] = agent_temperatures(config)

    return options
