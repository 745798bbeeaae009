"""The uniform numbers of `rollout/randomness.py`, made on the device by the same generator, bit for bit.

A slot keeps one number: the state of SplitMix64 at its next draw, made of key and position. It is an int64 that stands
for the uint64 of the same bits, because torch has few operations on those: sums and products of two's complement
numbers wrap alike, and a mask takes from a shift the copies of the sign.
"""

from torch import Tensor

_BITS = 1 << 64
_WEYL = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9 - _BITS
_MIX_2 = 0x94D049BB133111EB - _BITS
NEXT = _WEYL - _BITS
"""What is added to a state for the draw after it."""


def state_of(key: int, position: int) -> int:
    """Of a 64-bit key at a token position, as a signed number. position: how many numbers were drawn before."""
    state = (key + (position + 1) * _WEYL) % _BITS
    return state - _BITS if state >= _BITS // 2 else state


def uniforms(states: Tensor) -> Tensor:
    """One float64 in [0, 1) for each state, int64, with 53 random bits."""
    mixed = (states ^ _shifted(states, 30)) * _MIX_1
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX_2
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-53


def _shifted(bits: Tensor, count: int) -> Tensor:
    """To the right, zeros from the left."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
