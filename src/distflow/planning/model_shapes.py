"""The sizes of a decoder, from its `config.json` or the table of known models
(`model_shapes.toml`), and the weights and operations that follow from them."""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from distflow.errors import UserError, blaming, hint
from distflow.hub_id_or_local_path import is_local_model
from distflow.untrusted_files import MAX_SOURCE_BYTES, read_file

_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3")
_MIXTURES = ("mixtral", "qwen3_moe")
_SUFFIXES = ("-instruct-2507", "-instruct", "-base", "-chat", "-it", "-hf")
"""Endings that a name in the hub may have after the name in the table, the longest first."""


@dataclass(frozen=True)
class ModelShape:
    hidden: int
    intermediate: int
    """The inner size of the MLP, or of each expert's."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """Whether the head has the weights of the embedding."""
    bias: bool = False
    """Of the projections to queries, keys and values."""
    norms: int = 2
    """Vectors of size `hidden` in each layer."""
    head_norms: bool = False
    """Whether queries and keys are normalised."""
    experts: int = 0
    """0 for a dense model."""
    active_experts: int = 1
    context: int | None = None
    """The most tokens that it attends to; None if unknown."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> "ModelShape":
        """Of the content of a `config.json`. Raises UserError for an unknown model type or missing
        sizes."""
        config = config.get("text_config") or config
        kind = str(config.get("model_type"))
        if kind not in (*_DENSE, *_MIXTURES):
            known = ", ".join((*_DENSE, *_MIXTURES))
            raise UserError(f"a plan does not know the model type '{kind}'; it knows {known}")

        try:
            shape = _shape_of(kind, config)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"the config of a '{kind}' lacks a size or has a wrong one: {error}"
            ) from error

        for name in ("hidden", "layers", "heads", "kv_heads", "vocabulary", "intermediate"):
            if getattr(shape, name) < 1:
                raise UserError(f"the config of a '{kind}' has a size below 1")

        return shape

    @property
    def attention_weights(self) -> int:
        """In the matrices of one layer's attention."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """In the matrices of one layer's MLP, or of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer_weights(self) -> int:
        """In all matrices of one layer."""
        return self.attention_weights + self.expert_weights * max(self.experts, 1)

    def computed_weights(self, tensor: int, expert: int) -> float:
        """In all matrices of one layer with which a rank computes, of ranks that divide layers and
        experts so."""
        inner = self.expert_weights * max(self.experts, 1)
        return self.attention_weights / tensor + inner / max(tensor, expert)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All, tied ones once."""
        layer = self.layer_weights + self.experts * self.hidden + self.norms * self.hidden
        if self.head_norms:
            layer += 2 * self.head_dim
        if self.bias:
            layer += (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.head_weights * (2 - self.tied) + self.layers * layer + self.hidden

    @property
    def active_weights(self) -> int:
        """In the matrices that one token multiplies, without the head."""
        return self.layers * (self.attention_weights + self.expert_weights * self.active_experts)

    @property
    def kv_elements(self) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, tokens: float, context: float, logits: float) -> float:
        """Of a forward pass over `tokens` that attend to `context` tokens on average, with `logits`
        rows of the head; a multiplication and an addition are two."""
        attention = 4 * self.layers * self.heads * self.head_dim * tokens * context
        return 2 * tokens * self.active_weights + attention + 2 * logits * self.head_weights


def _shape_of(kind: str, config: Mapping[str, Any]) -> ModelShape:
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])

    inner = "intermediate_size"
    if kind == "qwen3_moe":
        inner = "moe_intermediate_size"

    experts = 0
    active_experts = 1
    if kind in _MIXTURES:
        experts = int(config.get("num_experts") or config["num_local_experts"])
        active_experts = int(config["num_experts_per_tok"])

    return ModelShape(
        hidden=hidden,
        intermediate=int(config[inner]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", kind == "gemma2")),
        bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
        norms=4 if kind == "gemma2" else 2,
        head_norms=kind in ("qwen3", "qwen3_moe"),
        experts=experts,
        active_experts=active_experts,
        context=config.get("max_position_embeddings"),
    )


@cache
def _table() -> dict[str, ModelShape]:
    """Shapes by name; models of the same shape have several."""
    text = files("distflow.planning").joinpath("model_shapes.toml").read_text("utf-8")
    found: dict[str, ModelShape] = {}
    for name, entry in tomllib.loads(text).items():
        shape = ModelShape.of(entry["config"])
        for each in (name, *entry.get("also", ())):
            found[each] = shape

    return found


def find_shape(path: str, folder: Path | None) -> ModelShape:
    """The shape of the model that `path` names. folder: its local folder, if it is one; else a
    config of that name in the hub's cache, or the table of known models. Raises UserError for a
    model without a config."""
    if folder is not None:
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(f"the folder '{path}' has no config.json")
        return _read(file)

    for file in _cached_configs(path):
        return _read(file)

    name = path.rpartition("/")[2].lower()
    for suffix in _SUFFIXES:
        if name not in _table():
            name = name.removesuffix(suffix)

    if name in _table():
        return _table()[name]

    raise UserError(
        f"there is no config.json of '{path}' on this machine, and no known model has that "
        f"name{hint(name, _table())}: write the folder of a model, builtin:NAME, or a name such as "
        "qwen2.5-7b"
    )


def _cached_configs(name: str) -> list[Path]:
    """Files of an id in the hub's cache."""
    if "/" not in name or is_local_model(name):
        return []
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")
    return sorted(file for file in found if file.is_file())


def _read(file: Path) -> ModelShape:
    try:
        content = json.loads(read_file(file, max_bytes=MAX_SOURCE_BYTES))
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as a model's config: {error}") from error

    with blaming(str(file)):
        return ModelShape.of(content)
