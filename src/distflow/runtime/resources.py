"""The engines and services of one worker, built by the factories that its part of the plan
needs."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase

from distflow.models.sharding import Sharding, whole
from distflow.observe.writing.timing import lasting
from distflow.planning.plan import RankPlan
from distflow.rewards.router import RewardRouter
from distflow.rollout.engine import RolloutEngine
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.spec import Factory, Get
from distflow.training.engine import Collective, OneRank, Scorer, TrainEngine
from distflow.training.multi_policy_engine import MultiPolicyTrainer
from distflow.training.torch_engine import FrozenWeights


class ModelSizes(NamedTuple):
    """Numbers of parameters: of the loaded model, of its trained part, and of the critic (0 without
    one)."""

    policy: int
    trained: int = 0
    critic: int = 0


@dataclass(frozen=True)
class Resources:
    """Engines and services of a worker. Those that the plan does not assign to it are None and were
    never built."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    facts: Mapping[str, object]
    """Of the loaded model."""
    sizes: ModelSizes
    actor: TrainEngine | None = None
    critic: TrainEngine | None = None
    ref: Scorer | None = None
    scoring_models: Mapping[str, FrozenWeights] = field(default_factory=dict)
    """Reward models and judges by name."""
    rollout: RolloutEngine | None = None
    reward_fn: RewardRouter | None = None

    def by_name(self) -> dict[str, object]:
        """The engines and services that a node's parameters may name."""
        found = dict[str, object](self.scoring_models)
        for name in ("tokenizer", "actor", "critic", "ref", "rollout", "reward_fn"):
            part = getattr(self, name)
            if part is not None:
                found[name] = part
        return found

    def trained(self) -> dict[str, TrainEngine]:
        """The engines whose state belongs in a checkpoint."""
        engines = {"actor": self.actor, "critic": self.critic}
        return {name: engine for name, engine in engines.items() if engine is not None}

    def updated(self) -> dict[str, TrainEngine]:
        """The engines that take optimizer steps, by role; with several policies, each one's by its
        name."""
        if isinstance(self.actor, MultiPolicyTrainer):
            several = self.actor.engines
        else:
            several = {}
        return {**self.trained(), **several}


def build_resources(
    factories: Mapping[str, Factory],
    rank: RankPlan,
    collective: Collective | None = None,
    sharding: Sharding | None = None,
    shards: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Resources:
    """collective: of the ranks that train together. sharding: over the same ranks, if their weights
    are sharded. shards: False for whole models, whatever the config says. say: called with the time
    that it takes, if long.

    Raises UserError if a part cannot be built, naming the key.
    """
    ready = {"collective": collective or OneRank(), "sharding": sharding, "shards": shards}
    get = Get(factories, rank, ready)

    parts = dict[str, Any]()
    scoring_models = dict[str, FrozenWeights]()
    with lasting(say, "loading the models"):
        policy: nn.Module = get("policy")
        facts = {"model_fingerprint": _fingerprint(policy)}

        for name in (*rank.engines, *rank.services):
            part = get(name)
            if isinstance(part, FrozenWeights):
                scoring_models[name] = part
            elif name != "tokenizer":
                parts[name] = part

    critic = getattr(parts.get("critic"), "model", None)  # of engines that expose it
    sizes = ModelSizes(
        policy=sum(each.numel() for each in policy.parameters()),
        trained=sum(each.numel() for each in policy.parameters() if each.requires_grad),
        critic=sum(each.numel() for each in critic.parameters()) if critic is not None else 0,
    )

    return Resources(
        get("tokenizer"),
        get("stop_token_ids"),
        facts,
        sizes,
        scoring_models=scoring_models,
        **parts,
    )


def _fingerprint(model: nn.Module) -> str:
    """The fingerprint of the loaded model: reference and adapter's base, whatever a checkpoint
    holds.

    It does not depend on the sharding: weights are gathered one by one.
    """
    weights = ((name, whole(parameter.detach())) for name, parameter in model.named_parameters())
    hashes = sorted(stripe_hashes(weights).items())
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
