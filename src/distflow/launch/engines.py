"""Makes the factories of engines and services from the config. They hold the config and no live
object, so that they can be sent to the worker that builds the part."""

from collections.abc import Collection
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.config.derived_settings import response_limit, trained_policies
from distflow.config.keys.distill import teachers_of
from distflow.launch import agent_policies
from distflow.launch.configured_models import check_engines, load_policy_tokenizer
from distflow.launch.rollout_engines import build_rollout, check_rollout, engine_dtype
from distflow.launch.scoring_engines import (
    build_scoring_model,
    build_teacher,
    check_judge,
    check_teacher,
)
from distflow.launch.train_engines import build_actor, build_critic, build_policy, build_reference
from distflow.models.loading import stop_token_ids
from distflow.rewards.pool.domain_pools import RewardSettings
from distflow.rewards.router import Overlong, RewardRouter
from distflow.runtime.spec import Factory, Get
from distflow.training.multi_policy_engine import models_of


def make_factories(
    config: Config, engines: Collection[str], services: Collection[str], steps: int
) -> dict[str, Factory]:
    """Factories of these and of their parts, which can be sent to a worker. steps: training steps
    of the whole run. Raises UserError for an engine without a configured model, or that cannot
    work."""
    check_engines(config, engines)
    factories: dict[str, Factory] = {
        "policy": partial(build_policy, config),
        "tokenizer": partial(build_tokenizer, config),
        "stop_token_ids": build_stop_token_ids,
        "actor": partial(build_actor, config, steps),
        "critic": partial(build_critic, config, steps),
        "ref": partial(build_reference, config),
    }
    if "rollout" in engines:
        check_rollout(config)
        # The dtype is that of this machine, since the run compares weights in it.
        factories["rollout"] = partial(build_rollout, config, engine_dtype(config))

    if trained_policies(config):
        factories |= agent_policies.factories(config, steps)

    for name in engines:
        if name in teachers_of(config.distill):
            check_teacher(config, name)
            factories[name] = partial(build_teacher, config, name)
        elif name not in factories:
            check_judge(config, name)
            factories[name] = partial(build_scoring_model, config, name)

    if "reward_fn" in services:
        factories["reward_fn"] = partial(build_reward_router, config)
    return factories


def build_tokenizer(config: Config, get: Get, device: torch.device) -> PreTrainedTokenizerBase:
    return load_policy_tokenizer(config)


def build_stop_token_ids(get: Get, device: torch.device) -> tuple[int, ...]:
    found = set[int]()
    for model in models_of(get("policy")).values():
        found |= set(stop_token_ids(model, get("tokenizer")))
    return tuple(sorted(found))


def build_reward_router(config: Config, get: Get, device: torch.device) -> RewardRouter:
    overlong = config.reward.overlong
    return RewardRouter(
        RewardSettings.of(config),
        config.data.max_response_length,
        {name: response_limit(config, name) for name in config.data.domains},
        Overlong(overlong.buffer_tokens, overlong.factor),
    )
