"""A decoder's weights in the layout of `decode.c`, which makes products on a CPU fast. It takes as
much memory again, and is recreated when the weights change."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from distflow.models.cpu_kernels.build import NotNative, address, addresses, counts
from distflow.models.row_adapters import RowAdaptedLinear, RowAdapter

MAKERS = ("torch.nn.", "transformers.")
PAIRS_UNIT = 32  # `bfloat16_matmul.h`: rows of pairs are padded to a multiple of it
KINDS = (
    "Linear",
    "Embedding",
    "RMSNorm",
    "MLP",
    "Attention",
    "SiLU",
    "SiLUActivation",
    "DecoderLayer",
    "Model",
)
"""Suffixes of the class names of known modules. Others may compute anything, and so may those with
a `forward` from other packages."""


class Linear(ctypes.Structure):
    _fields_ = [*addresses("panels", "bias"), *counts("depth", "columns", "halves")]


class Layer(ctypes.Structure):
    _fields_ = [
        *addresses("input_norm", "post_norm", "query_norm", "key_norm"),
        *((name, Linear) for name in ("query_key_value", "output", "gate_up", "down")),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *addresses("embedding", "norm", "layers"),
        *counts(
            "vocabulary",
            "num_layers",
            "hidden",
            "intermediate",
            "heads",
            "kv_heads",
            "head_dim",
            "halves",
        ),
        *(("epsilon", ctypes.c_float), ("scaling", ctypes.c_float)),
    ]


class LowRank(ctypes.Structure):
    _fields_ = [("down", Linear), ("up", Linear)]


class AdapterLayer(ctypes.Structure):
    _fields_ = [(name, LowRank) for name in ("query_key_value", "output", "gate_up", "down")]


@dataclass(frozen=True)
class PackedAdapter:
    """memory: holds the tensors at the addresses in `layers`."""

    layers: ctypes.Array[AdapterLayer]
    most: int
    """Columns of the widest `down`."""
    memory: list[object]


@dataclass(frozen=True)
class PackedWeights:
    """memory: holds the tensors at the addresses in `model` and `head`."""

    model: Model
    head: Linear
    memory: list[object]


def layout_key(causal: nn.Module) -> list[object]:
    """A key that changes whenever the result of `pack_weights` would, except for changes through
    `weight.data`."""
    return _key_of(layer_modules(causal._modules["model"])) + head_key(causal)  # type: ignore[arg-type]


def head_key(causal: nn.Module) -> list[object]:
    """The end of `layout_key`, for only the output head."""
    return [_has_any_global_hook(), *_key_of([causal._modules["lm_head"]])]  # type: ignore[list-item]


def _key_of(modules: Iterable[nn.Module]) -> list[object]:
    found: list[object] = []
    for module in modules:
        fields = vars(module)
        found.append(type(module).forward)
        found.append(
            bool(fields["_forward_hooks"] or fields["_forward_pre_hooks"] or "forward" in fields)
        )

        for weight in fields["_parameters"].values():
            if weight is None:
                continue

            found.append(weight.data_ptr())
            try:
                found.append(weight._version)
            # created in inference mode; checking this beforehand takes as long as everything else
            except RuntimeError:
                found.append(None)

    return found


def layer_modules(decoder: nn.Module) -> Iterator[nn.Module]:
    """The modules called by its layers, those called by them, and those before and after the
    layers."""
    # Not attributes: looking up those of a module in each step would take longer than some steps.
    body = decoder._modules
    for layer in body["layers"]._modules.values():  # type: ignore[union-attr]
        for part in layer._modules.values():  # type: ignore[union-attr]
            if part._modules:  # type: ignore[union-attr]
                yield from part._modules.values()  # type: ignore[union-attr,misc]
            yield part  # type: ignore[misc]

    yield from (body["embed_tokens"], body["norm"])  # type: ignore[misc]


def is_plain(module: nn.Module, kind: str) -> bool:
    """Whether it is a module of `transformers` of that kind that runs its own forward."""
    return (
        type(module).__module__.startswith("transformers.")
        and type(module).__name__.endswith(kind)
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    )


def heads_and_norms(attention: Any) -> tuple[int, float, Tensor | None, Tensor | None]:
    """The number of key-value heads; epsilon and weights of the norms of queries and keys, or
    None."""
    num_kv_heads = len(attention.k_proj.weight) // attention.head_dim
    query_norm = getattr(attention, "q_norm", None)
    if query_norm is None:
        return num_kv_heads, 0.0, None, None
    return num_kv_heads, query_norm.variance_epsilon, query_norm.weight, attention.k_norm.weight


def side_by_side(modules: Sequence[nn.Linear], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one linear map with the outputs of these maps, in order."""
    weights = [module.weight.to(dtype) for module in modules]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]  # a single one is not copied
    if all(module.bias is None for module in modules):
        return weight, None

    biases = []
    for module in modules:
        if module.bias is None:
            biases.append(weight.new_zeros(len(module.weight)))
        else:
            biases.append(module.bias.to(dtype))

    return weight, torch.cat(biases)


