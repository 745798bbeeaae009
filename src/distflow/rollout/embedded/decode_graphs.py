"""CUDA graphs of decode steps: a step of some shape is recorded the second time it runs, and then
replayed with one launch.
"""

import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)


class CudaGraphs:
    """Records and replays steps, which must read and write tensors at fixed addresses, and not wait
    for the host.

    The first step of a shape runs unrecorded, so that libraries initialise outside of a recording.
    If a recording fails, this and all later steps run unrecorded, with a warning that says why.
    """

    def __init__(self, model: nn.Module, enabled: bool) -> None:
        self.enabled = enabled
        self.num_recorded = 0  # since the start, including dropped ones
        self._model = model
        self._addresses = self._weights()
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def run(self, shape: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """Run a step; a replayed step returns the same tensor each time, so read it before the next
        step."""
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

    def drop_if_moved(self) -> None:
        """Drop all recordings if weights have new addresses (after the trainer moved them to the
        host and back)."""
        if self.enabled and (addresses := self._weights()) != self._addresses:
            self._addresses = addresses
            self.clear()

    def clear(self) -> None:
        if self._recorded:
            torch.cuda.synchronize()  # a recording may still run
        self._recorded.clear()

    def _weights(self) -> list[int]:
        if self.enabled:
            return [parameter.data_ptr() for parameter in self._model.parameters()]
        return []

    def _record(self, shape: Hashable, step: Callable[[], Tensor]) -> bool:
        """Record without computing. The trainer's thread may allocate meanwhile, hence the mode."""
        try:
            graph = torch.cuda.CUDAGraph()
            # recordings share memory
            pool = next((other.pool() for other, _ in self._recorded.values()), None)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = step()
        except RuntimeError as error:
            _log.warning(
                "CUDA graphs are off, so each kernel of a decode step is launched separately: %s",
                error,
            )
            self.enabled = False
            self.clear()
            return False

        self._recorded[shape] = (graph, result)
        self.num_recorded += 1
        return True
