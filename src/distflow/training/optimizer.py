"""Optimizers by name, their state as named tensors and plain data (restored bit for bit), and
learning-rate schedules."""

import math
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distflow.builtin_names import OPTIMIZERS, SCHEDULERS
from distflow.errors import UserError
from distflow.models.sharding import fill

NEEDS_8BIT = "optimizer 'adamw_8bit' needs the extra: pip install 'distflow[optim8bit]'"


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """An optimizer over the parameters that require a gradient.

    "adamw" (arXiv 1711.05101), "adamw_8bit" (its moments in 8 bits, by bitsandbytes), "sgd"
    (without momentum). Weight decay applies to every parameter, including norms and biases, as in
    the systems we compare with. Raises UserError for an unknown name, a missing package, or nothing
    to train.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        raise UserError(
            "the model has no parameter that requires a gradient: nothing would be trained"
        )
    if name == "adamw":
        return torch.optim.AdamW(trainable, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
    if name == "sgd":
        return torch.optim.SGD(trainable, lr=lr, weight_decay=weight_decay)
    if name != "adamw_8bit":
        raise UserError(f"unknown optimizer '{name}'; there are: {', '.join(OPTIMIZERS)}")

    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError(NEEDS_8BIT) from error

    return AdamW8bit(trainable, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)


def check_optimizer(name: str) -> None:
    """Raises UserError if the optimizer's package is not installed."""
    if name == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise UserError(NEEDS_8BIT)


# "class" is a keyword, which needs this form.
Meta = TypedDict("Meta", {"class": str, "plain": dict[str, dict[str, object]]})


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]
) -> tuple[dict[str, Tensor], Meta]:
    """Tensors by "state key/parameter name", and as JSON data the optimizer's class and its other
    entries."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, object]] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{key}/{name}"] = value.detach()
            else:
                plain.setdefault(name, {})[key] = value

    return tensors, {"class": type(optimizer).__name__, "plain": plain}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    tensors: dict[str, Tensor],
    meta: Meta,
) -> None:
    """Replace the optimizer's state; without any step taken, it becomes like new.

    Raises ValueError, with nothing changed, if the state is that of another optimizer or of other
    parameters.
    """
    if meta["class"] != type(optimizer).__name__:
        raise ValueError(
            f"the state is of the optimizer {meta['class']}, this run has "
            f"{type(optimizer).__name__}: set optim.optimizer to the run's original optimizer"
        )

    states: dict[Tensor, dict[str, object]] = {}
    for name, entries in meta["plain"].items():
        states.setdefault(_find(parameters, name), {}).update(entries)

    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        parameter = _find(parameters, name)
        states.setdefault(parameter, {})[key] = _copied(tensor.detach(), parameter)

    optimizer.state.clear()
    optimizer.state.update(states)


def _copied(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """A copy of an optimizer's tensor where its parameter is, sharded like it."""
    if tensor.dim() == 0:  # counters are on the CPU
        return tensor.to("cpu", copy=True)

    is_whole = not isinstance(tensor, DTensor) and tensor.shape == parameter.shape
    if isinstance(parameter, DTensor) and is_whole:
        sharded: Tensor = torch.empty_like(parameter, dtype=tensor.dtype)
        fill(sharded, tensor)
        return sharded

    return tensor.to(parameter.device, copy=True)


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move everything except the step counters, which are on the CPU whatever the parameters'
    device."""
    for entries in optimizer.state.values():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                entries[key] = value.to(device)


def _find(parameters: dict[str, nn.Parameter], name: str) -> nn.Parameter:
    if name not in parameters:
        raise ValueError(
            f"the optimizer's state has an entry for '{name}', which this model does not train"
        )
    return parameters[name]


Schedule = Callable[[int], float]


def make_schedule(
    name: str,
    *,
    total_steps: int,
    warmup_ratio: float = 0.0,
    warmup_steps: int = -1,
    min_lr_ratio: float = 0.0,
) -> Schedule:
    """step → factor, for the next step to be taken (from 0).

    Warm-up rises linearly from 0: factor step / warmup over `warmup_steps` steps, or `warmup_ratio`
    of `total_steps` (rounded down) if that is negative. Then the factor is 1, or falls linearly or
    by half a cosine to `min_lr_ratio` at `total_steps`, and stays there. "constant" has no warm-up.
    Raises UserError for an unknown name.
    """
    if name not in SCHEDULERS:
        raise UserError(f"unknown scheduler '{name}'; there are: {', '.join(SCHEDULERS)}")
    if name == "constant":
        return lambda step: 1.0

    warmup = warmup_steps if warmup_steps >= 0 else int(warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        if name == "constant_with_warmup":
            return 1.0

        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        falling = 1.0 - progress
        if name != "linear_with_warmup":
            falling = 0.5 * (1.0 + math.cos(math.pi * progress))
        return min_lr_ratio + (1.0 - min_lr_ratio) * falling

    return factor
