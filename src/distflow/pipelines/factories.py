"""From the config to factories of engines and services. The config is read here, once; what a factory carries is plain
values and functions of modules, so that it can be sent to the worker that builds the part."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Literal, NamedTuple, NotRequired, TypedDict, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from distflow.config import Config
from distflow.config.actor import OptimConfig
from distflow.config.by_domain import response_limit, temperatures
from distflow.config.errors import UserError, hint
from distflow.config.functions import load
from distflow.config.names import ROLLOUT_ENGINES, TRAIN_ENGINES
from distflow.config.program import is_rl, is_sharded, offload_keys, optimizer_steps
from distflow.flow.ticket import Version
from distflow.models.loading import Init, ModelSource, context_length, load_model
from distflow.models.lora import add_lora
from distflow.models.sharded_loading import load_sharded_model
from distflow.models.sharding import Sharding, shard_model
from distflow.models.tensor_parallel import check_divisible
from distflow.models.tokenizer import load_tokenizer, stop_token_ids
from distflow.models.value_head import load_value_model
from distflow.pipelines.verifiers import verifiers_of
from distflow.planning.layout import Layout
from distflow.planning.model_size import count_parameters, parse_size
from distflow.planning.threads import share_threads, usable_cores
from distflow.rewards.router import Overlong, RewardRouter
from distflow.rollout.engine import RolloutEngine
from distflow.runtime.spec import Factory, Get
from distflow.training.engine import TrainEngine
from distflow.training.optim import make_optimizer
from distflow.training.schedule import make_schedule
from distflow.training.scorer import TorchScorer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_AT_ONCE = {"kv_on_update", "num_threads"}
Options = dict[str, object]
"""Keyword arguments of a constructor that is found by name, plain values."""


class Source(TypedDict):
    """Arguments of `load_model` and `load_value_model`: which model, whose weights."""

    path: str
    init: Init
    seed: int
    revision: str | None
    trust_remote_code: bool
    gguf_file: str | None


class Lora(TypedDict):
    """Arguments of `add_lora`."""

    rank: int
    alpha: float
    target_modules: str | list[str]
    seed: int


class OptimizerOptions(TypedDict):
    """Arguments of `make_optimizer`."""

    name: str
    lr: float
    weight_decay: float
    betas: NotRequired[tuple[float, float]]
    eps: NotRequired[float]


class ScheduleOptions(TypedDict):
    """Arguments of `make_schedule`."""

    name: str
    total_steps: int
    warmup_ratio: NotRequired[float]
    warmup_steps: NotRequired[int]
    min_lr_ratio: NotRequired[float]


class Optim(TypedDict):
    """How an engine takes its steps."""

    optimizer: OptimizerOptions
    schedule: ScheduleOptions


class ScorerOptions(TypedDict):
    """Arguments of `TorchScorer`, which train engines take as well."""

    max_tokens_per_micro_batch: int | None
    temperature: float
    temperatures: Mapping[str, float]
    compute_dtype: torch.dtype | None


class Spread(NamedTuple):
    """How a model lies over ranks, beside their mesh: see `Sharding`."""

    compute_dtype: torch.dtype
    on_host: bool


class Trainer(TypedDict):
    """A train engine but for its model. engine: "module:Class". options: of its constructor."""

    engine: str
    optim: Optim
    options: Options


def make_factories(
    config: Config, engines: Collection[str], services: Collection[str], steps: int
) -> dict[str, Factory]:
    """Of these, and of what they are made of. steps: training steps of the whole run."""
    factories: dict[str, Factory] = {
        "policy": partial(_policy, source=_policy_source(config), lora=_lora(config), spread=_spread(config, "actor")),
        "tokenizer": partial(_alone, make=_tokenizer_loader(config)),
        "stop_token_ids": _stop_token_ids,
    }
    if "actor" in engines:
        factories["actor"] = partial(_actor, **_actor_trainer(config, steps))
    if "critic" in engines:
        factories["critic"] = partial(
            _critic, source=_critic_source(config), spread=_spread(config, "critic"), **_critic_trainer(config, steps)
        )
    if "ref" in engines:
        settings = config.actor_rollout_ref
        options = _scorer_options(
            config, settings.ref.log_prob_max_token_len_per_gpu or settings.actor.ppo_max_token_len_per_gpu
        )
        if settings.model.lora_rank:
            factories["ref"] = partial(_adapted_policy, options=options)
        else:
            source, spread = _policy_source(config), _spread(config, "ref")
            factories["ref"] = partial(_reference, source=source, spread=spread, options=options)
    if "rollout" in engines:
        factories["rollout"] = _rollout_factory(config)
    if "judge" in services:
        factories["judge"] = partial(_judge, make=_router(config))
    return factories


def compute_dtype(config: Config) -> torch.dtype:
    """What models compute in; weights that are trained are float32 always."""
    return DTYPES[config.actor_rollout_ref.model.dtype]


def shares_weights(config: Config) -> bool:
    """Whether the rollout engine may compute on the trainer's own storage: whole weights, both in the stored dtype, and
    nothing is generated while the trainer updates it."""
    if compute_dtype(config) is not torch.float32 or is_sharded(config):
        return False
    return not is_rl(config) or config.async_.max_staleness == 0


def choose_device(config: Config) -> torch.device:
    """The device that `trainer.device` means on this machine. Raises UserError where it has none of that kind."""
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.device=cuda, but torch finds no CUDA device here: set trainer.device=auto or cpu")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)


def refuse_offload_here(config: Config, device: torch.device) -> None:
    """Raises UserError for a key that has something wait in the host's memory where that is the device's."""
    if device.type == "cpu" and (keys := offload_keys(config)):
        raise UserError(
            f"{', '.join(keys)}: what is on a CPU lies in the host's memory already (trainer.device="
            f"{config.trainer.device} is a CPU here): leave {'it' if len(keys) == 1 else 'them'} out"
        )


def planes_threads(config: Config) -> tuple[int | None, int | None]:
    """Threads of (training, generation) in each worker. None: as many as torch takes by itself, or a worker's share of
    its machine; and those of the thread that trains, which generates while it waits."""
    if not is_rl(config) or config.async_.max_staleness == 0:
        return config.trainer.num_threads, None
    trainer, rollout = config.trainer.num_threads, config.actor_rollout_ref.rollout.num_threads
    return share_threads(worker_cores(config), trainer, rollout)


def worker_cores(config: Config) -> int:
    """Cores for each worker of a machine."""
    beside = config.trainer.n_gpus_per_node if config.trainer.launcher == "ray" else 1
    return max(1, usable_cores() // beside)


def load_policy(config: Config, device: torch.device) -> nn.Module:
    """The model that is trained, whole, with its adapter where one is asked for. Raises UserError naming the key."""
    return _load_policy(_policy_source(config), _lora(config), device)


def policy_context(config: Config) -> int | None:
    """Tokens that a prompt and its response may have together, where the model says so. Raises UserError as
    `load_policy` does."""
    source = _policy_source(config)
    with _blaming("actor_rollout_ref.model.path"):
        return context_length(
            source["path"],
            revision=source["revision"],
            trust_remote_code=source["trust_remote_code"],
            gguf_file=source["gguf_file"],
        )


def model_sizes(config: Config, engines: Collection[str]) -> dict[str, int]:
    """Parameters of the model of each role: as `dag.model_sizes` says, else counted from its config.

    Raises UserError naming the key.
    """
    said, models = config.dag.model_sizes, sorted(set(engines) - {"rollout"})  # which serves the actor's weights
    with _blaming("dag.model_sizes"):
        if unknown := [role for role in said if role not in models]:
            raise UserError(f"the program has no model '{unknown[0]}'{hint(unknown[0], models)}")
        sizes = {role: parse_size(size) for role, size in said.items()}
    for role in (role for role in models if role not in said):
        key, source = _source_of(config, role)
        with _blaming(key):
            sizes[role] = _num_parameters(source)
    return sizes


def _source_of(config: Config, role: str) -> tuple[str, Source]:
    """With the key that names it."""
    if role == "critic" and config.critic.model.path is not None:
        return "critic.model.path", _critic_source(config)
    return "actor_rollout_ref.model.path", _policy_source(config)


def check_layouts(config: Config, layouts: Sequence[Layout]) -> None:
    """Raises UserError, naming the key, where the layers of a model cannot be divided as a layout has it."""
    adapted = config.actor_rollout_ref.model.lora_rank > 0
    for layout in layouts:
        if layout.sizes.tensor > 1:
            key, source = _source_of(config, layout.role)
            with _blaming(key):
                check_divisible(_model_config(source), layout.sizes.tensor, adapted and layout.role != "critic")


def load_policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The policy's tokenizer. Raises UserError naming the key where there is none."""
    return _tokenizer_loader(config)()


