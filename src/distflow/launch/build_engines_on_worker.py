"""Builds engines and services on the worker that uses them, from the plain values of their
factories."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from distflow.config.keys.dag import FIRST_POLICY
from distflow.errors import UserError, blaming
from distflow.import_target import load
from distflow.launch.configured_models import Adapt, Source, load_adapted
from distflow.models.loading import (
    ModelSource,
    context_length,
    load_model,
    load_tokenizer,
    stop_token_ids,
)
from distflow.models.reward_model import check_config, longest_text
from distflow.models.sharding import Sharding, empty_model
from distflow.rewards.router import RewardRouter
from distflow.rollout.engine import RolloutEngine, SamplingParams
from distflow.rollout.multi_policy_engine import MultiPolicyRollout
from distflow.rollout.servers.fleet import Fleet
from distflow.rollout.servers.server_shared_by_workers import ServerGroup, follower_of
from distflow.runtime.judge_engine import Judge, ReplyStore, choice_replies
from distflow.runtime.spec import Get
from distflow.scheduling.group_states import Version
from distflow.training.engine import TrainEngine
from distflow.training.multi_policy_engine import (
    MultiPolicyScorer,
    MultiPolicyTrainer,
    PolicyModels,
    PolicyScorer,
    PolicyTrainer,
    models_of,
)
from distflow.training.optimizer import Schedule
from distflow.training.torch_engine import RewardModelScorer, ScorerOptions, TorchScorer

Options = dict[str, object]
"""Plain keyword arguments of a constructor that is looked up by name."""


class Trainer(NamedTuple):
    """A train engine without its model. engine: "module:Class". options: of its constructor."""

    engine: str
    make_optimizer: Callable[..., torch.optim.Optimizer]
    make_schedule: Callable[[], Schedule]
    options: Options


class Spread(NamedTuple):
    """How a model is sharded over ranks, besides their mesh: see `Sharding`."""

    compute_dtype: torch.dtype
    on_host: bool


def build_tokenizer(
    get: Get, device: torch.device, load: Callable[[], PreTrainedTokenizerBase]
) -> PreTrainedTokenizerBase:
    return load()


def build_reward_router(
    get: Get, device: torch.device, make: Callable[..., RewardRouter]
) -> RewardRouter:
    return make(start=get("start_pool"))


def build_policy(
    get: Get, device: torch.device, source: Source, adapt: Adapt | None, spread: Spread | None
) -> nn.Module:
    """The policy's model: sharded where it is trained, whole where it only generates."""
    return load_adapted(
        source, adapt, device, _sharding(get, spread) if get.planned("actor") else None
    )


def build_policies(get: Get, device: torch.device, sources: Mapping[str, Source]) -> nn.Module:
    """The models of agents' trained policies, all with the first one's vocabulary."""
    models = {name: _load_policy(get, device, name, source) for name, source in sources.items()}
    return PolicyModels(models)


def _load_policy(get: Get, device: torch.device, name: str, source: Source) -> nn.Module:
    """Raises UserError if its tokens are not those of the run's tokenizer, since agents exchange
    tokens."""
    key = (
        "actor_rollout_ref.model.path"
        if name == FIRST_POLICY
        else f"dag.policies.{name}.model.path"
    )
    with blaming(key):
        model = load_model(**source, device=device)
        if name != FIRST_POLICY:
            common = get("tokenizer")
            own = load_tokenizer(source["path"], revision=source.get("revision"))
            if own.get_vocab() != common.get_vocab() or own.chat_template != common.chat_template:
                raise UserError(
                    "its tokenizer or chat template differs from that of "
                    "actor_rollout_ref.model.path: all policies of "
                    "an episode's agents need the same one"
                )
    return model


def _sharding(get: Get, spread: Spread | None) -> Sharding | None:
    """The sharding; None if every rank has the whole model."""
    if spread is None:
        return None
    mesh: DeviceMesh | None = get("mesh")
    if mesh is None:
        raise UserError(
            "actor.strategy=fsdp shards weights over the training processes, but this run has only "
            "one: set "
            "trainer.n_gpus_per_node=2, or actor.strategy=torch"
        )
    return Sharding(mesh, spread.compute_dtype, spread.on_host)


def build_stop_token_ids(get: Get, device: torch.device) -> tuple[int, ...]:
    models = models_of(get("policy")).values()
    return tuple(
        sorted({token for model in models for token in stop_token_ids(model, get("tokenizer"))})
    )


