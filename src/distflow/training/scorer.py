"""Per-token outputs of a model over packed micro-batches: log-probs, entropy, values. The frozen reference is one."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from distflow.data.batch import Batch
from distflow.models.lora import adapter_off
from distflow.models.packed_forward import PackedForward
from distflow.models.shards import device_of
from distflow.training.collective import Collective, OneRank
from distflow.training.model_inputs import model_inputs
from distflow.training.packing import micro_batches


class TorchScorer:
    """Computes outputs of response tokens on one device, by the model's `packed_forward`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens_per_micro_batch: int = 16384,
        temperature: float = 1.0,
        compute_dtype: torch.dtype | None = None,
        without_adapter: bool = False,
        group: Collective | None = None,
    ) -> None:
        """compute_dtype: of the matrix products (the weights' own by default); the softmax stays in float32.
        without_adapter: score with the LoRA adapter switched off, which makes a policy its own reference.
        group: the ranks that run the model as often as this one.
        """
        assert max_tokens_per_micro_batch > 0
        self.model = model
        self.max_tokens = max_tokens_per_micro_batch
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.without_adapter = without_adapter
        self.group = group or OneRank()
        self._parameter = next(model.parameters())

    @property
    def device(self) -> torch.device:
        return device_of(self._parameter)

    @torch.no_grad()
    def forward(self, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        """The wanted outputs as response columns of a batch with the samples of `batch`, on the CPU."""
        self.model.eval()
        bins = micro_batches(batch, self.max_tokens, self.group)
        scored = Batch.concat([self._columns(batch.select(index), outputs) for index in bins])
        return scored.select(torch.cat(bins).argsort())

    def compute(self, micro: Batch, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """The wanted outputs of a micro-batch on the model's device, flat `(response tokens,)`, with gradient.

        outputs: of "log_probs", "entropy", "values". Raises ValueError for a sample without a prompt.
        """
        forward: PackedForward = self.model.packed_forward  # type: ignore[assignment]  # nn.Module declares no methods
        with self._adapter(), self._autocast():
            return forward(model_inputs(micro), outputs, temperature=self.temperature)

    def _columns(self, part: Batch, outputs: tuple[str, ...]) -> Batch:
        columns = Batch(part.lengths("prompt"), part.lengths("response"))
        for name, flat in self.compute(part.to(self.device), outputs).items():
            columns[name] = flat.cpu()
        return columns

    def _adapter(self) -> AbstractContextManager[None]:
        return adapter_off(self.model) if self.without_adapter else nullcontext()

    def _autocast(self) -> AbstractContextManager[object]:
        if self.compute_dtype in (None, self._parameter.dtype):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)