# What each factory carries.


def _policy_source(config: Config) -> Source:
    return _source(config, config.actor_rollout_ref.model.path)


def _source(config: Config, path: str | None) -> Source:
    settings = config.actor_rollout_ref.model
    assert path is not None, "the config's rules see to it"
    local = path.startswith(("builtin:", "package:")) or Path(path).expanduser().is_dir()
    return {
        "path": path,
        "init": "random" if settings.init == "random" else "pretrained",
        "seed": config.trainer.seed,
        "revision": None if local else settings.revision,
        "trust_remote_code": settings.trust_remote_code,
        "gguf_file": settings.gguf_file,
    }


def _num_parameters(source: Source) -> int:
    return count_parameters(_model_config(source).get_text_config().to_dict())


def _model_config(source: Source) -> PreTrainedConfig:
    return ModelSource(
        source["path"],
        revision=source["revision"],
        trust_remote_code=source["trust_remote_code"],
        gguf_file=source["gguf_file"],
    ).config()


def _lora(config: Config) -> Lora | None:
    settings = config.actor_rollout_ref.model
    if not settings.lora_rank:
        return None
    targets = settings.target_modules
    return {
        "rank": settings.lora_rank,
        "alpha": settings.lora_alpha,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "seed": config.trainer.seed,
    }


