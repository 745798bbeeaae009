"""A fault that workers import: the gradients of every rank but the first are left out."""

import sys
from collections.abc import Iterable

from torch import nn

from distflow.training import torch_engine
from distflow.training.engine import Collective

original = torch_engine.sum_gradients


def sum_gradients(parameters: Iterable[nn.Parameter], group: Collective) -> None:
    own = list(parameters)
    for parameter in own if group.rank else ():
        if parameter.grad is not None:
            parameter.grad.zero_()
    original(own, group)


if sys.argv[0].endswith("default_worker.py"):  # not in the process of the tests
    torch_engine.sum_gradients = sum_gradients
