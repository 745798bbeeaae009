"""Builds the rollout engine of a worker from the config: in its process, or behind servers."""

import copy
from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config
from distflow.config.derived_settings import is_sharded
from distflow.errors import UserError, blaming
from distflow.import_target import load
from distflow.launch.configured_models import compute_dtype, policy_adapter, policy_source
from distflow.launch.devices import choose_device, choose_dtype
from distflow.launch.threads import threads_of
from distflow.models.cpu_kernels import build as native
from distflow.models.loading import ModelSource, load_model
from distflow.models.sharding import empty_model
from distflow.planning.model_memory import shares_storage
from distflow.rollout.engine import RolloutEngine
from distflow.rollout.servers.fleet import Fleet
from distflow.rollout.servers.http_engine import HttpEngine
from distflow.rollout.servers.server_shared_by_workers import ServerGroup, follower_of
from distflow.runtime.spec import Get
from distflow.scheduling.group_states import Version

# Keys that matter only while the engine generates during updates.
AT_ONCE = ("kv_on_update", "num_threads")


def check_rollout(config: Config) -> None:
    """Raises UserError for servers that cannot work."""
    rollout = config.actor_rollout_ref.rollout
    if not ROLLOUT_ENGINES[rollout.name].in_server:
        return

    if config.trainer.launcher == "local":
        target = cast(type[HttpEngine], load(ROLLOUT_ENGINES[rollout.name].target))
        target.check(engine_options(config))

    if rollout.data_parallel_size > 1 and choose_device(config).type != "cpu":
        raise UserError(
            f"actor_rollout_ref.rollout.data_parallel_size={rollout.data_parallel_size}: all "
            "servers of a worker would use the same device: let several workers generate, each "
            "with a server of its own (trainer.allocation), or start the servers yourself and name "
            "them in actor_rollout_ref.rollout.url"
        )


def engine_dtype(config: Config) -> torch.dtype:
    """The dtype of the rollout engine's weights: its computing dtype, unless it casts them as the
    trainer does."""
    if _engine_casts(config):
        return torch.float32
    return compute_dtype(config)


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
    if rollout.enforce_eager or not _rounds_as_trainer(config):
        return False
    return choose_device(config).type == "cpu" and native.is_there()


def shares_weights(config: Config) -> bool:
    """Whether the rollout engine computes on the trainer's storage."""
    return shares_storage(config, choose_dtype(config))


def engine_parameters(engine: str) -> list[str]:
    """The keyword-only parameters of an engine's constructor. engine: its name."""
    make = cast(Callable[..., object], load(ROLLOUT_ENGINES[engine].target))
    parameters = signature(make).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def engine_options(config: Config) -> dict[str, Any]:
    """The keys of `rollout` that the engine's constructor names, and their values."""
    settings = config.actor_rollout_ref.rollout
    taken = {*engine_parameters(settings.name)} & {*dir(settings)}
    if config.async_.max_staleness == 0:
        taken -= {*AT_ONCE}
    options = {name: getattr(settings, name) for name in sorted(taken)}
    if "engine_kwargs" in options:
        options["engine_kwargs"] = settings.engine_kwargs.get(settings.name, {})
    return options


def policy_engine_options(config: Config) -> dict[str, Any]:
    """The options of an engine of the policy, on its worker."""
    options = engine_options(config)
    if "num_threads" in options:
        options["num_threads"] = threads_of(config)[1]
    if _rounds_as_trainer(config):
        options["compute_dtype"] = compute_dtype(config)
    return options


def make_engine(
    config: Config,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    shares: bool,
    options: dict[str, Any],
) -> RolloutEngine:
    """shares: the model is the trainer's."""
    target = ROLLOUT_ENGINES[config.actor_rollout_ref.rollout.name].target
    make = cast(Callable[..., RolloutEngine], load(target))
    return make(model, tokenizer, version=Version(0, 0), shares_weights=shares, **options)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    for weight in model.requires_grad_(False).parameters():
        # not buffers: rotary frequencies in bfloat16 are wrong at long distances
        weight.data = weight.data.to(dtype)


def build_rollout(
    config: Config, dtype: torch.dtype, get: Get, device: torch.device
) -> RolloutEngine:
    """The engine computes on the trainer's own storage if the trainer is on this worker and storage
    may be shared (both compute in the stored dtype, and nothing is decoded while weights change);
    else on a copy without an adapter, whose weights arrive merged."""
    if ROLLOUT_ENGINES[config.actor_rollout_ref.rollout.name].in_server:
        return _behind_servers(config, dtype, get)

    shares = shares_weights(config) and get.planned("actor")
    model: nn.Module = get("policy")
    if not shares:
        is_whole = not (config.actor_rollout_ref.model.lora_rank or is_sharded(config))
        source = policy_source(config)

        if is_whole:
            model = copy.deepcopy(model)
        else:
            model = load_model(**source, device=device)

        cast_weights(model, dtype)

    return make_engine(config, model, get("tokenizer"), shares, policy_engine_options(config))


def _behind_servers(config: Config, dtype: torch.dtype, get: Get) -> RolloutEngine:
    """The weights are in the servers, not here."""
    rollout = config.actor_rollout_ref.rollout
    options = policy_engine_options(config)
    options["longest"] = config.data.max_prompt_length + config.data.max_response_length
    make: Any = load(ROLLOUT_ENGINES[rollout.name].target)

    ranks = get.rank.rollout_group
    if ranks:
        place = ranks.index(get.rank.rank)
        meeting = config.trainer.run_dir / f".meeting-server-{ranks[0]}"
        options["group"] = ServerGroup(meeting, place, len(ranks))
        if place:
            make = follower_of(make)

    model = _empty_policy(config, dtype)
    engines = []
    for url in options.get("url") or (None,) * rollout.data_parallel_size:
        own = {**options, "url": url}
        engines.append(make(model, get("tokenizer"), version=Version(0, 0), **own))

    return Fleet(engines)


def _empty_policy(config: Config, dtype: torch.dtype) -> nn.Module:
    """Names and shapes of the weights that a server gets, with the adapter if the server applies it
    unmerged."""
    source = ModelSource(**policy_source(config))
    with blaming("actor_rollout_ref.model.path"):
        model: nn.Module = empty_model(AutoModelForCausalLM, source.config())
    cast_weights(model, dtype)

    adapt = None
    if not config.actor_rollout_ref.model.lora_merge:
        adapt = policy_adapter(config)

    return adapt(model) if adapt else model
