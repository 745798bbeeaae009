"""Sums and maxima over ranks by `torch.distributed`."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.training.collective import Named, Plain, Reducible


class TorchCollective:
    """The `Collective` of a process group: tensors are reduced where they are, numbers in float64."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """group: None is the group of all ranks."""
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        over_gloo = "gloo" in dist.get_backend_config(group)
        self._device = torch.device("cpu" if over_gloo else "cuda")  # NCCL sees no host memory

    def sum(self, value: Reducible) -> Reducible:
        """Raises ValueError where the ranks give numbers of different names."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: Reducible) -> Reducible:
        """Raises ValueError where the ranks give numbers of different names."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def gather(self, value: Plain) -> list[Plain]:
        """See `Collective`. By pickle, which nobody but the ranks themselves can write to the group."""
        everyone: list[Plain] = [value] * self.size
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def _reduce(self, value: Reducible, op: dist.ReduceOp.RedOpType) -> Reducible:
        if isinstance(value, Tensor):
            return self._all_reduce(value.detach().clone(), op)
        if isinstance(value, dict):
            return self._reduce_named(value, op)
        return self._all_reduce(self._numbers([value]), op).item()

    def _reduce_named(self, values: Named, op: dist.ReduceOp.RedOpType) -> Named:
        names = sorted(values)
        self._check_names(names)
        reduced = self._all_reduce(self._numbers([values[name] for name in names]), op).tolist()
        found = dict(zip(names, reduced, strict=True))
        return {name: found[name] for name in values}

    def _check_names(self, names: list[str]) -> None:
        """By a hash: tensors of unlike lengths would hang or mix up numbers, and names are sent only to be told."""
        digest = int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest(), "little")
        largest, least = self._all_reduce(
            torch.tensor([digest, -digest], device=self._device), dist.ReduceOp.MAX
        ).tolist()
        if largest == -least:
            return
        everyone = self.gather(names)
        common = set(names).intersection(*everyone)
        odd = [f"rank {rank} has {sorted(set(own) - common)}" for rank, own in enumerate(everyone) if set(own) - common]
        raise ValueError(f"ranks reduce numbers of different names: {'; '.join(odd)}, which others do not have")

    def _numbers(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        dist.all_reduce(tensor, op, group=self._group)
        return tensor