@torch.no_grad()
def pack_weights(causal: Any, panel: int, halves: bool) -> PackedWeights:
    """Pack the weights of a model that `check_modules` accepts. panel: columns computed together.
    halves: products are in bfloat16."""
    config = causal.config
    layers = causal.model.layers
    memory: list[object] = []

    def linear(*modules: nn.Linear) -> Linear:
        weight, bias = side_by_side(modules, torch.bfloat16 if halves else torch.float32)
        return _in_panels(weight, bias, panel, memory)

    def weight(module: Any) -> int | None:
        if module is None:
            return None
        return address(module.weight)

    c_layers = (Layer * len(layers))()
    for place, layer in zip(c_layers, layers, strict=True):
        attention = layer.self_attn
        mlp = layer.mlp
        place.input_norm = weight(layer.input_layernorm)
        place.post_norm = weight(layer.post_attention_layernorm)
        place.query_norm = weight(getattr(attention, "q_norm", None))
        place.key_norm = weight(getattr(attention, "k_norm", None))
        place.query_key_value = linear(attention.q_proj, attention.k_proj, attention.v_proj)
        place.output = linear(attention.o_proj)
        place.gate_up = linear(mlp.gate_proj, mlp.up_proj)
        place.down = linear(mlp.down_proj)

    memory.append(c_layers)
    model = Model(
        weight(causal.model.embed_tokens),
        weight(causal.model.norm),
        ctypes.addressof(c_layers),
        causal.model.embed_tokens.num_embeddings,
        len(layers),
        config.hidden_size,
        mlp.down_proj.in_features,
        config.num_attention_heads,
        config.num_key_value_heads,
        attention.head_dim,
        halves,
        config.rms_norm_eps,
        attention.scaling,
    )

    return PackedWeights(model, linear(causal.lm_head), memory)


def _in_panels(weight: Tensor, bias: Tensor | None, panel: int, memory: list[object]) -> Linear:
    """The layout of a weight `(columns, depth)`, in float32 or bfloat16."""
    halves = weight.dtype == torch.bfloat16
    columns, depth = weight.shape
    unit = PAIRS_UNIT if halves else 1
    padded = nn.functional.pad(weight, (0, -depth % unit, 0, -columns % panel))
    words = padded.view(torch.int32)  # numbers, or pairs of them
    panels = words.unflatten(0, (-1, panel)).transpose(1, 2).contiguous()
    if bias is not None:
        bias = bias.float()
    memory.append((panels, bias))

    return Linear(address(panels), address(bias), depth, columns, halves)


@torch.no_grad()
def pack_adapter(causal: Any, adapter: RowAdapter, panel: int, halves: bool) -> PackedAdapter:
    """Pack an adapter of a decoder whose weights `pack_weights` packs, with the same panels."""
    memory: list[object] = []
    most = 0

    def low_rank(*modules: RowAdaptedLinear) -> LowRank:
        """Of the maps side by side: ranks side by side too, each for the outputs of its own."""
        nonlocal most
        dtype = torch.bfloat16 if halves else torch.float32
        downs = list[Tensor]()
        ups = list[Tensor]()
        for module in modules:
            nothing = (torch.zeros(0, module.in_features), torch.zeros(module.out_features, 0))
            down, up = adapter.layers.get(module.path, nothing)
            downs.append(down)
            ups.append(up)

        down = torch.cat(downs).to(dtype)
        if not len(down):
            return LowRank()

        most = max(most, len(down))
        up = torch.block_diag(*ups).to(dtype)
        return LowRank(_in_panels(down, None, panel, memory), _in_panels(up, None, panel, memory))

    layers = (AdapterLayer * len(causal.model.layers))()
    for place, layer in zip(layers, causal.model.layers, strict=True):
        attention = layer.self_attn
        mlp = layer.mlp
        place.query_key_value = low_rank(attention.q_proj, attention.k_proj, attention.v_proj)
        place.output = low_rank(attention.o_proj)
        place.gate_up = low_rank(mlp.gate_proj, mlp.up_proj)
        place.down = low_rank(mlp.down_proj)

    return PackedAdapter(layers, most, memory)


def check_modules(
    modules: Iterable[nn.Module],
    epsilon: float,
    device: str = "cpu",
    makers: tuple[str, ...] = MAKERS,
) -> None:
    """Raises NotNative if our kernels do not compute one of these parts of a decoder. epsilon: of
    all norms. On a CPU all weights are float32. makers: what the names of modules' modules begin
    with."""
    if _has_any_global_hook():
        raise NotNative("a hook of all modules is registered")

    for module in modules:
        name = type(module).__name__
        forward = vars(module).get("forward", type(module).forward)
        if not (forward.__module__.startswith(makers) and name.endswith(KINDS)):
            raise NotNative(f"it does not know {name}, whose forward is from {forward.__module__}")
        if module._forward_hooks or module._forward_pre_hooks:
            raise NotNative(f"{name} has a hook")

        for weight in module.parameters(recurse=False):
            if type(weight) not in (Tensor, nn.Parameter):
                raise NotNative(f"{name} has a {type(weight).__name__}")
            if weight.device.type != device or (device == "cpu" and weight.dtype != torch.float32):
                dtype = str(weight.dtype).removeprefix("torch.")
                raise NotNative(
                    f"it requires float32 on a CPU, but {name} is in {dtype} on {weight.device}"
                )
            if weight.is_inference() or not weight.is_contiguous():
                raise NotNative(
                    f"a weight of {name} was created in inference mode, or is not contiguous"
                )

        if getattr(module, "variance_epsilon", epsilon) != epsilon:
            raise NotNative(f"{name} has an epsilon of its own")
        if getattr(module, "max_norm", None) is not None:
            raise NotNative("its embeddings are scaled when they are looked up")
