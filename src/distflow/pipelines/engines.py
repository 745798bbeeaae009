"""From the config to engines: which model, in which precision, sharing what."""

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.config.actor import OptimConfig
from distflow.config.errors import UserError
from distflow.config.functions import load
from distflow.config.names import ROLLOUT_ENGINES, TRAIN_ENGINES
from distflow.config.program import optimizer_steps
from distflow.flow.ticket import Version
from distflow.models.loading import load_model
from distflow.models.lora import add_lora
from distflow.models.tokenizer import load_tokenizer
from distflow.models.value_head import load_value_model
from distflow.rollout.engine import RolloutEngine
from distflow.runtime.parts import Engines
from distflow.training.engine import TrainEngine
from distflow.training.optim import make_optimizer
from distflow.training.schedule import make_schedule
from distflow.training.scorer import TorchScorer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(config: Config) -> torch.dtype:
    """What models compute in; weights that are trained are float32 always."""
    return DTYPES[config.actor_rollout_ref.model.dtype]


def shares_weights(config: Config) -> bool:
    """Whether the rollout engine computes on the trainer's own storage: where both compute in the stored dtype."""
    return compute_dtype(config) is torch.float32


def build_engines(config: Config, model: nn.Module, needed: Collection[str], tokenizer: Any, steps: int) -> Engines:
    """The engines that the program uses, and no other. steps: training steps of the whole run.

    model: the policy, from `load_policy`. Raises UserError for a model that cannot be loaded.
    """
    actor, updates = config.actor_rollout_ref.actor, optimizer_steps(config, "actor", steps)
    return Engines(
        actor=_train_engine(config, model, actor.optim, updates, actor.ppo_max_token_len_per_gpu, actor.max_grad_norm),
        critic=_critic(config, steps) if "critic" in needed else None,
        ref=_reference(config, model) if "ref" in needed else None,
        rollout=_rollout(config, model, tokenizer) if "rollout" in needed else None,
    )


def load_policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The policy's tokenizer. Raises UserError naming the key where there is none."""
    settings = config.actor_rollout_ref.model
    own = settings.tokenizer_path is None
    with _blaming("actor_rollout_ref.model.path" if own else "actor_rollout_ref.model.tokenizer_path"):
        return load_tokenizer(
            settings.tokenizer_path or str(settings.path),
            revision=settings.revision if own else None,
            trust_remote_code=settings.trust_remote_code,
            gguf_file=settings.gguf_file if own else None,
        )


@contextmanager
def _blaming(key: str) -> Iterator[None]:
    """Say which key it was that named what cannot be loaded."""
    try:
        yield
    except UserError as err:
        raise UserError(f"{key}: {err}") from err


def load_policy(config: Config) -> nn.Module:
    """The model that is trained, with its adapter where one is asked for. Raises UserError naming the key."""
    settings = config.actor_rollout_ref.model
    with _blaming("actor_rollout_ref.model.path"):
        model: nn.Module = load_model(**_source(config, settings.path))
    if settings.lora_rank:
        targets = settings.target_modules
        model = add_lora(
            model,  # type: ignore[arg-type]
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,  # type: ignore[arg-type]
            target_modules=targets if isinstance(targets, str) else list(targets),
            seed=config.trainer.seed,
        )
    return model


def _source(config: Config, path: str | None) -> dict[str, Any]:
    settings = config.actor_rollout_ref.model
    assert path is not None, "the config's rules see to it"
    return {
        "path": path,
        "device": choose_device(config),
        "init": settings.init,
        "seed": config.trainer.seed,
        "revision": settings.revision,
        "trust_remote_code": settings.trust_remote_code,
        "gguf_file": settings.gguf_file,
    }


def choose_device(config: Config) -> torch.device:
    """The device that `trainer.device` means on this machine. Raises UserError where it has none of that kind."""
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.device=cuda, but torch finds no CUDA device here: set trainer.device=auto or cpu")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)


def _train_engine(
    config: Config, model: nn.Module, optim: OptimConfig, updates: int, max_tokens: int, max_grad_norm: float
) -> TrainEngine:
    optimizer = make_optimizer(
        optim.optimizer,
        model.parameters(),
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        eps=optim.eps,
    )
    schedule = make_schedule(
        optim.scheduler,
        total_steps=max(updates, 1),
        warmup_ratio=optim.warmup_ratio,
        warmup_steps=optim.lr_warmup_steps,
        min_lr_ratio=optim.min_lr_ratio,
    )
    make_engine = cast(Callable[..., TrainEngine], load(TRAIN_ENGINES[config.actor_rollout_ref.actor.strategy].target))
    return make_engine(
        model,
        optimizer=optimizer,
        schedule=schedule,
        max_tokens_per_micro_batch=max_tokens,
        temperature=config.actor_rollout_ref.rollout.temperature,
        max_grad_norm=max_grad_norm,
        compute_dtype=compute_dtype(config),
        gradient_checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
    )


def _critic(config: Config, steps: int) -> TrainEngine:
    settings, actor = config.critic, config.actor_rollout_ref.actor
    source = _source(config, settings.model.path or config.actor_rollout_ref.model.path)
    if settings.model.path is not None:  # what is said of the actor's file, commit and weights does not hold for it
        source |= {"gguf_file": None, "revision": None, "init": "pretrained"}
    model = load_value_model(**source)
    updates = optimizer_steps(config, "critic", steps)
    max_tokens = settings.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    return _train_engine(config, model, settings.optim, updates, max_tokens, settings.max_grad_norm)


def _reference(config: Config, policy: nn.Module) -> TorchScorer:
    """The policy as it was before training; with an adapter that is the policy with the adapter switched off."""
    settings = config.actor_rollout_ref
    has_adapter = settings.model.lora_rank > 0
    model = policy if has_adapter else load_model(**_source(config, settings.model.path)).requires_grad_(False)
    return TorchScorer(
        model,
        max_tokens_per_micro_batch=settings.ref.log_prob_max_token_len_per_gpu
        or settings.actor.ppo_max_token_len_per_gpu,
        temperature=settings.rollout.temperature,
        compute_dtype=compute_dtype(config),
        without_adapter=has_adapter,
    )


def _rollout(config: Config, policy: nn.Module, tokenizer: Any) -> RolloutEngine:
    """An engine on the policy's own storage, or on a copy in the dtype that it computes in."""
    shares = shares_weights(config)
    model = policy if shares else _inference_copy(config, policy)
    return _rollout_class(config)(
        model, tokenizer, version=Version(0, 0), shares_weights=shares, **rollout_settings(config)
    )


def rollout_settings(config: Config) -> dict[str, object]:
    """The values of `actor_rollout_ref.rollout` that the chosen engine takes: by the names of keyword-only parameters
    of its class."""
    settings = config.actor_rollout_ref.rollout
    parameters = signature(_rollout_class(config)).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and hasattr(settings, p.name)]
    return {name: getattr(settings, name) for name in names}


def _rollout_class(config: Config) -> Callable[..., RolloutEngine]:
    return cast(Callable[..., RolloutEngine], load(ROLLOUT_ENGINES[config.actor_rollout_ref.rollout.name].target))


def _inference_copy(config: Config, policy: nn.Module) -> nn.Module:
    """Without an adapter: its weights arrive merged."""
    if config.actor_rollout_ref.model.lora_rank:
        model: nn.Module = load_model(**_source(config, config.actor_rollout_ref.model.path))
    else:
        model = copy.deepcopy(policy)
    return model.to(compute_dtype(config)).requires_grad_(False)
