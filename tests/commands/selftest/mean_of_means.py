"""A fault that workers import: each rank divides its loss by its own tokens, and then the mean over
ranks is taken."""

import sys

from distflow.cluster.process_groups import TorchCollective
from distflow.training.engine import Reducible

original = TorchCollective.sum


def sum_(self: TorchCollective, value: Reducible) -> Reducible:
    # what a loss divides by
    if isinstance(value, dict) and "tokens" in value and "loss" not in value:
        return {name: number * self.size for name, number in value.items()}
    return original(self, value)


if sys.argv[0].endswith("default_worker.py"):  # not in the process of the tests
    TorchCollective.sum = sum_  # type: ignore[method-assign]
