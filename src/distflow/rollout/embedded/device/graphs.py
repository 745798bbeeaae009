"""CUDA graphs of decode steps: the second time that a step of some shape is asked for it is recorded, from then on it
is replayed, by one launch for all of its kernels."""

import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)


class Graphs:
    """A step reads and writes tensors that stay where they are, and waits for nothing on the host.

    The first step of a shape runs as it is, so that libraries set themselves up outside of a recording. Where a
    recording fails, this and all later steps run as they are, and a warning says why.
    """

    def __init__(self, model: nn.Module, enabled: bool) -> None:
        self.enabled = enabled
        self._model = model
        self._addresses = self._weights()
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, shape: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """What `step` returns; of a replayed one the same tensor each time, so it is read before the next step."""
        if not self.enabled:
            return step()
        if shape not in self._seen:
            self._seen.add(shape)
            return step()
        if shape not in self._recorded and not self._record(shape, step):
            return step()
        graph, result = self._recorded[shape]
        graph.replay()
        return result

    def follow_weights(self) -> None:
        """Forget all that was recorded where weights lie elsewhere now (the trainer had them on the host meanwhile)."""
        if self.enabled and (addresses := self._weights()) != self._addresses:
            self._addresses = addresses
            self.clear()

    def clear(self) -> None:
        if self._recorded:
            torch.cuda.synchronize()  # one may run still
        self._recorded.clear()

    def _weights(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._model.parameters()] if self.enabled else []

    def _record(self, shape: Hashable, step: Callable[[], Tensor]) -> bool:
        """Nothing is computed by it. The trainer's thread may allocate meanwhile, hence the mode."""
        try:
            graph = torch.cuda.CUDAGraph()
            pool = next((other.pool() for other, _ in self._recorded.values()), None)  # they share their memory
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = step()
        except RuntimeError as error:
            _log.warning("no CUDA graphs, each kernel of a decode step is launched on its own: %s", error)
            self.enabled = False
            self.clear()
            return False
        self._recorded[shape] = (graph, result)
        return True
