"""Builds the engines of agents with several policies, in place of those of one."""

import copy
from functools import partial
from typing import cast

import torch
from torch import nn

from distflow.config import Config
from distflow.config.derived_settings import config_of_policy, policies_of_agents, trained_policies
from distflow.config.keys.dag import FIRST_POLICY
from distflow.errors import UserError, blaming
from distflow.launch.configured_models import policy_source
from distflow.launch.rollout_engines import (
    cast_weights,
    engine_dtype,
    make_engine,
    policy_engine_options,
    shares_weights,
)
from distflow.launch.train_engines import make_trainer, reference_options
from distflow.models.loading import load_model, load_tokenizer
from distflow.rollout.engine import RolloutEngine
from distflow.rollout.multi_policy_engine import MultiPolicyRollout
from distflow.runtime.spec import Factory, Get
from distflow.training.multi_policy_engine import (
    MultiPolicyScorer,
    MultiPolicyTrainer,
    PolicyModels,
    PolicyScorer,
    PolicyTrainer,
    models_of,
)

_TRAINER = "distflow.training.multi_policy_engine:PolicyTrainer"


def factories(config: Config, steps: int) -> dict[str, Factory]:
    return {
        "policy": partial(build_policies, config),
        "actor": partial(build_trainers, config, steps),
        "ref": partial(build_references, config),
        "rollout": partial(build_rollouts, config, engine_dtype(config)),
    }


def build_policies(config: Config, get: Get, device: torch.device) -> nn.Module:
    """The models of the trained policies, all with the first one's vocabulary."""
    models = {name: _load_policy(config, get, device, name) for name in trained_policies(config)}
    return PolicyModels(models)


def _load_policy(config: Config, get: Get, device: torch.device, name: str) -> nn.Module:
    """Raises UserError if its tokens are not those of the run's tokenizer, since agents exchange
    tokens."""
    source = policy_source(config_of_policy(config, name))
    is_first = name == FIRST_POLICY
    key = "actor_rollout_ref.model.path"
    if not is_first:
        key = f"dag.policies.{name}.model.path"

    with blaming(key):
        model = load_model(**source, device=device)
        if is_first:
            return model

        common = get("tokenizer")
        own = load_tokenizer(source["path"], revision=source.get("revision"))
        if own.get_vocab() != common.get_vocab() or own.chat_template != common.chat_template:
            raise UserError(
                "its tokenizer or chat template differs from that of actor_rollout_ref.model.path: "
                "all policies of an episode's agents need the same one"
            )

    return model


def build_trainers(
    config: Config, steps: int, get: Get, device: torch.device
) -> MultiPolicyTrainer:
    owners = policies_of_agents(config)
    found = dict[str, PolicyTrainer]()
    for name, model in models_of(get("policy")).items():
        own = config_of_policy(config, name)
        trainer = make_trainer(
            own, "actor", steps, get, model, _TRAINER, policy=name, policies=owners
        )
        found[name] = cast(PolicyTrainer, trainer)

    agents = {policy: agent for agent, policy in owners.items() if policy in found}
    return MultiPolicyTrainer(found, agents)


def build_references(config: Config, get: Get, device: torch.device) -> MultiPolicyScorer:
    """The initial model of each trained policy."""
    found = dict[str, PolicyScorer]()
    for name in trained_policies(config):
        found[name] = PolicyScorer(
            _load_policy(config, get, device, name).requires_grad_(False),
            policy=name,
            policies=policies_of_agents(config),
            group=get("collective"),
            **reference_options(config),
        )

    return MultiPolicyScorer(found)


def build_rollouts(
    config: Config, dtype: torch.dtype, get: Get, device: torch.device
) -> MultiPolicyRollout:
    """An engine for each policy of agents, also of those that are not trained; see
    `build_rollout`."""
    trained = models_of(get("policy"))
    shares = shares_weights(config) and get.planned("actor")
    options = policy_engine_options(config)

    found = dict[str, RolloutEngine]()
    for name in dict.fromkeys((*trained, *policies_of_agents(config).values())):
        shares_own = shares and name in trained
        if shares_own:
            model = trained[name]
        elif name in trained:
            model = copy.deepcopy(trained[name])
        else:
            model = _load_policy(config, get, device, name)

        if not shares_own:
            cast_weights(model, dtype)
        found[name] = make_engine(config, model, get("tokenizer"), shares_own, options)

    return MultiPolicyRollout(found, tuple(trained))