def build_actor(get: Get, device: torch.device, trainer: Trainer) -> TrainEngine:
    return _train_engine(get, get("policy"), trainer)


def build_policy_trainers(
    get: Get, device: torch.device, trainers: Mapping[str, Trainer], policies: Mapping[str, str]
) -> MultiPolicyTrainer:
    """policies: of each agent."""
    engines = dict[str, PolicyTrainer]()
    for name, model in models_of(get("policy")).items():
        own = trainers[name]
        options = {**own.options, "policy": name, "policies": policies}
        engines[name] = cast(
            PolicyTrainer, _train_engine(get, model, own._replace(options=options))
        )
    return MultiPolicyTrainer(
        engines, {policy: agent for agent, policy in policies.items() if policy in engines}
    )


def build_critic(
    get: Get, device: torch.device, source: Source, spread: Spread | None, trainer: Trainer
) -> TrainEngine:
    sharding = _sharding(get, spread)
    with blaming("critic.model.path"):
        model = load_model(**source, critic=True, sharding=sharding, device=device)
    return _train_engine(get, model, trainer)


def _train_engine(get: Get, model: nn.Module, trainer: Trainer) -> TrainEngine:
    return cast(Callable[..., TrainEngine], load(trainer.engine))(
        model,
        optimizer=trainer.make_optimizer(model.parameters()),
        schedule=trainer.make_schedule(),
        group=get("collective"),
        **trainer.options,
    )


def build_reference(
    get: Get, device: torch.device, source: Source, spread: Spread | None, options: ScorerOptions
) -> TorchScorer:
    model = load_model(**source, sharding=_sharding(get, spread), device=device)
    return TorchScorer(model.requires_grad_(False), group=get("collective"), **options)


def build_policy_references(
    get: Get,
    device: torch.device,
    sources: Mapping[str, Source],
    policies: Mapping[str, str],
    options: ScorerOptions,
) -> MultiPolicyScorer:
    """The initial model of each trained policy. policies: of each agent."""
    engines = dict[str, PolicyScorer]()
    for name, source in sources.items():
        frozen = _load_policy(get, device, name, source).requires_grad_(False)
        engines[name] = PolicyScorer(
            frozen, policy=name, policies=policies, group=get("collective"), **options
        )
    return MultiPolicyScorer(engines)


def build_adapted_reference(get: Get, device: torch.device, options: ScorerOptions) -> TorchScorer:
    """The policy with its adapter switched off, which is the initial policy."""
    return TorchScorer(get("policy"), without_adapter=True, group=get("collective"), **options)


def build_reward_model(
    get: Get,
    device: torch.device,
    key: str,
    source: Source,
    spread: Spread | None,
    options: ScorerOptions,
) -> RewardModelScorer:
    """A reward model, whose tokenizer may differ from the policy's."""
    with blaming(key):
        check_config(found := ModelSource(**source), found.config())
        model = load_model(
            **source, sharding=_sharding(get, spread), device=device, draws_head=False
        )
        tokenizer = load_tokenizer(source["path"], generates=False, model=model.config)
    longest = longest_text(model.config, tokenizer)
    group = get("collective")
    frozen = model.requires_grad_(False)
    return RewardModelScorer(
        frozen, tokenizer=tokenizer, max_length=longest, group=group, **options
    )


class JudgeParts(NamedTuple):
    """A judge's engine, "module:Class" of a rollout engine, and options of its constructor; unused
    if its weights are spread."""

    engine: str
    dtype: torch.dtype
    options: Options
    spread: Spread | None
    template: str
    answer_tokens: int
    replies: ReplyStore
    choices: tuple[float, ...]