def _tokenizer_loader(config: Config) -> Callable[[], PreTrainedTokenizerBase]:
    settings, source = config.actor_rollout_ref.model, _policy_source(config)
    own = settings.tokenizer_path is None
    return partial(
        _load_tokenizer,
        settings.tokenizer_path or source["path"],
        key=f"actor_rollout_ref.model.{'path' if own else 'tokenizer_path'}",
        revision=source["revision"] if own else None,
        trust_remote_code=source["trust_remote_code"],
        gguf_file=source["gguf_file"] if own else None,
    )


def _actor_trainer(config: Config, steps: int) -> Trainer:
    actor = config.actor_rollout_ref.actor
    optim = _optim(actor.optim, optimizer_steps(config, "actor", steps))
    return _trainer(config, optim, actor.ppo_max_token_len_per_gpu, actor.max_grad_norm)


def _critic_trainer(config: Config, steps: int) -> Trainer:
    critic = config.critic
    optim = _optim(critic.optim, optimizer_steps(config, "critic", steps))
    max_tokens = critic.ppo_max_token_len_per_gpu or config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    return _trainer(config, optim, max_tokens, critic.max_grad_norm)


def _trainer(config: Config, optim: Optim, max_tokens: int | None, max_grad_norm: float | None) -> Trainer:
    settings = config.actor_rollout_ref
    return {
        "engine": TRAIN_ENGINES[settings.actor.strategy].target,
        "optim": optim,
        "options": {
            **_scorer_options(config, max_tokens),
            "max_grad_norm": max_grad_norm,
            "gradient_checkpointing": settings.model.enable_gradient_checkpointing,
        },
    }


