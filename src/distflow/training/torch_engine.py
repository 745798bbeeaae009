"""The train engine: packed micro-batches, exact gradient accumulation, one optimizer step a mini-batch; with gradient
sum and clipping over ranks, and activation checkpointing.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from distflow.data.batch import Batch, read_numbers
from distflow.errors import UserError
from distflow.graph.fields import Axis
from distflow.models.lora import named_weights, unwrapped
from distflow.models.sharding import fill, whole
from distflow.training.engine import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    Collective,
    Counts,
    LossFn,
    Sums,
    TrainState,
)
from distflow.training.optimizer import Schedule, load_optimizer_state, move_optimizer_state, optimizer_state
from distflow.training.scorer import ScorerOptions, TorchScorer, micro_batches

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def sum_gradients(parameters: Iterable[nn.Parameter], group: Collective) -> None:
    """Sum the gradients over the ranks. Those of sharded weights were summed during the backward pass."""
    for parameter in parameters:
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = grad if isinstance(parameter, DTensor) else group.sum(grad)


def clip_gradients(parameters: Collection[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale the gradients down to `max_norm` where they are above it; returns their norm before, a scalar.

    It includes all shards: the same on every rank. Nothing waits for it: if it is not finite the gradients are not
    either, before and after, and the caller drops them.
    """
    norm = _norm([p.grad for p in parameters if p.grad is not None])
    if max_norm is not None:
        for alike in _alike(parameters):
            clip_grads_with_norm_(alike, max_norm, norm)
    return norm


def _norm(gradients: list[Tensor]) -> Tensor:
    """Gradients with the same layout share one reduction."""
    norms = [whole(get_total_norm(alike)) for alike in _alike(gradients)]
    return norms[0] if len(norms) == 1 else get_total_norm(norms)


