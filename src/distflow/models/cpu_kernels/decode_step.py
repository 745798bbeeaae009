"""Native code for a decode step of a Llama-like decoder, one call instead of some hundred
operations, and for draws from softmax(logits / temperature), row by row.
"""

import ctypes
import logging
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from distflow.models.cpu_kernels.build import (
    NotNative,
    address,
    addresses,
    call,
    counts,
    library,
    size,
)
from distflow.models.cpu_kernels.weight_layout import (
    MAKERS,
    PackedAdapter,
    check_modules,
    head_key,
    layer_modules,
    layout_key,
    pack_adapter,
    pack_weights,
)
from distflow.models.row_adapters import Groups, RowAdaptedLinear, RowAdapter, groups


def draw(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor] | None:
    """Token ids int64 and their log-probs float64, `(rows,)`: for each row the first token, in
    vocabulary order, whose cumulative mass exceeds `uniform` (float64 `(rows,)`, in [0, 1)) of the
    total. logits: float32 `(rows, vocab)`, on the CPU. None if one is NaN or +inf, or a whole row
    is -inf. Raises NotNative."""
    logits = logits.contiguous()
    uniform = uniform.contiguous()
    rows, vocabulary = logits.shape
    masses = torch.empty(torch.get_num_threads(), vocabulary)
    tokens = torch.empty(rows, dtype=torch.int64)
    log_probs = torch.empty(rows, dtype=torch.float64)
    outputs = (masses, tokens, log_probs)
    all_drawn = call(
        "draw", logits, rows, vocabulary, ctypes.c_float(temperature), uniform, *outputs
    )

    return (tokens, log_probs) if all_drawn else None


_log = logging.getLogger(__name__)


class _Memory(ctypes.Structure):
    _fields_ = [
        *addresses("keys", "values"),
        *counts("layer_stride", "row_stride", "head_stride"),
        *addresses("cos", "sin", "places"),
    ]


class _Group(ctypes.Structure):
    _fields_ = [*counts("first", "last"), *addresses("layers")]


class _Adapters(ctypes.Structure):
    _fields_ = [*addresses("groups"), *counts("count", "most")]
    array: object
    """What `groups` is the address of."""


_NO_ADAPTERS = _Adapters()