def _critic_source(config: Config) -> Source:
    path = config.critic.model.path
    if path is None:
        return _policy_source(config)
    # What is said of the actor's file, commit and weights does not hold for another model.
    return {**_source(config, path), "gguf_file": None, "revision": None, "init": "pretrained"}


def _scorer_options(config: Config, max_tokens: int | None) -> ScorerOptions:
    settings = config.actor_rollout_ref
    return {
        "max_tokens_per_micro_batch": max_tokens,
        "temperature": settings.rollout.temperature if is_rl(config) else 1.0,
        "temperatures": temperatures(config) if is_rl(config) else {},
        "compute_dtype": None if is_sharded(config) else compute_dtype(config),
    }


def _spread(config: Config, role: Literal["actor", "critic", "ref"]) -> Spread | None:
    """None where every rank has the model whole."""
    if not is_sharded(config):
        return None
    settings = config.actor_rollout_ref
    if role == "ref":
        return Spread(compute_dtype(config), settings.ref.fsdp_config.param_offload)
    trained = config.critic.fsdp_config if role == "critic" else settings.actor.fsdp_config
    return Spread(compute_dtype(config), trained.offload_policy)


def _optim(optim: OptimConfig, updates: int) -> Optim:
    """updates: optimizer steps of the whole run."""
    optimizer: OptimizerOptions = {"name": optim.optimizer, "lr": optim.lr, "weight_decay": optim.weight_decay}
    if optim.optimizer != "sgd":
        optimizer |= {"betas": optim.betas, "eps": optim.eps}
    schedule: ScheduleOptions = {"name": optim.scheduler, "total_steps": max(updates, 1)}
    if optim.scheduler != "constant":
        schedule |= {"warmup_ratio": optim.warmup_ratio, "warmup_steps": optim.lr_warmup_steps}
        schedule |= {"min_lr_ratio": optim.min_lr_ratio}
    return {"optimizer": optimizer, "schedule": schedule}


def _rollout_factory(config: Config) -> Factory:
    """The engine's class says by its keyword-only parameters which keys of `rollout` it takes. Those that matter where
    generation and training run at once are read there only."""
    settings, target = config.actor_rollout_ref.rollout, ROLLOUT_ENGINES[config.actor_rollout_ref.rollout.name].target
    parameters = signature(cast(Callable[..., object], load(target))).parameters.values()
    taken = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in dir(settings)}
    if config.async_.max_staleness == 0:
        taken -= _AT_ONCE
    options = {name: getattr(settings, name) for name in sorted(taken)}
    if "num_threads" in options:
        options["num_threads"] = planes_threads(config)[1]
    return partial(
        _rollout,
        engine=target,
        dtype=compute_dtype(config),
        source=_policy_source(config) if config.actor_rollout_ref.model.lora_rank or is_sharded(config) else None,
        shares=shares_weights(config),
        options=options,
    )


def _router(config: Config) -> Callable[..., RewardRouter]:
    verifiers, overlong = verifiers_of(config), config.reward.overlong
    return partial(
        RewardRouter,
        verifiers.functions,
        **verifiers.patience._asdict(),
        domains=verifiers.domains,
        overlong=Overlong(overlong.buffer_tokens, overlong.factor),
        max_response_length=config.data.max_response_length,
        response_limits={name: response_limit(config, name) for name in config.data.domains},
        custom=verifiers.custom,
    )


# What they build, on the worker.


def _alone(get: Get, device: torch.device, make: Callable[[], object]) -> object:
    """A part that is made of no other."""
    return make()


def _judge(get: Get, device: torch.device, make: Callable[..., RewardRouter]) -> RewardRouter:
    return make(start=get("start_pool"))


def _policy(get: Get, device: torch.device, source: Source, lora: Lora | None, spread: Spread | None) -> nn.Module:
    """Sharded where it is trained; what only generates has it whole."""
    if spread is None or not get.planned("actor"):
        return _load_policy(source, lora, device)
    sharding = _sharding(get, spread)
    if lora is None:
        with _blaming("actor_rollout_ref.model.path"):
            return load_sharded_model(**source, sharding=sharding, device=device)
    model = _load_policy(source, lora, device)
    shard_model(model, sharding)
    return model


