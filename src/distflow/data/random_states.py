"""The process's global random generators of `random`, numpy and torch, which belong to user functions.

Nothing in this package uses them: samples, shuffles and initial weights have their own generators. In the training loop
functions run one after another, so the states that user functions leave persist, and are in every checkpoint. In the
rollout loop and in reward processes calls run in no fixed order: each call has its own generators, seeded by its row or
group, and does not change the global ones.

Imports neither numpy nor torch, which a reward worker may not need.
"""

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

States = Mapping[str, Any]
"""State by generator, in the generator's form."""


def loaded() -> tuple[str, ...]:
    """The generators in this process; each exists once its module is imported."""
    return tuple(name for name in ("random", "numpy.random", "torch") if name in sys.modules)


def device_module() -> Any:
    """torch's module for the accelerator that this process uses, e.g. `torch.cuda`; None if it uses none."""
    torch = sys.modules["torch"]
    if torch.accelerator.current_accelerator() is None:
        return None
    module = torch.get_device_module()
    return module if module.is_initialized() else None


def seed(*identity: object) -> None:
    """Seed all loaded generators; equal `repr` of the identity gives the same seed on every machine."""
    digest = hashlib.blake2b(repr(identity).encode("utf-8", "surrogatepass"), digest_size=8).digest()
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
        found["numpy"] = _numpy_state(numpy.random)
    if torch := sys.modules.get("torch"):
        found["torch"] = torch.default_generator.get_state()
        if device := device_module():
            found["device"] = device.get_rng_state_all()
    return found


_numpy_memory: tuple[Any, memoryview] | None = None
"""numpy's generator, and its key and position in memory: reading and setting these takes 1 µs, its state 25 µs, which
each await of a user's function would cost several times."""
_numpy_known: tuple[bytes, Any] | None = None
"""Its memory and its state when that was last read or set, unless the state holds a normal deviate to be drawn next, as
drawing that would not change the memory."""


def _memory_of(numpy_random: Any) -> memoryview | None:
    """None if the generator is not the one whose memory is known."""
    global _numpy_memory
    generator = numpy_random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return None
    if _numpy_memory is None or _numpy_memory[0] is not generator:
        address = generator.ctypes.state_address
        _numpy_memory = generator, memoryview((ctypes.c_ubyte * (4 * 625)).from_address(address)).cast("B")
    return _numpy_memory[1]


def _numpy_state(numpy_random: Any) -> Any:
    global _numpy_known
    memory = _memory_of(numpy_random)
    if memory is not None and _numpy_known is not None and bytes(memory) == _numpy_known[0]:
        return _numpy_known[1]
    state = numpy_random.get_state()
    _numpy_known = (bytes(memory), state) if memory is not None and not state[3] else None
    return state


def _set_numpy(numpy_random: Any, state: Any) -> None:
    global _numpy_known
    memory = _memory_of(numpy_random)
    is_known = memory is not None and _numpy_known is not None and bytes(memory) == _numpy_known[0]
    if memory is None or not is_known or state[3]:
        numpy_random.set_state(state)
    else:
        memory[:] = state[1].tobytes() + state[2].to_bytes(4, sys.byteorder)
    _numpy_known = (bytes(memory), state) if memory is not None and not state[3] else None


def put_back(found: States) -> None:
    """Restore the result of `states`."""
    random.setstate(found["random"])
    if "numpy" in found:
        _set_numpy(sys.modules["numpy"].random, found["numpy"])
    if "torch" in found:
        sys.modules["torch"].default_generator.set_state(found["torch"])
    if "device" in found and (device := device_module()):
        device.set_rng_state_all(found["device"])


@contextmanager
def lent(own: States) -> Iterator[None]:
    """Inside, the generators have the state `own`; afterwards the one from before."""
    before = states()
    put_back(own)
    try:
        yield
    finally:
        put_back(before)


def seeded(*identity: object) -> States:
    """The states after `seed`, without changing the generators."""
    with lent(states()):
        seed(*identity)
        return states()