class NativeStep:
    """Computes the same as `DecoderView` by torch, with another order of sums; a row's bits do not
    depend on its batch.

    The weights are copied into a special layout, which takes as much memory again, and again when
    they change in place or are replaced. Changes through `weight.data`, which are not counted, need
    `expire`.
    """

    def __init__(self, causal: nn.Module, halves: bool = False) -> None:
        """halves: products are those of autocast to bfloat16. Raises NotNative if there is no
        native code for this model or (with a warning) on this machine."""
        _check(causal)
        try:
            library()
        except NotNative as reason:
            _log.warning("tokens are decoded by torch, several times slower: %s", reason)
            raise

        self._panel = size("panel_width")
        self._causal = causal
        self._halves = halves

        # the dtype that products produce
        self.values_dtype = torch.bfloat16 if halves else torch.float32
        self._key = layout_key(causal)
        self._packed = pack_weights(causal, self._panel, halves)
        self._scratch = torch.empty(0)
        self._adapters = WeakKeyDictionary[RowAdapter, PackedAdapter]()

    def expire(self) -> None:
        """Free the copies of the weights, which are recreated before the next step."""
        self._key = []
        vars(self).pop("_packed", None)

    def refresh(self) -> bool:
        """Update the copies of the weights. Returns False if the model has changed so that only
        torch can compute it."""
        now = layout_key(self._causal)
        if now != self._key:
            try:
                _check(self._causal)
            except NotNative:
                return False
            self._packed = pack_weights(self._causal, self._panel, self._halves)
            self._key = now

        return True

    def refresh_head(self) -> bool:
        """As `refresh`, but only for `logits`, in less time."""
        now = head_key(self._causal)
        return self._key[-len(now) :] == now or self.refresh()

    def decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """As `DecoderView.decode`, and with several tokens per row of the memory, one after the
        other: those of a prompt after its prefix. cos, sin: `(positions, head_dim)`, the sines of
        the first half negative.

        Raises IndexError for an invalid token or position, and ValueError for keys or values that
        are not contiguous per head, differ in their strides, or have the wrong dtype.
        """
        if (keys.dtype, values.dtype) != (torch.float32, self.values_dtype):
            raise ValueError(
                f"keys and values do not have the expected dtypes: {keys.dtype}, {values.dtype}"
            )
        if keys.stride() != values.stride() or keys.stride()[-2:] != (keys.shape[-1], 1):
            raise ValueError(
                f"keys and values do not have the expected strides: {keys.stride()}, "
                f"{values.stride()}"
            )

        model = self._packed.model
        rows = len(token_ids)
        width = max(1, rows // keys.shape[1])

        places = None
        adapters = _NO_ADAPTERS
        if of_rows := groups():
            adapters = self._adapters_of(of_rows, width)
            # the rows of an adapter follow one another
            places = torch.cat([*of_rows.values()])
            token_ids = token_ids.unflatten(0, (-1, width))[places].flatten()
            positions = positions.unflatten(0, (-1, width))[places].flatten()

        token_ids = token_ids.contiguous()
        positions = positions.contiguous()
        extent = keys.shape[-2]
        wanted = torch.get_num_threads() * size("scratch_size", model, adapters.most, extent)
        if len(self._scratch) < wanted:
            self._scratch = torch.empty(wanted)
        hidden = torch.empty(rows, model.hidden)
        memory = _Memory(
            keys.data_ptr(),
            values.data_ptr(),
            *keys.stride()[:3],
            cos.data_ptr(),
            sin.data_ptr(),
            address(places),
        )

        if call(
            "decode",
            model,
            memory,
            adapters,
            token_ids,
            positions,
            rows,
            width,
            extent,
            hidden,
            self._scratch,
        ):
            raise IndexError(
                f"a token is not below {model.vocabulary}, or a position not below {extent}"
            )

        if places is not None:
            in_order = torch.empty_like(hidden).unflatten(0, (-1, width))
            in_order[places] = hidden.unflatten(0, (-1, width))
            return in_order.flatten(0, 1)

        return hidden

    def _adapters_of(self, of_rows: Groups, width: int) -> _Adapters:
        """width: tokens per row of the memory."""
        made = list[_Group]()
        most = 0
        first = 0
        for adapter, found in of_rows.items():
            last = first + width * len(found)
            if adapter is not None:
                if adapter not in self._adapters:
                    self._adapters[adapter] = pack_adapter(
                        self._causal, adapter, self._panel, self._halves
                    )
                packed = self._adapters[adapter]
                made.append(_Group(first, last, ctypes.addressof(packed.layers)))
                most = max(most, packed.most)
            first = last

        array = (_Group * len(made))(*made)
        adapters = _Adapters(ctypes.addressof(array), len(made), most)
        adapters.array = array
        return adapters

    def logits(self, hidden: Tensor) -> Tensor:
        """`(rows, hidden)` → `(rows, vocab)`."""
        head = self._packed.head
        hidden = hidden.contiguous()
        logits = torch.empty(len(hidden), head.columns)
        scratch = torch.empty(size("project_scratch", head, len(hidden)))
        call("project", head, hidden, logits, len(hidden), scratch)
        return logits


def _check(causal: nn.Module) -> None:
    """Raises NotNative for a model that `decode.c` does not compute."""
    decoder = causal._modules["model"]
    head = causal._modules["lm_head"]
    modules = (*layer_modules(decoder), head)  # type: ignore[arg-type]
    makers = (*MAKERS, RowAdaptedLinear.__module__)
    check_modules(modules, causal.config.rms_norm_eps, makers=makers)  # type: ignore[arg-type,union-attr]
