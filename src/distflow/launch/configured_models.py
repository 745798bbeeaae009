"""The models and tokenizer that a config names: their sizes, and loading them."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config, RunLimits
from distflow.config.derived_settings import frozen_models, model_of, trains_scores
from distflow.config.keys.reward import REWARD_MODEL, scoring_models
from distflow.errors import UserError, blaming, hint
from distflow.graph import BoundPipeline
from distflow.graph.node_roles import ENGINES
from distflow.hub_id_or_local_path import WEIGHT_PATTERNS, is_local_model
from distflow.launch.devices import accelerator, choose_device, choose_dtype
from distflow.launch.plans.measured_run import as_predicted, measured_run
from distflow.models.cached_decoder import why_not_embedded
from distflow.models.loading import (
    ModelSource,
    SourceOptions,
    context_length,
    has_image_processor,
    load_model,
    load_tokenizer,
)
from distflow.models.lora import add_lora, check_targets, require_peft
from distflow.models.model_paths import BUILTIN_FOLDER, BUILTIN_PREFIX, resolve_path
from distflow.models.sharding import Sharding, shard_model, why_not_divided
from distflow.planning.devices import find_device
from distflow.planning.independent_parts import parse_size
from distflow.planning.layouts import Layout, alternatives
from distflow.planning.model_shapes import ModelShape
from distflow.planning.plan import Plan
from distflow.planning.predicted_run import RunFacts, predict
from distflow.runtime.checkpoint.find_checkpoint import is_of_a_run


class Source(SourceOptions):
    """Arguments of `load_model`: the model, and which of its weights."""

    path: str


Adapt = Callable[[PreTrainedModel], nn.Module]
"""Puts an adapter on a model."""


def compute_dtype(config: Config) -> torch.dtype:
    """The dtype that models compute in; trained weights are always float32."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[choose_dtype(config)]


def load_policy(config: Config, device: torch.device) -> nn.Module:
    """The trained model, whole, with its adapter if there is one. Raises UserError with the key."""
    return load_adapted(policy_source(config), policy_adapter(config), device)


def copy_weights(weights: Mapping[str, Tensor], model: nn.Module) -> str:
    """Copy weights into the model's parameters of the same names. Returns "", or the name of a
    weight that the model lacks in that shape, in which case nothing is copied."""
    own = dict(model.named_parameters())
    for name, weight in weights.items():
        if name not in own or own[name].shape != weight.shape:
            return name

    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)

    return ""


def builtin_models() -> Iterator[tuple[str, dict[str, Any], bool]]:
    """The path of each built-in model, its config, and whether it has weights."""
    for file in sorted(BUILTIN_FOLDER.glob("*/config.json")):
        has_weights = any(any(file.parent.glob(pattern)) for pattern in WEIGHT_PATTERNS)
        yield f"{BUILTIN_PREFIX}{file.parent.name}", json.loads(file.read_text()), has_weights


def policy_limits(config: Config) -> RunLimits:
    """What the model's config limits; loads no weights. Raises UserError as `load_policy` does."""
    source = policy_source(config)
    settings = config.actor_rollout_ref.model

    with blaming("actor_rollout_ref.model.path"):
        model = ModelSource(**source).config().get_text_config()
        reads_images = has_image_processor(resolve_path(source["path"]), source["revision"])
        why = why_not_embedded(model) or ("it reads images" if reads_images else None)
        limits = RunLimits(context=context_length(**source), not_embedded=why)
        is_plain = not reads_images and type(model) in AutoModelForCausalLM._model_mapping

    if settings.lora_rank:
        with blaming("actor_rollout_ref.model.lora_rank"):
            require_peft()

    if settings.lora_rank and settings.target_modules != "all-linear" and is_plain:
        with blaming("actor_rollout_ref.model.target_modules"):
            check_targets(_without_weights(source), settings.target_modules)

    return limits


def model_sizes(config: Config, engines: Collection[str]) -> dict[str, int]:
    """Parameters of the model of each role: from `dag.model_sizes`, else counted from its config.

    Raises UserError naming the key.
    """
    given_sizes = config.dag.model_sizes
    models = sorted({*engines} - {"rollout"})  # which has the actor's weights

    for role in given_sizes:
        if role not in models:
            near = hint(role, models)
            raise UserError(f"dag.model_sizes: the pipeline has no model '{role}'{near}")

    sizes = {}
    for role in models:
        if role in given_sizes:
            with blaming("dag.model_sizes"):
                sizes[role] = parse_size(given_sizes[role])
            continue

        key, source = source_of(config, role)
        with blaming(key):
            sizes[role] = int(_without_weights(source).num_parameters())

    return sizes


def _without_weights(source: Source) -> PreTrainedModel:
    """The language model, which takes no memory here. Raises UserError if it is not one."""
    config = ModelSource(**source).config().get_text_config()
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, trust_remote_code=source["trust_remote_code"]
            )
    except ValueError as err:
        raise UserError(
            f"transformers has no language model '{config.model_type}': set its size, e.g. "
            "dag.model_sizes.actor=7B"
        ) from err


def source_of(config: Config, role: str) -> tuple[str, Source]:
    """The model of a role, with the key that names it."""
    if role in frozen_models(config):
        return frozen_source(config, role)
    key, path = model_of(config, role)
    if key == "actor_rollout_ref.model.path":
        return key, policy_source(config)
    return key, _other_source(config, path)


