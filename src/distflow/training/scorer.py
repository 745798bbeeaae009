"""Per-token outputs of a model over packed micro-batches: log-probs, entropy, values. The frozen reference is one."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TypedDict

import torch
from torch import Tensor, nn

from distflow.data.batch import Batch, send
from distflow.models.log_probs import check_temperature
from distflow.models.lora import adapter_off
from distflow.models.packed_forward import ModelInputs, PackedForward
from distflow.models.packing import shared_prefixes
from distflow.models.sharding import device_of
from distflow.scheduling.bin_packing import pack
from distflow.training.engine import Collective, OneRank


class ScorerOptions(TypedDict, total=False):
    """max_tokens_per_micro_batch: None chooses by the device. temperatures: of the domains that are not sampled at
    `temperature`. compute_dtype: of the matrix products (the weights' own by default), by autocast; the softmax stays
    in float32."""

    max_tokens_per_micro_batch: int | None
    temperature: float
    temperatures: Mapping[str, float]
    compute_dtype: torch.dtype | None


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
        """For the options see `ScorerOptions`. without_adapter: score with the LoRA adapter switched off, which makes a
        policy its own reference. group: the ranks that run the model as often as this one."""
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

        micro: on the CPU, where shared prefixes of its samples are found and computed once, or on the device.
        outputs: of "log_probs", "entropy", "values". Raises ValueError for a sample without a prompt, and for samples
        without their domain where domains have temperatures of their own.
        """
        forward: PackedForward = self.model.packed_forward  # type: ignore[assignment]  # nn.Module declares no methods
        adapter = adapter_off(self.model) if self.without_adapter else nullcontext()
        with adapter, self._autocast():
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
            raise ValueError("domains are sampled at temperatures of their own: scored samples need their 'domain'")
        of_samples = torch.tensor([self.temperatures.get(domain, self.temperature) for domain in micro["domain"]])
        check_temperature(of_samples)
        return send(of_samples.repeat_interleave(micro.lengths("response")), self.device)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.compute_dtype in (None, self._parameter.dtype):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)


def tokens_at_once(device: torch.device) -> int:
    """The default size of a micro-batch. On a CPU the allocator reuses the matrices of so few tokens: it gets larger
    ones from the kernel each time, page by page, which took a tenth to a third of an update."""
    return 4096 if device.type == "cpu" else 16384


def micro_batches(batch: Batch, max_tokens: int, group: Collective) -> list[Tensor]:
    """Indices of each micro-batch's samples, int64; deterministic, every sample once.

    At most `max_tokens` tokens (prompt and response) in each, except for a longer sample, which is alone and never
    cut. Neighbours with the same prompt stay together as far as they fit: their prompt is computed once. Every
    rank of `group` gets as many as the one that needs most, empty ones where it has fewer samples.
    """
    families = _families(batch, max_tokens)
    lengths = batch.lengths("sequence")
    sizes = [int(lengths[family].sum()) for family in families]
    bins = pack(sizes, max_tokens)
    agreed = int(group.max(float(len(bins))))
    if agreed > len(bins):
        bins = pack(sizes, max_tokens, agreed)
    return [torch.tensor([i for family in bin for i in families[family]], dtype=torch.int64) for bin in bins]


def _families(batch: Batch, max_tokens: int) -> list[list[int]]:
    """Runs of samples with the same prompt, in order; one of more than `max_tokens` is cut."""
    lengths = batch.lengths("sequence").tolist()
    prompts = batch.flat("prompt_ids").split(batch.lengths("prompt").tolist()) if len(batch) else ()
    families: list[list[int]] = []
    room = 0
    for i, prompt in enumerate(prompts):
        if families and lengths[i] <= room and torch.equal(prompt, prompts[i - 1]):
            families[-1].append(i)
            room -= lengths[i]
        else:
            families.append([i])
            room = max_tokens - lengths[i]
    return families


def model_inputs(micro: Batch) -> ModelInputs:
    """Response token t of a sequence is predicted from the position before it, prompt length + t − 1.

    A micro-batch without tokens becomes one token that nothing is predicted from: every rank must run a
    sharded model equally often, and the gradient is 0.
    Shared prefixes of neighbouring samples are found only if the micro-batch is on the CPU: reading it from another
    device would wait for that device.
    Raises ValueError for a sample without a prompt: nothing predicts its first token.
    """
    _refuse_empty_prompts(micro)
    ids, lengths = micro.flat("input_ids"), micro.lengths("sequence")
    if not ids.numel():
        ids, lengths = ids.new_zeros(1), torch.ones(1, dtype=torch.int64)
    positions = send(micro.response_positions(), ids.device)
    sharing = shared_prefixes(ids, lengths) if ids.device.type == "cpu" else None
    return ModelInputs(ids, lengths, predicting=positions - 1, targets=ids[positions], sharing=sharing)


def _refuse_empty_prompts(micro: Batch) -> None:
    empty = (micro.lengths("prompt") == 0) & (micro.lengths("response") > 0)
    if bool(empty.any()):
        who = micro.flat("uid")[int(empty.nonzero()[0])] if "uid" in micro else f"number {int(empty.nonzero()[0])}"
        raise ValueError(f"sample {who} has an empty prompt: nothing predicts its first token; give a bos token")
