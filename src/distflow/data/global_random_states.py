"""The process's global random generators of `random`, numpy and torch, which belong to user
functions.

Nothing in this package uses them: samples, shuffles and initial weights have their own generators.
In the training loop functions run one after another, so the states that user functions leave
persist, and are in every checkpoint. In the rollout loop and in reward processes calls run in no
fixed order: each call has its own generators, seeded by its row or group, and does not change the
global ones.

Imports neither numpy nor torch, which a reward worker may not need.
"""

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

States = Mapping[str, Any]
"""State by generator, in the generator's form."""


def loaded() -> tuple[str, ...]:
    """The generators in this process; each exists once its module is imported."""
    return tuple(name for name in ("random", "numpy.random", "torch") if name in sys.modules)


def device_module() -> Any:
    """torch's module for the accelerator that this process uses, e.g. `torch.cuda`; None if it uses
    none."""
    torch = sys.modules["torch"]
    if torch.accelerator.current_accelerator() is None:
        return None
    module = torch.get_device_module()
    return module if module.is_initialized() else None


def seed(*identity: object) -> None:
    """Seed all loaded generators; equal `repr` of the identity gives the same seed on every
    machine."""
    digest = hashlib.blake2b(
        repr(identity).encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)

    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(number)
        if device := device_module():
            device.manual_seed_all(number)


def states() -> States:
    """State of all loaded generators."""
    found: dict[str, Any] = {"random": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = numpy.random.get_state()

    if torch := sys.modules.get("torch"):
        found["torch"] = torch.default_generator.get_state()
        if device := device_module():
            found["device"] = device.get_rng_state_all()

    return found


def put_back(found: States) -> None:
    """Restore the result of `states`."""
    random.setstate(found["random"])
    if "numpy" in found:
        sys.modules["numpy"].random.set_state(found["numpy"])
    if "torch" in found:
        sys.modules["torch"].default_generator.set_state(found["torch"])
    if "device" in found and (device := device_module()):
        device.set_rng_state_all(found["device"])


@contextmanager
def lent(begin: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, the generators are as `begin` sets them, or unchanged; afterwards they have the
    states from before."""
    before = states()
    try:
        begin()
        yield
    finally:
        put_back(before)
