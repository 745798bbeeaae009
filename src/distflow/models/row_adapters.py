"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) that stay beside the weights of a
model, so that each row of a batch may have another one."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from distflow.models.lora import ADAPTER_CONFIG
from distflow.observe.crash_safe_files import read_object
from distflow.untrusted_files import check_tensors

PREFIX = "base_model.model."
_DOWN = ".lora_A.weight"
_UP = ".lora_B.weight"
_MORE = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save")
"""Settings of PEFT by which an adapter is more than one product of two matrices a layer."""

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class RowAdapter:
    """What an adapter adds to the linear layers of a model."""

    layers: Mapping[str, tuple[Tensor, Tensor]]
    """By the layer's path: `(rank, inputs)`, and `(outputs, rank)` times the adapter's scale."""
    number: int = field(default_factory=lambda: next(_numbers))
    """No other adapter of the process has it."""


Groups = Mapping[RowAdapter | None, Tensor]
"""The rows of each adapter, int64; no row twice."""

_NONE: Groups = {}
_groups: ContextVar[Groups] = ContextVar("groups", default=_NONE)


def groups() -> Groups:
    """Of the rows that are computed now; empty if none has an adapter."""
    return _groups.get()


@contextmanager
def rows_with(
    adapters: Sequence[RowAdapter | None], device: torch.device | None = None
) -> Iterator[None]:
    """Inside, in this thread, each row of what a `RowAdaptedLinear` is given has its adapter.
    device: of the rows; None for the CPU."""
    found = dict[RowAdapter | None, list[int]]()
    if any(adapters):
        for row, adapter in enumerate(adapters):
            found.setdefault(adapter, []).append(row)

    on_device = {adapter: torch.tensor(rows, device=device) for adapter, rows in found.items()}
    before = _groups.set(on_device)
    try:
        yield
    finally:
        _groups.reset(before)


class RowAdaptedLinear(nn.Linear):
    """A linear layer over another's parameters. Each row of its input, of the first dimension, may
    have an adapter; if all have the same one, their number may differ from that of `rows_with`."""

    def __init__(self, plain: nn.Linear, path: str) -> None:
        nn.Module.__init__(self)
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = plain.weight
        self.bias = plain.bias
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        of_rows = groups()
        for adapter, rows in of_rows.items():
            if adapter is None or self.path not in adapter.layers:
                continue

            down, up = adapter.layers[self.path]
            own = x if len(of_rows) == 1 else x[rows]
            # that of an adapter which trains may be another one
            added = linear(linear(own.to(down.dtype), down), up).to(y.dtype)
            if len(of_rows) == 1:
                y = y + added
            else:
                y.index_add_(0, rows, added)

        return y


def make_row_adaptable(model: nn.Module) -> None:
    """Replace the linear layers of a model, but the output head, by `RowAdaptedLinear`."""
    head = model.get_output_embeddings()  # type: ignore[operator]  # transformers'
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, RowAdaptedLinear(module, path))


def new_adapter(
    layers: Iterable[RowAdaptedLinear], rank: int, seed: int
) -> dict[str, nn.Parameter]:
    """The float32 weights that `add_lora` draws for this seed, by PEFT's names in files."""
    found = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in layers:
            down = nn.Linear(layer.in_features, rank, bias=False)
            up = nn.Linear(rank, layer.out_features, bias=False)
            nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
            nn.init.zeros_(up.weight)
            for leaf, made in ((_DOWN, down), (_UP, up)):
                weight = made.weight.detach().to(layer.weight.device)
                found[f"{PREFIX}{layer.path}{leaf}"] = nn.Parameter(weight)
    return found


def row_adapter(weights: Mapping[str, Tensor], scale: float) -> RowAdapter:
    """weights: by PEFT's names in files; gradients reach them."""
    layers = {}
    for name, down in weights.items():
        if name.endswith(_DOWN):
            stem = name.removesuffix(_DOWN)
            layers[stem.removeprefix(PREFIX)] = (down, weights[f"{stem}{_UP}"] * scale)
    return RowAdapter(layers)


def write_adapter_config(
    folder: Path, base: PreTrainedModel, rank: int, alpha: float, paths: Sequence[str]
) -> None:
    """What PEFT needs in a folder beside an adapter's weights. paths: of its layers."""
    from peft import LoraConfig

    config: Any = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(paths),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.name_or_path,
    )
    config.save_pretrained(folder)


def read_row_adapter(folder: Path, model: nn.Module) -> RowAdapter | None:
    """The adapter that `peft` wrote to a folder, in the model's dtypes and on its devices. None if
    it is not just low-rank weights of layers that `make_row_adaptable` replaced. Raises UserError
    for files that are broken."""
    config = read_object(folder / ADAPTER_CONFIG, folder)
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    is_plain = config.get("peft_type") == "LORA" and not any(config.get(name) for name in _MORE)
    if not (is_plain and isinstance(rank, int) and isinstance(alpha, int | float)):
        return None

    weights = load_file(check_tensors(folder / "adapter_model.safetensors", folder))
    modules = dict(model.named_modules())
    layers = dict[str, tuple[Tensor, Tensor]]()
    for name, down in weights.items():
        path = name.removeprefix(PREFIX).removesuffix(_DOWN)
        module = modules.get(path)
        up = weights.get(f"{PREFIX}{path}{_UP}")
        if name.endswith(_UP):
            continue
        if not isinstance(module, RowAdaptedLinear) or up is None:
            return None

        like = module.weight
        layers[path] = (down.to(like), (up * (alpha / rank)).to(like))

    return RowAdapter(layers)
