"""What a plan knows without a device or weights: the shape of a model, from its `config.json` or
the table of known models, and the figures of a device."""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from distflow.errors import UserError, blaming, hint
from distflow.hub_id_or_local_path import is_local_model
from distflow.untrusted_files import MAX_SOURCE_BYTES, read_file

GB = 10**9
_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3")
_MIXTURES = ("mixtral", "qwen3_moe")
_SUFFIXES = ("-instruct", "-it", "-base", "-chat", "-instruct-2507", "-hf")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder. experts: 0 for a dense model; `intermediate` is then that of each
    expert's layer.

    bias: of q, k and v. norms: vectors of size `hidden` in each layer. head_norms: norms of q and
    k.
    context: the most tokens that it attends to, None if unknown.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    bias: bool = False
    norms: int = 2
    head_norms: bool = False
    experts: int = 0
    active_experts: int = 1
    context: int | None = None

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
            hidden = int(config["hidden_size"])
            heads = int(config["num_attention_heads"])
            is_mixture = kind in _MIXTURES
            shape = ModelShape(
                hidden=hidden,
                intermediate=int(
                    config["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"]
                ),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                vocabulary=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", kind == "gemma2")),
                bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
                norms=4 if kind == "gemma2" else 2,
                head_norms=kind in ("qwen3", "qwen3_moe"),
                experts=int(config.get("num_experts") or config["num_local_experts"])
                if is_mixture
                else 0,
                active_experts=int(config["num_experts_per_tok"]) if is_mixture else 1,
                context=config.get("max_position_embeddings"),
            )
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"the config of a '{kind}' lacks a size or has a wrong one: {error}"
            ) from error
        sizes = [
            shape.hidden,
            shape.layers,
            shape.heads,
            shape.kv_heads,
            shape.vocabulary,
            shape.intermediate,
        ]
        if min(sizes) < 1:
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
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All, tied ones once."""
        vectors = self.norms * self.hidden + 2 * self.head_dim * self.head_norms
        vectors += (self.heads + 2 * self.kv_heads) * self.head_dim * self.bias
        layer = (
            self.attention_weights
            + self.expert_weights * max(self.experts, 1)
            + self.experts * self.hidden
        )
        return self.head_weights * (2 - self.tied) + self.layers * (layer + vectors) + self.hidden

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


@cache
def _table() -> dict[str, ModelShape]:
    """Shapes by name; models of the same shape have several."""
    text = files("distflow.planning").joinpath("model_shapes.toml").read_text("utf-8")
    entries = tomllib.loads(text).items()
    found: dict[str, ModelShape] = {}
    for name, e in entries:
        for each in (name, *e.get("also", ())):
            found[each] = ModelShape.of(e["config"])
    return found


def find_shape(path: str, folder: Path | None) -> ModelShape:
    """The shape of the model that `path` names. folder: its local folder, if it is one; else a
    config of that name in the hub's cache, or the table of known models. Raises UserError for a
    model without a config."""
    configs = [folder] if folder else sorted(_cached(path)) if "/" in path else []
    for place in configs:
        file = place / "config.json"
        if file.is_file():
            return _read(file)
    if folder:
        raise UserError(f"the folder '{path}' has no config.json")
    name = path.rpartition("/")[2].lower()
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        name = name if name in _table() else name.removesuffix(suffix)
    if name in _table():
        return _table()[name]
    raise UserError(
        f"there is no config.json of '{path}' on this machine, and no known model has that "
        f"name{hint(name, _table())}: "
        "write the folder of a model, builtin:NAME, or a name such as qwen2.5-7b"
    )


def _cached(name: str) -> list[Path]:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return (
        list(hub.glob(f"models--{name.replace('/', '--')}/snapshots/*"))
        if not is_local_model(name)
        else []
    )


def _read(file: Path) -> ModelShape:
    try:
        content = json.loads(read_file(file, max_bytes=MAX_SOURCE_BYTES))
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as a model's config: {error}") from error
    with blaming(str(file)):
        return ModelShape.of(content)


@dataclass(frozen=True)
class Device:
    """flops: per second in bfloat16 (a CPU: float32). bandwidth, link, network: bytes per second of
    its memory, to another device of its machine, to another machine. memory: bytes. is_cpu: whether
    its memory is the host's. cores: of a CPU. threads: that torch uses there by default, if the
    environment limits them."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    is_cpu: bool = False
    cores: int = 1
    threads: int | None = None

    def shared(self, workers: int, threads: int | None = None) -> "Device":
        """The share of one of several workers that compute on the same CPU, each with so many
        threads, or its share
        of the cores; a GPU is never shared."""
        if not self.is_cpu:
            return self
        part = min(threads / self.cores, 1.0) if threads else 1 / workers
        return replace(
            self,
            flops=self.flops * part,
            bandwidth=self.bandwidth * part,
            memory=self.memory / workers,
        )


def find_device(name: str) -> Device:
    """A device of the table by its name, e.g. h100, or the name that torch gives it. A CPU is this
    machine's. Raises UserError for another name."""
    text = files("distflow.planning").joinpath("devices.toml").read_text("utf-8")
    entries = tomllib.loads(text)["device"]
    words = name.upper().replace("-", " ").split()
    found = [e for e in entries if e["name"] == name.lower()]
    found += [e for e in entries if {word.upper() for word in e["words"]} <= set(words)]
    if not found:
        names = [e["name"] for e in entries]
        raise UserError(
            f"there is no device '{name}'{hint(name.lower(), names)}; the known ones: "
            f"{', '.join(names)}"
        )
    entry = found[0]
    scale = 1
    is_cpu = entry["name"] == "cpu"
    memory = entry["memory_gb"] * GB
    limit = re.match(r"\s*([1-9]\d{0,3})\b", os.environ.get("OMP_NUM_THREADS", ""))
    if is_cpu:
        scale = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        entry["name"],
        flops=entry["tflops"] * 1e12 * scale,
        bandwidth=entry["gbps"] * GB * scale,
        memory=memory,
        link=entry["link_gbps"] * GB,
        network=entry["network_gbps"] * GB,
        is_cpu=is_cpu,
        cores=scale,
        threads=int(limit[1]) if is_cpu and limit else None,
    )


def device_here() -> str:
    """The name of this machine's accelerator, as its driver reports it; "cpu" if there is none."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "cpu"
