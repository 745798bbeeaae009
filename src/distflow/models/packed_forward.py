"""A model's whole pass over packed sequences, embedding to log-probs, as one method of the model.

What wraps a model to gather or move its weights around a forward (FSDP2's `register_fsdp_forward_method`, say) sees one
call that uses all of them, the output head included.
"""

from dataclasses import dataclass
from types import MethodType
from typing import Protocol

import torch
from torch import Tensor, nn

from distflow.data.transfer import send
from distflow.models.heads import output_head, token_values, unwrapped
from distflow.models.log_probs import token_log_probs
from distflow.models.packed import packed_hidden_states, packed_logits
from distflow.models.shared_prefixes import Sharing


@dataclass(frozen=True)
class ModelInputs:
    """Packed sequences on the model's device.

    input_ids: int64 `(tokens,)`, at least one. lengths: int64 `(sequences,)` of them, on the CPU. predicting: int64
    `(n,)`, the positions whose outputs are wanted, each once. targets: int64 `(n,)`, the tokens that follow them.
    sharing: the tokens that need not be computed for each sequence, on the CPU; None computes all.
    """

    input_ids: Tensor
    lengths: Tensor
    predicting: Tensor
    targets: Tensor
    sharing: Sharing | None = None

    def to(self, device: torch.device) -> "ModelInputs":
        ids, predicting, targets = (send(each, device) for each in (self.input_ids, self.predicting, self.targets))
        return ModelInputs(ids, self.lengths, predicting, targets, self.sharing)


class PackedForward(Protocol):
    """The method that `attach_packed_forward` gives to a model."""

    def __call__(
        self, inputs: ModelInputs, outputs: tuple[str, ...], *, temperature: float | Tensor
    ) -> dict[str, Tensor]: ...


PACKED_METHODS = ("packed_forward", "packed_logits")


def attach_packed_forward(model: nn.Module) -> None:
    """Give the model its methods `packed_forward` and `packed_logits`; an adapter's wrapper hands them on, a copy of
    the model has its own."""
    model.packed_forward = MethodType(packed_forward, model)  # type: ignore[assignment]  # nn.Module declares no methods
    model.packed_logits = MethodType(packed_logits, model)  # type: ignore[assignment]  # likewise


def packed_forward(
    model: nn.Module, inputs: ModelInputs, outputs: tuple[str, ...], *, temperature: float | Tensor
) -> dict[str, Tensor]:
    """The wanted outputs at the predicting positions, each `(n,)`, with gradient.

    outputs: of "log_probs" (of the targets, under softmax(logits / temperature)), "entropy" (of the same
    distribution), "values". temperature: of all positions, or float `(n,)`.
    """
    hidden = packed_hidden_states(
        model, inputs.input_ids, inputs.lengths, wanted=inputs.predicting, sharing=inputs.sharing
    )
    found: dict[str, Tensor] = {}
    if "values" in outputs:
        found["values"] = token_values(model, hidden)
    if "log_probs" in outputs or "entropy" in outputs:
        log_probs, entropy = token_log_probs(
            output_head(model),
            hidden,
            inputs.targets,
            temperature=temperature,
            vocabulary=unwrapped(model).config.get_text_config().vocab_size,
            with_entropy="entropy" in outputs,
        )
        found["log_probs"] = log_probs
        if entropy is not None:
            found["entropy"] = entropy
    return {name: found[name] for name in outputs}
