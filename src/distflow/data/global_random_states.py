"""The process's global random generators of `random`, numpy and torch, which belong to user
functions.

Nothing in this package uses them: samples, shuffles and initial weights have their own generators.
In the training loop functions run one after another, so the states that user functions leave
persist, and are in every checkpoint. In the rollout loop and in reward processes calls run in no
fixed order: each call has its own generators, seeded by its row or group, and does not change the
global ones.

Imports neither numpy nor torch, which a reward worker may not need.
"""

import ctypes
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
        found["numpy"] = _numpy_state(numpy)
    if torch := sys.modules.get("torch"):
        found["torch"] = torch.default_generator.get_state()
        if device := device_module():
            found["device"] = device.get_rng_state_all()
    return found


def put_back(found: States) -> None:
    """Restore the result of `states`."""
    random.setstate(found["random"])
    if "numpy" in found:
        _set_numpy_state(sys.modules["numpy"], found["numpy"])
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


_NUMPY_BYTES = 2500
"""Of the memory of numpy's generator: 624 words of state and the position."""
_known: tuple[bytes, Any] = b"", None
"""The memory of numpy's generator and its state, when it was last seen. numpy copies its state word
by word (30 µs), which for each await of user code took longer than most of that code; its memory is
compared and copied in 1 µs."""


def _numpy_state(numpy: Any) -> Any:
    global _known
    if not _is_known(_numpy_memory(numpy)[1]):
        state = numpy.random.get_state()
        _known = _bytes_of(state), state
    return _known[1]


def _set_numpy_state(numpy: Any, state: Any) -> None:
    global _known
    own, (address, memory) = _bytes_of(state), _numpy_memory(numpy)
    if own and not state[3] and _is_known(memory):
        ctypes.memmove(address, own, _NUMPY_BYTES)
    else:
        numpy.random.set_state(state)
    _known = own, state


def _is_known(memory: bytes) -> bool:
    """Whether the state is still `_known`, without the stored normal variate that is in another
    part of the memory."""
    return bool(memory) and memory == _known[0] and not _known[1][3]


def _numpy_memory(numpy: Any) -> tuple[int, bytes]:
    """Its address and content; (0, b"") for a generator that the user has replaced by another
    kind."""
    generator = numpy.random.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return 0, b""
    address = generator.ctypes.state_address
    return address, ctypes.string_at(address, _NUMPY_BYTES)


def _bytes_of(state: Any) -> bytes:
    """As `_numpy_memory`, for a result of `get_state`."""
    if not isinstance(state, tuple):  # of another kind of generator
        return b""
    return bytes(state[1].tobytes() + int(state[2]).to_bytes(4, sys.byteorder))
