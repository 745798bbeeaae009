"""Per-token outputs of a model over packed micro-batches: log-probs, entropy, values. The frozen reference is one."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor, nn

from distflow.data.batch import Batch
from distflow.data.batch_columns import send
from distflow.models.log_probs import check_temperature
from distflow.models.lora import adapter_off
from distflow.models.packed_forward import PackedForward
from distflow.models.shards import device_of
from distflow.training.collective import Collective, OneRank
from distflow.training.micro_batches import micro_batches, model_inputs, tokens_at_once


class TorchScorer:
    """Computes outputs of response tokens on one device, by the model's `packed_forward`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens_per_micro_batch: int | None = None,
        temperature: float = 1.0,
        temperatures: Mapping[str, float] = MappingProxyType({}),
        compute_dtype: torch.dtype | None = None,
        without_adapter: bool = False,
        group: Collective | None = None,
    ) -> None:
        """max_tokens_per_micro_batch: None is what suits the device. temperatures: of the domains that are not sampled
        at `temperature`. compute_dtype: of the matrix products (the weights' own by default); the softmax stays in
        float32. without_adapter: score with the LoRA adapter switched off, which makes a policy its own reference.
        group: the ranks that run the model as often as this one.
        """
        self.model = model
        self.temperature = temperature
        self.temperatures = dict(temperatures)
        self.compute_dtype = compute_dtype
        self.without_adapter = without_adapter
        self.group = group or OneRank()
        self._parameter = next(model.parameters())
        self.max_tokens = max_tokens_per_micro_batch or tokens_at_once(self.device)

    @property
    def device(self) -> torch.device:
        return device_of(self._parameter)

    @torch.no_grad()
    def forward(self, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        """The wanted outputs as response columns of a batch with the samples of `batch`, on the CPU."""
        self.model.eval()
        bins = micro_batches(batch, self.max_tokens, self.group)
        scored = Batch.concat([self._columns(batch.select(index), outputs) for index in bins])
        return scored.to("cpu").select(torch.cat(bins).argsort())

    def compute(self, micro: Batch, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """The wanted outputs of a micro-batch, flat `(response tokens,)`, on the model's device, with gradient.

        micro: on the CPU, where what its samples begin with alike is seen and computed once, or on the device.
        outputs: of "log_probs", "entropy", "values". Raises ValueError for a sample without a prompt, and for samples
        without their domain where domains have temperatures of their own.
        """
        forward: PackedForward = self.model.packed_forward  # type: ignore[assignment]  # nn.Module declares no methods
        with self._adapter(), self._autocast():
            return forward(model_inputs(micro).to(self.device), outputs, temperature=self._temperature(micro))

    def _columns(self, part: Batch, outputs: tuple[str, ...]) -> Batch:
        columns = Batch(part.lengths("prompt"), part.lengths("response"))
        for name, flat in self.compute(part, outputs).items():
            columns[name] = flat
        return columns

    def _temperature(self, micro: Batch) -> float | Tensor:
        """Of each response token, where they differ: `(response tokens,)`."""
        if not self.temperatures:
            return self.temperature
        if "domain" not in micro:
            raise ValueError("domains are sampled at temperatures of their own: what is scored must have its 'domain'")
        of_samples = torch.tensor([self.temperatures.get(domain, self.temperature) for domain in micro["domain"]])
        check_temperature(of_samples)
        return send(of_samples.repeat_interleave(micro.lengths("response")), self.device)

    def _adapter(self) -> AbstractContextManager[None]:
        return adapter_off(self.model) if self.without_adapter else nullcontext()

    def _autocast(self) -> AbstractContextManager[object]:
        if self.compute_dtype in (None, self._parameter.dtype):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)
