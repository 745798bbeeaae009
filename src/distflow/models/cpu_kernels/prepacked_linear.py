"""Linear maps in bfloat16 on a CPU with weights in the layout of oneDNN's products.

oneDNN brings a weight into its own layout before each product, which takes as long as a product of few rows.
Here a copy in that layout is kept, for as much memory again, and updated when the weight changes.
"""

import torch
from torch import Tensor, nn


class PrepackedLinear(nn.Linear):
    """As `nn.Linear`; with gradients it is no more than that."""

    _packed: Tensor
    _packed_of: tuple[int, int] | None = None
    """Where the weight lay then, and the number of changes in place that it had seen."""
    _held: Tensor
    """The memory there: as long as it is held, no other weight comes to lie there."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not _gains(self.weight):
            return super().forward(input)
        now = self.weight.data_ptr(), self.weight._version
        if now != self._packed_of:
            self._held, self._packed_of = self.weight.detach(), now
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._held)
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")


def prepack(model: nn.Module) -> None:
    """Make plain linear maps such, where there is something to gain. Their weights may be changed in place, or laid
    elsewhere, but not by way of `weight.data`, which counts no changes."""
    if not _is_there():
        return
    for module in model.modules():
        if type(module) is nn.Linear and _gains(module.weight):
            module.__class__ = PrepackedLinear


def _is_there() -> bool:
    """The operators are torch's own, for its compiler; a build without oneDNN has none of them."""
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(torch.ops.mkldnn, name) for name in names) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _gains(weight: Tensor) -> bool:
    """One that was made in inference mode counts no changes."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not weight.is_inference()
