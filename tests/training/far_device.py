"""A device that is not the host, where there is none: tensors of `meta` have shapes but no data, so
that nothing can be read of them unless it is counted here."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FAR = torch.device("meta")
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)


class FarDevice(TorchDispatchMode):
    """Counts what crosses between host and device while it is open.

    reads: shapes of the tensors that were copied to the host, which arrive as ones. Everything else
    that would have to know a value (a number taken from a tensor, an index by a mask) fails, as
    does an operation over tensors of both. num_sent: copies to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[int, ...]] = []
        self.num_sent = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        if function in _COPIES:
            return self._copy(function, args, kwargs or {})
        # A number of the host (0-dimensional) may enter an operation on the device: it travels with
        # the launch.
        devices = {tensor.device.type for tensor in given if tensor.dim() > 0}
        assert len(devices) < 2, f"{function} over tensors of the host and of the device"
        assert function is not _aten._local_scalar_dense.default or given[0].device != FAR, (
            "a number was read"
        )
        return function(*args, **(kwargs or {}))

    def _copy(self, function: Any, args: Any, kwargs: Any) -> Any:
        source = args[1] if function is _aten.copy_.default else args[0]
        target = (
            args[0].device
            if function is _aten.copy_.default
            else kwargs.get("device") or source.device
        )
        if source.device == FAR and target != FAR:
            assert function is _aten._to_copy.default
            self.reads.append(tuple(source.shape))
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        self.num_sent += int(source.device != FAR and target == FAR)
        return function(*args, **kwargs)