def build_judge(
    get: Get, device: torch.device, key: str, source: Source, parts: JudgeParts
) -> Judge:
    """A judge, whole or in shards, with its own tokenizer."""
    with blaming(key):
        config = ModelSource(**source).config()
        longest = context_length(**source)
        tokenizer = load_tokenizer(source["path"], model=config)
        answer_tokens = max(
            map(len, choice_replies(parts.choices, tokenizer)), default=parts.answer_tokens
        )
        if longest is not None and answer_tokens >= longest:
            raise UserError(
                f"a reply of {answer_tokens:,} tokens (answer_tokens) leaves no room for a "
                "question: "
                f"the model reads at most {longest:,} tokens; set a smaller answer_tokens"
            )
        model = load_model(**source, sharding=_sharding(get, parts.spread), device=device)
        make = None
        if parts.spread is None:
            _cast(model, parts.dtype)
            make = partial(
                _make_engine, parts.engine, model, tokenizer, shares=False, options=parts.options
            )
            make()  # rejects a family that the engine cannot run
        replies = parts.replies.of_model(source["path"], source.get("revision"))
    params = SamplingParams(
        answer_tokens, greedy=True, stop_token_ids=stop_token_ids(model, tokenizer)
    )
    return Judge(
        model,
        tokenizer,
        make,
        parts.template,
        params,
        longest,
        replies,
        parts.choices,
        get("collective"),
    )


def _make_engine(
    engine: str,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    shares: bool,
    options: Options,
) -> RolloutEngine:
    make = cast(Callable[..., RolloutEngine], load(engine))
    return make(model, tokenizer, version=Version(0, 0), shares_weights=shares, **options)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for weight in model.requires_grad_(False).parameters():
        # not buffers: rotary frequencies in bfloat16 are wrong at long distances
        weight.data = weight.data.to(dtype)


def build_rollout(
    get: Get,
    device: torch.device,
    engine: str,
    dtype: torch.dtype,
    source: Source | None,
    shares: bool,
    options: Options,
) -> RolloutEngine:
    """The engine computes on the trainer's own storage if the trainer is on this worker and storage
    may be shared, else on a copy without an adapter, whose weights arrive merged.

    source: of the whole model without an adapter; None if the policy is that model. shares: both
    compute in the
    stored dtype (float32), and nothing is decoded while weights change.
    """
    shares = shares and get.planned("actor")
    if shares:
        model: nn.Module = get("policy")
    else:
        model = load_model(**source, device=device) if source else copy.deepcopy(get("policy"))
        _cast(model, dtype)
    return _make_engine(engine, model, get("tokenizer"), shares, options)


def build_policy_rollouts(
    get: Get,
    device: torch.device,
    engine: str,
    dtype: torch.dtype,
    frozen: Mapping[str, Source],
    shares: bool,
    options: Options,
) -> MultiPolicyRollout:
    """An engine for each policy of agents; see `build_rollout`. frozen: of the policies that are
    not trained."""
    trained = models_of(get("policy"))
    shares = shares and get.planned("actor")
    engines = dict[str, RolloutEngine]()
    for name, own in trained.items():
        model = own if shares else copy.deepcopy(own)
        if not shares:
            _cast(model, dtype)
        engines[name] = _make_engine(engine, model, get("tokenizer"), shares, options)
    for name, source in frozen.items():
        model = _load_policy(get, device, name, source)
        _cast(model, dtype)
        engines[name] = _make_engine(engine, model, get("tokenizer"), False, options)
    return MultiPolicyRollout(engines, tuple(trained))


class OwnServers(NamedTuple):
    """number: how many a worker starts. meeting: prefix of the folders through which a server's
    workers find each other."""

    number: int
    meeting: Path


def empty_policy(source: Source, adapt: Adapt | None, dtype: torch.dtype) -> nn.Module:
    """Names and shapes of the weights that a server gets. adapt: adds the adapter that the server
    applies unmerged."""
    with blaming("actor_rollout_ref.model.path"):
        model: nn.Module = empty_model(AutoModelForCausalLM, ModelSource(**source).config())
    _cast(model, dtype)
    return adapt(model) if adapt else model


def build_rollout_of_server(
    get: Get,
    device: torch.device,
    engine: str,
    empty: Callable[[], nn.Module],
    options: Options,
    servers: OwnServers,
) -> RolloutEngine:
    """The weights are in the servers, not here. empty: makes the model without them. servers: if
    none are given by address."""
    model = empty()
    urls = cast(tuple[str | None, ...], options.get("url")) or (None,) * servers.number
    make: Any = load(engine)
    if ranks := get.rank.rollout_group:
        place = ranks.index(get.rank.rank)
        options = {
            **options,
            "group": ServerGroup(Path(f"{servers.meeting}{ranks[0]}"), place, len(ranks)),
        }
        make = follower_of(make) if place else make
    begin = partial(make, model, get("tokenizer"), version=Version(0, 0))
    engines = [begin(**{**options, "url": url}) for url in urls]
    return Fleet(engines) if len(engines) > 1 else engines[0]
