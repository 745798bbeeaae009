"""The random numbers of draws, which depend only on stream, sample and position."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from distflow.rollout.engine import Stream

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def sample_key(stream: Stream, sample: int) -> int:
    """A 64-bit key of (seed, stream name, epoch, prompt row, sample index), the same on every
    machine."""
    identity = repr((stream.seed, stream.name, stream.epoch, stream.row, sample)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One float64 in [0, 1) for each (key, token position), `(rows,)`, with 53 random bits.

    This is output number `position` of the SplitMix64 generator seeded by `key` (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014), which can be computed without
    the ones before it.
    """
    with np.errstate(over="ignore"):
        state = keys + (positions.astype(np.uint64) + np.uint64(1)) * _WEYL
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
