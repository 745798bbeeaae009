"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) that stay beside the weights of a
model, so that each row of a batch may have another one."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from distflow.models.lora import ADAPTER_CONFIG
from distflow.observe.crash_safe_files import read_object
from distflow.untrusted_files import check_tensors

_PREFIX = "base_model.model."
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
            if len(of_rows) == 1:
                y = y + linear(linear(x, down), up)
            else:
                y.index_add_(0, rows, linear(linear(x[rows], down), up))

        return y


def make_row_adaptable(model: nn.Module) -> None:
    """Replace the linear layers of a model, but the output head, by `RowAdaptedLinear`."""
    head = model.get_output_embeddings()  # type: ignore[operator]  # transformers'
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, RowAdaptedLinear(module, path))


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
        path = name.removeprefix(_PREFIX).removesuffix(_DOWN)
        module = modules.get(path)
        up = weights.get(f"{_PREFIX}{path}{_UP}")
        if name.endswith(_UP):
            continue
        if not isinstance(module, RowAdaptedLinear) or up is None:
            return None

        like = module.weight
        layers[path] = (down.to(like), (up * (alpha / rank)).to(like))

    return RowAdapter(layers)