def prediction(config: Config, pipeline: BoundPipeline, plan: Plan, rows: int) -> dict[str, Any]:
    """What `distflow plan` predicts, with its `line`; empty for a device or a model type that it
    does not know, or if this process has no such device. rows: of the training data. Raises
    UserError for a run that cannot calibrate it."""
    kind = choose_device(config).type
    measured = None
    if config.trainer.plan_from:
        measured = measured_run(config.trainer.plan_from)

    if kind not in ("cpu", accelerator()) or not pipeline.engines:
        return {}

    shapes = {}
    try:
        # backends may lack it
        named_by = getattr(torch.get_device_module(), "get_device_name", str)
        device = find_device("cpu" if kind == "cpu" else named_by())
        for role in pipeline.engines:
            model = ModelSource(**source_of(config, role)[1]).config()
            shapes[role] = ModelShape.of(model.to_dict())
    except UserError:
        return {}

    known = RunFacts(RunLimits(rows))
    if measured is not None:
        rates = measured.rates(pipeline, device)
        known = replace(known, lengths=measured.lengths(config), rates=rates)

    run = predict(config, pipeline, shapes, device, known, plan)
    return {**as_predicted(run, device, shapes), "line": run.line()}


def check_layouts(config: Config, layouts: Sequence[Layout]) -> None:
    """Raises UserError, with the key, if a model's layers, experts or rows cannot be divided as in
    a layout."""
    adapted = config.actor_rollout_ref.model.lora_rank > 0
    for layout in layouts:
        sizes = layout.sizes
        # one that judges is whole on each rank
        if sizes.tensor * sizes.expert * sizes.context == 1 or layout.engine in ROLLOUT_ENGINES:
            continue

        key, source = source_of(config, layout.role)
        if is_of_a_run(source["path"]):
            continue  # it is checked once the run's policy is exported
        with blaming(key):
            has_adapter = adapted and layout.role in ("actor", "ref")
            _check_sizes(layout, ModelSource(**source).config(), has_adapter)


def _check_sizes(layout: Layout, model: PreTrainedConfig, adapted: bool) -> None:
    reasons = list[str]()
    for sizes in alternatives(layout.sizes):
        reason = why_not_divided(model, sizes.tensor, sizes.expert, adapted, sizes.context)
        if reason is not None:
            reasons.append(reason)
        elif reasons:
            raise UserError(
                f"{reasons[0]}: write for example {layout.engine}[{layout.role}]:{sizes} in "
                "trainer.allocation"
            )
        else:
            return


def policy_source(config: Config) -> Source:
    """The source of the trained model: a reward model's, if the pipeline trains one."""
    return {**_source(config, config.actor_rollout_ref.model.path), "scores": trains_scores(config)}


def critic_source(config: Config) -> Source:
    return source_of(config, "critic")[1]


def _other_source(config: Config, path: str | None) -> Source:
    """A model that is not the policy's, to which its file, commit and init do not apply."""
    return {**_source(config, path), "gguf_file": None, "revision": None, "init": "pretrained"}


def frozen_source(config: Config, name: str) -> tuple[str, Source]:
    """The source of a reward model, a judge or a teacher, with the key that names it."""
    key, path = model_of(config, name)
    scoring = scoring_models(config.reward_model).get(name)
    own: SourceOptions = {
        "gguf_file": None,
        "revision": None,
        "init": "pretrained",
        "trust_remote_code": False,
        "scores": scoring is not None and not scoring.judge,
    }

    return key, {**_source(config, path), **own}


def check_engines(config: Config, engines: Collection[str]) -> None:
    """Raises UserError for an engine that a node of the pipeline requires and the config lacks."""
    models = frozen_models(config)
    for engine in sorted({*engines} - ({*ENGINES} - {REWARD_MODEL}) - {*models}):
        key = "reward_model.model.path"
        if engine != REWARD_MODEL:
            key = f"reward_model.models.{engine}"

        near = hint(engine, [name for name in (*ENGINES, *models) if name != engine])
        raise UserError(
            f"{key}: a node of the pipeline needs the engine '{engine}'{near}; set the key"
        )


def _source(config: Config, path: str | None) -> Source:
    settings = config.actor_rollout_ref.model
    assert path is not None, "the config's rules see to it"
    return {
        "path": path,
        "init": "random" if settings.init == "random" else "pretrained",
        "seed": config.trainer.seed,
        "revision": None if is_local_model(path) else settings.revision,
        "trust_remote_code": settings.trust_remote_code,
        "gguf_file": settings.gguf_file,
    }


def policy_adapter(config: Config) -> Adapt | None:
    model = config.actor_rollout_ref.model
    if not model.lora_rank:
        return None

    return partial(
        add_lora,
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=model.target_modules,
        seed=config.trainer.seed,
    )


def load_adapted(
    source: Source, adapt: Adapt | None, device: torch.device, sharding: Sharding | None = None
) -> nn.Module:
    """The policy's model. An adapter is added to the whole model, which is sharded afterwards."""
    with blaming("actor_rollout_ref.model.path"):
        model = load_model(**source, sharding=None if adapt else sharding, device=device)
    if adapt is None:
        return model

    adapted = adapt(model)
    if sharding is not None:
        shard_model(adapted, sharding)
    return adapted


def load_policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Raises UserError, with the key, if there is none."""
    source = policy_source(config)
    trusts_code = source["trust_remote_code"]
    path = config.actor_rollout_ref.model.tokenizer_path
    if path is not None:
        with blaming("actor_rollout_ref.model.tokenizer_path"):
            return load_tokenizer(path, trust_remote_code=trusts_code)

    with blaming("actor_rollout_ref.model.path"):
        return load_tokenizer(
            source["path"],
            revision=source["revision"],
            trust_remote_code=trusts_code,
            gguf_file=source["gguf_file"],
        )
