"""An optimizer's state as named tensors and plain data, and back, bit for bit."""

from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distflow.models.shards import fill

# "class" is a word of the language: such a key needs this form.
Meta = TypedDict("Meta", {"class": str, "plain": dict[str, dict[str, object]]})


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]
) -> tuple[dict[str, Tensor], Meta]:
    """Tensors by "state key/parameter name", and what JSON can hold: the optimizer's class, and its other entries."""
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
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor], meta: Meta
) -> None:
    """Replace the optimizer's state; an optimizer that had taken no step is as new.

    Raises ValueError, with nothing changed, if the state is another optimizer's or of other parameters.
    """
    if meta["class"] != type(optimizer).__name__:
        raise ValueError(
            f"the state is of the optimizer {meta['class']}, this run has {type(optimizer).__name__}: "
            "set optim.optimizer to what the run began with"
        )
    states: dict[Tensor, dict[str, object]] = {}
    for name, entries in meta["plain"].items():
        states.setdefault(_find(parameters, name), {}).update(entries)
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        parameter = _find(parameters, name)
        states.setdefault(parameter, {})[key] = _beside(parameter, tensor.detach())
    optimizer.state.clear()
    optimizer.state.update(states)


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Everything but the step counters, which lie on the CPU whatever the parameters' device."""
    for entries in optimizer.state.values():
        entries.update({key: v.to(device) for key, v in entries.items() if isinstance(v, Tensor) and v.dim() > 0})


def _beside(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """A copy of one of the parameter's moments where its step takes place, spread as it is; counters on the CPU."""
    if isinstance(parameter, DTensor) and not isinstance(tensor, DTensor) and tensor.shape == parameter.shape:
        spread = torch.empty_like(parameter, dtype=tensor.dtype)
        fill(spread, tensor)
        return spread
    return tensor.to(torch.device("cpu") if tensor.dim() == 0 else parameter.device, copy=True)


def _find(parameters: dict[str, nn.Parameter], name: str) -> nn.Parameter:
    if name not in parameters:
        raise ValueError(f"the optimizer's state has an entry for '{name}', which this model does not train")
    return parameters[name]