def _alike(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Grouped by mesh and placement."""
    found: dict[object, list[AnyTensor]] = {}
    for tensor in tensors:
        how = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        found.setdefault(how, []).append(tensor)
    return list(found.values())


def checkpoint_activations(model: nn.Module) -> None:
    """Switch it on, in training mode, in the form that autograd follows through packed forwards and adapters.

    Raises UserError if the family has none.
    """
    causal = unwrapped(model)
    # transformers renamed it in 5.x, and warns about the old name
    enable = getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"enable_gradient_checkpointing is on, but {error}") from error


HOST = torch.device("cpu")


class TorchTrainEngine(TorchScorer):
    """Trains `model`, with parameters in float32, by `optimizer` over its trainable ones.

    Losses and gradients of micro-batches add up: the loss function weighs each by the counts of the whole mini-batch,
    so the gradient does not depend on how the mini-batch was divided, over micro-batches or over ranks. The model's
    weights are whole on every rank, or spread over the ranks (`models/sharding.py`); then all ranks of the mesh make
    the same calls, and each changes its own part of weights and moments.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        max_grad_norm: float | None = 1.0,
        gradient_checkpointing: bool = False,
        group: Collective | None = None,
        **scoring: Unpack[ScorerOptions],
    ) -> None:
        """max_grad_norm: gradients above it are scaled down to it; None never. gradient_checkpointing: keep only each
        layer's input, and compute the layer again in the backward pass. group: the ranks that share the mini-batch;
        each sees its own part, all take the same step, bit for bit.
        """
        super().__init__(model, group=group, **scoring)
        self.optimizer = optimizer
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.num_steps = 0
        self._device = self.device
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._is_on_host = next(model.parameters()).device.type != self._device.type  # always, except for its buffers
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        _refuse_low_precision(self._trainable)
        if gradient_checkpointing:
            checkpoint_activations(model)

    def train_step(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        """One optimizer step over a mini-batch (this rank's part of it, which may be empty).

        A loss or gradient norm that is not finite skips the step: weights, optimizer and schedule stay as they were.
        So does a mini-batch in which, over all ranks, no token counts: momentum and weight decay would move weights.
        Returns `loss`, `grad_norm` (before clipping), `lr`, `skipped` (0 or 1), `empty` (1 where it was skipped for
        want of tokens), and the loss function's own metrics, but of an empty mini-batch.
        """
        self.model.train()
        counts = self.group.sum(loss_fn.counts(batch))
        factor = self.schedule(self.num_steps)
        lrs = [base * factor for base in self._base_lrs]
        if counts.get("tokens") == 0:
            return {"loss": 0.0, "grad_norm": 0.0, "lr": lrs[0], "skipped": 1.0, "empty": 1.0}
        shares: list[Sums] = []
        for index in micro_batches(batch, self.max_tokens, self.group):
            micro = batch.select(index)
            flat = self.compute(micro, loss_fn.outputs)
            micro = micro.to(self.device)
            loss, stats = loss_fn({name: micro.pad(flat[name], Axis.RESPONSE) for name in flat}, micro, counts)
            if loss.requires_grad:
                loss.backward()
            shares.append({"loss": loss.detach(), **stats})
        sum_gradients(self._trainable.values(), self.group)
        norm = clip_gradients(self._trainable.values(), self.max_grad_norm)
        own_sums, grad_norm = _read(shares, norm)
        sums = self.group.sum(own_sums)
        total = sums.pop("loss")
        skipped = not (math.isfinite(total) and math.isfinite(grad_norm))
        if not skipped:
            self._step(lrs)
        self.optimizer.zero_grad(set_to_none=True)
        own = loss_fn.finish(sums, counts)
        return {**own, "loss": total, "grad_norm": grad_norm, "lr": lrs[0], "skipped": float(skipped), "empty": 0.0}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by their Hugging Face names, tied ones once, LoRA merged; else the model's own storage.

        A sharded weight is gathered when it is read, by all ranks together.
        """
        return ((name, whole(tensor)) for name, tensor in named_weights(self.model))

    def state(self) -> TrainState:
        """All that changes by training: trainable weights, the optimizer's state, the number of steps taken.

        The tensors are the live ones: copy or write them before the next step. Sharded ones are `DTensor`s, of
        which each rank has its part.
        """
        tensors = {MODEL_PREFIX + name: p.detach() for name, p in self._trainable.items()}
        moments, meta = optimizer_state(self.optimizer, self._trainable)
        tensors.update({OPTIMIZER_PREFIX + name: tensor for name, tensor in moments.items()})
        return TrainState(tensors, {"num_steps": self.num_steps, "optimizer": meta})

    def load_state(self, state: TrainState) -> None:
        """Resume, bit for bit, from the result of `state`. Rates and other options stay those of this engine.

        For a sharded model, tensors are sharded in the same way, or whole: each rank takes its part.
        Raises ValueError, with nothing changed, if the weights' names or shapes or the optimizer differ.
        """
        weights = state.trained_weights()
        _check_same_weights(self._trainable, weights)
        prefix = OPTIMIZER_PREFIX
        moments = {n.removeprefix(prefix): t for n, t in state.tensors.items() if n.startswith(prefix)}
        load_optimizer_state(self.optimizer, self._trainable, moments, state.meta["optimizer"])
        for name, parameter in self._trainable.items():
            fill(parameter, weights[name])
        self.num_steps = int(state.meta["num_steps"])

    def offload(self, weights: bool = True, moments: bool = True) -> None:
        """Free the device: weights, moments or both wait in the host's memory, the weights until `onload`, the moments
        until the next optimizer step. Both come back bit for bit."""
        if weights:
            self._move(HOST)
        if moments:
            move_optimizer_state(self.optimizer, HOST)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See `offload`."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        if not self._is_on_host:
            self.model.to(device)

    def _step(self, lrs: list[float]) -> None:
        move_optimizer_state(self.optimizer, next(iter(self._trainable.values())).device)
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        self.optimizer.step()
        self.num_steps += 1


def _read(shares: list[Sums], norm: Tensor) -> tuple[Counts, float]:
    """The sums over the micro-batches, and the gradient's norm: the only wait of a step for its device."""
    names = [name for share in shares for name in share]
    *values, grad_norm = read_numbers([*(value for share in shares for value in share.values()), norm])
    sums: Counts = {"loss": 0.0}
    for name, value in zip(names, values, strict=True):
        sums[name] = sums.get(name, 0.0) + value
    return sums, grad_norm


def _refuse_low_precision(trainable: dict[str, nn.Parameter]) -> None:
    low = [name for name, p in trainable.items() if p.dtype in (torch.bfloat16, torch.float16)]
    if low:
        raise UserError(
            f"weights that are trained must be float32 ({low[0]} is not): load the model in float32 and set "
            "compute_dtype to the precision wanted, or small updates would be rounded away"
        )


def _check_same_weights(own: dict[str, nn.Parameter], tensors: dict[str, Tensor]) -> None:
    different = sorted(own.keys() ^ tensors.keys()) or [n for n, p in own.items() if p.shape != tensors[n].shape]
    if different:
        raise ValueError(
            f"the state is of another model: {len(different)} weights differ in name or shape, {different[0]} first; "
            "resume with the model (and lora_rank) that the run began with"
        )
