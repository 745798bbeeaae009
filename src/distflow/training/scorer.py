"""Per-token outputs of a model over packed micro-batches: log-probs, entropy, values. The frozen reference is one."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from distflow.data.batch import Batch
from distflow.graph.fields import Axis
from distflow.models.heads import output_head, unwrapped
from distflow.models.log_probs import token_log_probs
from distflow.models.lora import adapter_off
from distflow.models.packed import packed_hidden_states
from distflow.models.rows import take_rows
from distflow.models.value_head import token_values
from distflow.training.packing import micro_batches


class TorchScorer:
    """Computes outputs of response tokens on one device.

    Response token t of a sequence is scored from the position before it, prompt length + t − 1: its log-prob and the
    entropy there, and the value before it is produced.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens_per_micro_batch: int = 16384,
        temperature: float = 1.0,
        compute_dtype: torch.dtype | None = None,
        without_adapter: bool = False,
    ) -> None:
        """compute_dtype: of the matrix products (the weights' own by default); the softmax stays in float32.
        without_adapter: score with the LoRA adapter switched off, which makes a policy its own reference.
        """
        assert max_tokens_per_micro_batch > 0
        self.model = model
        self.max_tokens = max_tokens_per_micro_batch
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.without_adapter = without_adapter
        self._parameter = next(model.parameters())

    @property
    def device(self) -> torch.device:
        return self._parameter.device

    @torch.no_grad()
    def forward(self, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        """The wanted outputs as response columns of a batch with the samples of `batch`, on the CPU."""
        self.model.eval()
        bins = [index for index in micro_batches(batch, self.max_tokens) if len(index)]
        if not bins:
            return self._columns(batch, outputs)
        scored = Batch.concat([self._columns(batch.select(index), outputs) for index in bins])
        return scored.select(torch.cat(bins).argsort())

    def compute(self, micro: Batch, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """The wanted outputs of one micro-batch, flat `(response tokens,)` on the model's device, with gradient.

        outputs: of "log_probs", "entropy", "values". Raises ValueError for a sample without a prompt: nothing
        predicts its first token.
        """
        _refuse_empty_prompts(micro)
        positions = micro.response_positions()
        if not positions.numel():
            return {name: torch.zeros(0, device=self.device) for name in outputs}
        ids = micro.flat("input_ids").to(self.device)
        with self._adapter(), self._autocast():
            hidden = packed_hidden_states(self.model, ids, micro.lengths("sequence"))
            predicting = take_rows(hidden, (positions - 1).to(self.device))
            targets = ids[positions.to(self.device)]
            return self._from_hidden(predicting, targets, outputs)

    def _from_hidden(self, hidden: Tensor, targets: Tensor, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if "values" in outputs:
            found["values"] = token_values(self.model, hidden)
        if "log_probs" in outputs or "entropy" in outputs:
            log_probs, entropy = token_log_probs(
                output_head(self.model),
                hidden,
                targets,
                temperature=self.temperature,
                vocabulary=unwrapped(self.model).config.get_text_config().vocab_size,
                with_entropy="entropy" in outputs,
            )
            found["log_probs"] = log_probs
            if entropy is not None:
                found["entropy"] = entropy
        return {name: found[name] for name in outputs}

    def _columns(self, part: Batch, outputs: tuple[str, ...]) -> Batch:
        columns = Batch(part.lengths("prompt"), part.lengths("response"))
        for name, flat in self.compute(part, outputs).items():
            columns[name] = flat.cpu()
        return columns

    def _adapter(self) -> AbstractContextManager[None]:
        return adapter_off(self.model) if self.without_adapter else nullcontext()

    def _autocast(self) -> AbstractContextManager[object]:
        if self.compute_dtype in (None, self._parameter.dtype):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)


def padded_outputs(micro: Batch, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs as `(bs, response_length)` where the batch lies (its columns are what they meet), with gradient."""
    return {
        name: micro.pad(values.to(micro.lengths("response").device), Axis.RESPONSE) for name, values in flat.items()
    }


def _refuse_empty_prompts(micro: Batch) -> None:
    empty = (micro.lengths("prompt") == 0) & (micro.lengths("response") > 0)
    if bool(empty.any()):
        who = micro.flat("uid")[int(empty.nonzero()[0])] if "uid" in micro else f"number {int(empty.nonzero()[0])}"
        raise ValueError(f"sample {who} has an empty prompt: nothing predicts its first token; give a bos token")
