"""Divides the layers of a model over ranks that compute them together, by the plan that its family carries."""

import re
from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedConfig

from distflow.config.errors import UserError
from distflow.models.heads import unwrapped

_HEADS_DIM = 2  # of (batch, tokens, heads, width), which is what norms of queries and keys are given
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # each rank has some of the heads: the weight is whole on all, its gradient is summed over them
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
}
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def divide_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank of `mesh`, of one dimension, its columns and rows of the matrices that the plan names, in place;
    a head of its own is divided by rows and gives whole logits. All else is whole on every rank, which computes it from
    the same tokens.

    Raises UserError for a family without a plan, a plan with other kinds of layers, an adapter, and for sizes that the
    number of ranks does not divide.
    """
    causal, size = unwrapped(model), mesh.size()
    check_divisible(causal.config, size, adapted=causal is not model)
    plan = _plan_of(causal.config)
    for name, module in causal.base_model.named_modules():
        if style := plan.get(re.sub(r"\.\d+(?=\.)", ".*", name)):
            parallelize_module(module, mesh, _STYLES[style]())
    head = causal.get_output_embeddings()
    if head is not None and head.weight is not causal.get_input_embeddings().weight:
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))


def check_divisible(config: PreTrainedConfig, size: int, adapted: bool) -> None:
    """Whether `size` ranks can compute the layers of such a model together. adapted: with an adapter. Raises UserError
    as `divide_layers` does."""
    text, plan, family = config.get_text_config(), _plan_of(config), config.model_type
    if not plan:
        raise UserError(
            f"the family '{family}' has no plan for tensor parallelism: allocate data parallel ranks (d) alone"
        )
    if unknown := sorted(set(plan.values()) - _STYLES.keys()):
        raise UserError(
            f"the family '{family}' divides layers in ways that are not there yet ({', '.join(unknown)}): allocate "
            "data parallel ranks (d) alone"
        )
    if adapted:
        raise UserError("adapters (lora_rank) are not divided over tensor parallel ranks yet: allocate d alone")
    for name in _DIVIDED:
        if getattr(text, name) % size:
            raise UserError(
                f"{size} tensor parallel ranks (t{size}) do not divide the model's {name}={getattr(text, name)}"
            )


def _plan_of(config: PreTrainedConfig) -> dict[str, str]:
    return getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
