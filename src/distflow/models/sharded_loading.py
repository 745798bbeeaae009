"""Loads models over several ranks: each reads its own part of every weight, and none ever holds the whole model."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from distflow.errors import UserError
from distflow.models.loading import Init, ModelSource, disable_dropout, load_model, refuse_garbage
from distflow.models.packed_forward import attach_packed_forward, choose_attention
from distflow.models.paths import is_local
from distflow.models.sharding import Sharding, fill, shard_model
from distflow.models.value_and_reward_models import VALUE_HEAD, fresh_value_head, load_value_model, value_config

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_sharded_model(
    path: str | Path,
    sharding: Sharding,
    *,
    critic: bool = False,
    device: torch.device | str = "cpu",
    init: Init = "pretrained",
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
) -> PreTrainedModel:
    """What `load_model` gives, or with `critic` `load_value_model`, in float32 and spread over the ranks of `sharding`.

    The model is made without weights, and each rank reads its part of the folder's safetensors. Fresh weights and those
    of a GGUF file cannot be had in parts: each rank makes them whole first. All ranks call this.
    Raises UserError as those do, and where the weights are not stored as the model names and shapes them.
    """
    if init == "random" or gguf_file is not None:
        whole_model = (load_value_model if critic else load_model)(
            path,
            device=device,
            init=init,
            seed=seed,
            revision=revision,
            trust_remote_code=trust_remote_code,
            gguf_file=gguf_file,
        )
        shard_model(whole_model, sharding)
        return whole_model
    source = ModelSource(path, revision=revision, trust_remote_code=trust_remote_code)
    config = value_config(source) if critic else source.config()
    model = _without_weights(AutoModelForTokenClassification if critic else AutoModelForCausalLM, config)
    disable_dropout(model)
    attach_packed_forward(model)
    shard_model(model, sharding)
    kept_on = "cpu" if sharding.on_host else device
    model._apply(lambda tensor: torch.empty_like(tensor, device=kept_on) if tensor.is_meta else tensor.to(device))
    missing = _read(model, source)
    if critic:
        source.require_all([name for name in missing if not name.startswith(VALUE_HEAD)])
        if missing:
            fresh_value_head(model, seed)
    else:
        source.require_all(missing)
    refuse_garbage(model)
    choose_attention(model)
    return model.eval()


def _read(model: PreTrainedModel, source: ModelSource) -> list[str]:
    """Fill the model with what its folder holds; the names of weights that it does not hold, whose values are any."""
    with source.readable():
        folder = _folder(source)
        files = _files(folder)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        stored = model.state_dict().keys()
        own: dict[str, Tensor] = dict(model.named_parameters())
        own |= {name: buffer for name, buffer in model.named_buffers() if name in stored}
        for name in sorted(own.keys() & files.keys()):
            with safe_open(files[name], "pt") as tensors:  # opened for each: what is mapped of a file stays until then
                _fill_from(own[name], tensors.get_slice(name), f"'{name}' of {files[name]}")
    return sorted(own.keys() - files.keys())


def _fill_from(tensor: Tensor, values: Any, what: str) -> None:
    """values: a slice of `safetensors`, which has no type."""
    if list(values.get_shape()) != list(tensor.shape):
        raise UserError(f"{what} has the shape {values.get_shape()}, the model's is {list(tensor.shape)}")
    fill(tensor, values)


def _files(folder: Path) -> dict[str, Path]:
    """Which file of the folder holds each tensor."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text("utf-8"))
        return {name: folder / file for name, file in index["weight_map"].items()}
    if not (folder / _SINGLE).is_file():
        raise UserError(f"'{folder}' has no safetensors ({_INDEX} or {_SINGLE}): they can be read in parts, others not")
    with safe_open(folder / _SINGLE, "pt") as tensors:
        return dict.fromkeys(tensors.keys(), folder / _SINGLE)


def _folder(source: ModelSource) -> Path:
    if is_local(source.path):
        return Path(source.path)
    revision = source.options["revision"]
    assert revision is None or isinstance(revision, str)
    return Path(snapshot_download(source.path, revision=revision, allow_patterns=["*.json", "model*.safetensors"]))


def _without_weights(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """The model with parameters that have a shape and no memory; its buffers are real, as no file has them."""
    register = nn.Module.register_parameter

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # tied ones stay one
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = emptied  # type: ignore[method-assign, assignment]  # its argument has another name
    try:
        return auto_class.from_config(config, dtype=torch.float32)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