def _sharding(get: Get, spread: Spread) -> Sharding:
    mesh: DeviceMesh | None = get("mesh")
    if mesh is None:
        raise UserError(
            "actor.strategy=fsdp spreads weights over the processes that train, and this run has one: set "
            "trainer.launcher=ray, or actor.strategy=torch"
        )
    return Sharding(mesh, spread.compute_dtype, spread.on_host)


def _load_policy(source: Source, lora: Lora | None, device: torch.device) -> nn.Module:
    with _blaming("actor_rollout_ref.model.path"):
        model = load_model(**source, device=device)
    return add_lora(model, **lora) if lora else model


def _load_tokenizer(
    path: str, key: str, revision: str | None, trust_remote_code: bool, gguf_file: str | None
) -> PreTrainedTokenizerBase:
    with _blaming(key):
        return load_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code, gguf_file=gguf_file)


def _stop_token_ids(get: Get, device: torch.device) -> tuple[int, ...]:
    return stop_token_ids(get("policy"), get("tokenizer"))


def _actor(get: Get, device: torch.device, engine: str, optim: Optim, options: Options) -> TrainEngine:
    return _train_engine(get, get("policy"), engine, optim, options)


def _critic(
    get: Get,
    device: torch.device,
    source: Source,
    spread: Spread | None,
    engine: str,
    optim: Optim,
    options: Options,
) -> TrainEngine:
    with _blaming("critic.model.path"):
        if spread is None:
            model = load_value_model(**source, device=device)
        else:
            model = load_sharded_model(**source, sharding=_sharding(get, spread), critic=True, device=device)
    return _train_engine(get, model, engine, optim, options)


def _train_engine(get: Get, model: nn.Module, engine: str, optim: Optim, options: Options) -> TrainEngine:
    return cast(Callable[..., TrainEngine], load(engine))(
        model,
        optimizer=make_optimizer(parameters=model.parameters(), **optim["optimizer"]),
        schedule=make_schedule(**optim["schedule"]),
        group=get("collective"),
        **options,
    )


def _reference(
    get: Get, device: torch.device, source: Source, spread: Spread | None, options: ScorerOptions
) -> TorchScorer:
    """The policy as it was before training."""
    if spread is None:
        model: nn.Module = load_model(**source, device=device)
    else:
        model = load_sharded_model(**source, sharding=_sharding(get, spread), device=device)
    return TorchScorer(model.requires_grad_(False), group=get("collective"), **options)


def _adapted_policy(get: Get, device: torch.device, options: ScorerOptions) -> TorchScorer:
    """The policy with its adapter switched off, which is what it was before training."""
    return TorchScorer(get("policy"), without_adapter=True, group=get("collective"), **options)


def _rollout(
    get: Get,
    device: torch.device,
    engine: str,
    dtype: torch.dtype,
    source: Source | None,
    shares: bool,
    options: Options,
) -> RolloutEngine:
    """On the trainer's own storage where that is on this worker, and it may be shared; else on a copy, without an
    adapter: its weights arrive merged.

    source: of the model whole and without an adapter, None where the policy is just that. shares: both compute in the
    stored dtype (float32), and nothing is decoded while weights change.
    """
    shares = shares and get.planned("actor")
    if shares:
        model: nn.Module = get("policy")
    else:
        plain: nn.Module = load_model(**source, device=device) if source else copy.deepcopy(get("policy"))
        model = plain.to(dtype).requires_grad_(False)
    make = cast(Callable[..., RolloutEngine], load(engine))
    return make(model, get("tokenizer"), version=Version(0, 0), shares_weights=shares, **options)


@contextmanager
def _blaming(key: str) -> Iterator[None]:
    """Say which key it was that named what cannot be loaded."""
    try:
        yield
    except UserError as err:
        raise UserError(f"{key}: {err}") from err
