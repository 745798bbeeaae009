"""The coordinator of a run whose calls begin in an order that is not the one in which they were
made."""

import functools
import random
import time
from collections.abc import Callable
from typing import Any

from distflow.cluster.coordinator_actor import CoordinatorActor
from tests.cluster.measured_actors import methods

LONGEST_S = 0.05


class UnorderedCoordinator(CoordinatorActor):
    """Each call waits for a moment of its own before it begins."""


def delayed(method: Callable[..., Any], moments: random.Random) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        time.sleep(moments.uniform(0, LONGEST_S))
        return method(self, *arguments)

    return call


for _name, _method in methods(CoordinatorActor).items():
    setattr(UnorderedCoordinator, _name, delayed(_method, random.Random(_name)))
