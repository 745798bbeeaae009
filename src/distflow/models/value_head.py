"""Critics: a decoder with one linear output a token, stored as a `transformers` token classifier with one label."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel

from distflow.config.errors import UserError
from distflow.models.loading import Init, ModelSource, random_model, ready
from distflow.models.shards import fill

VALUE_HEAD = "score."
"""How the names of a value head's weights begin."""


def load_value_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    init: Init = "pretrained",
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
) -> PreTrainedModel:
    """A critic from a language model's or a critic's folder; arguments and errors as `load_model`.

    A folder without a value head (`score`) gets a fresh one by `seed`, small enough that values start near 0.
    """
    source = ModelSource(path, revision=revision, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    config = value_config(source)
    if init == "random":
        model, missing = random_model(AutoModelForTokenClassification, config, seed), [f"{VALUE_HEAD}weight"]
    else:
        model, missing = source.pretrained(AutoModelForTokenClassification, config, dtype, surplus=("lm_head.",))
    if not hasattr(model, "score"):
        raise _no_critic(source, config)
    source.require_all([name for name in missing if not name.startswith(VALUE_HEAD)])
    if missing:
        fresh_value_head(model, seed)
    return ready(model, dtype, device)


def fresh_value_head(model: nn.Module, seed: int) -> None:
    """Normal weights of deviation 1 / (width + 1) and a zero bias: values of normalised states start near 0."""
    score: nn.Linear = model.score  # type: ignore[assignment]  # found by its name
    weights = torch.randn(score.weight.shape, generator=torch.Generator().manual_seed(seed))
    fill(score.weight, weights / (score.in_features + 1))
    if score.bias is not None:
        fill(score.bias, torch.zeros(score.bias.shape))


def value_config(source: ModelSource) -> PreTrainedConfig:
    """The config of a critic with one label. Raises UserError for a family without such a classifier."""
    config = source.config()
    if type(config) not in AutoModelForTokenClassification._model_mapping:
        raise _no_critic(source, config)
    config.num_labels = 1
    config.classifier_dropout = 0.0
    return config


def _no_critic(source: ModelSource, config: PreTrainedConfig) -> UserError:
    return UserError(
        f"{source} cannot be a critic: transformers has no token classifier with a linear 'score' for the family "
        f"'{config.model_type}'; set critic.model.path to a model of another family (llama, qwen2, qwen3, mistral, ...)"
    )
