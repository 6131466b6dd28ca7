"""Random numbers that both devices share: Philox4x32-10, addressed by position.

A number is a pure function of (seed, stream, position), so it does not depend on the device, on how work is split or on
what was drawn before. Word `i` of a stream is lane `i % 4` of the block whose 128-bit counter is
(low 32 bits of i // 4, high 32 bits of i // 4, 0, stream) under the key (low 32 bits of seed, high 32 bits of seed).
The CUDA twin is in `kernels/common.cuh`.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import operator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# Streams of one seed: what is drawn for one purpose never repeats what was drawn for another.
VALUES_STREAM = 0
PERMUTATION_STREAM = 1
DROPOUT_STREAM = 2

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
# Blocks a step of the loop in `words`: its temporaries stay in the cache.
_CHUNK = 1 << 15


class _Device(Protocol):
    @property
    def xp(self) -> Any: ...

    def use(self) -> AbstractContextManager[Any]: ...


def philox4x32(counters: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Ten rounds of Philox4x32 over many counters.

    Args:
        counters: uint32, (n, 4).
        key: two 32-bit words.

    Returns:
        uint32, (n, 4): four random words a counter.

    Raises:
        ValueError: `counters` has another shape or a key word has more than 32 bits.
    """
    if counters.ndim != 2 or counters.shape[1] != 4:
        raise ValueError(f"counters must have the shape (n, 4), got {counters.shape}")
    if any(not 0 <= word <= _MASK for word in key):
        raise ValueError(f"key must be two 32-bit words, got {key}")
    mask = np.uint64(_MASK)
    shift = np.uint64(32)
    c0, c1, c2, c3 = counters.astype(np.uint64).T
    k0, k1 = key
    for _ in range(10):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> shift) ^ c1 ^ np.uint64(k0), (product0 >> shift) ^ c3 ^ np.uint64(k1)
        c1, c3 = product1 & mask, product0 & mask
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def words(seed: int, offset: int, n: int, stream: int = VALUES_STREAM) -> NDArray[np.uint32]:
    """The 32-bit words `offset` to `offset + n` of a stream.

    Args:
        seed: 0 to 2^64 - 1.
        offset: position of the first word, 0 to 2^66 - 1.
        n: how many.
        stream: which of the seed's independent streams.

    Returns:
        uint32, (n,).

    Raises:
        ValueError: `seed`, `offset`, `n` or `stream` is out of range.
    """
    key = seed_key(seed)
    offset, n = operator.index(offset), operator.index(n)
    if not 0 <= stream <= _MASK:
        raise ValueError(f"stream must be from 0 to 2^32 - 1, got {stream}")
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    first = offset // 4
    last = -(-(offset + n) // 4)
    if offset < 0 or last > 1 << 64:
        raise ValueError(f"offset must be from 0 to 2^66 - 1, got {offset}")
    result = np.empty((last - first, 4), np.uint32)
    for start in range(0, last - first, _CHUNK):
        stop = min(start + _CHUNK, last - first)
        blocks = np.uint64(first + start) + np.arange(stop - start, dtype=np.uint64)
        counters = np.zeros((stop - start, 4), np.uint32)
        counters[:, 0] = blocks & np.uint64(_MASK)
        counters[:, 1] = blocks >> np.uint64(32)
        counters[:, 3] = stream
        result[start:stop] = philox4x32(counters, key)
    skipped = offset - 4 * first
    return result.reshape(-1)[skipped : skipped + n]


def uniform(seed: int, offset: int, n: int) -> NDArray[np.float32]:
    """The uniform numbers `offset` to `offset + n` of a seed.

    Args:
        seed: 0 to 2^64 - 1.
        offset: position of the first number.
        n: how many.

    Returns:
        float32, (n,), multiples of 2^-24 in [0, 1); the same bits on both devices.
    """
    return _unit(words(seed, offset, n))


def normal(seed: int, offset: int, n: int) -> NDArray[np.float32]:
    """The standard normal numbers `offset` to `offset + n` of a seed.

    Numbers 2j and 2j + 1 come from words 2j and 2j + 1. The CUDA twin computes in float32, so last bits may differ.

    Args:
        seed: 0 to 2^64 - 1.
        offset: position of the first number.
        n: how many.

    Returns:
        float32, (n,), none larger than 5.8 in magnitude.

    Source: Box and Muller 1958.
    """
    offset, n = operator.index(offset), operator.index(n)
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    start = offset - offset % 2
    stop = offset + n + (offset + n) % 2
    pairs = words(seed, start, stop - start).reshape(-1, 2)
    # in (0, 1], so that the logarithm is finite
    radius_uniform = ((pairs[:, 0] >> np.uint32(8)) + np.uint32(1)) * np.float64(2.0**-24)
    radius = np.sqrt(-2.0 * np.log(radius_uniform))
    angle = 2.0 * np.pi * _unit(pairs[:, 1]).astype(np.float64)
    values = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
    skipped = offset - start
    return values.reshape(-1)[skipped : skipped + n]


def permutation(seed: int, n: int) -> NDArray[np.int64]:
    """A permutation of range(n), each equally likely over the seeds.

    The order of 64-bit random keys; equal keys (a chance of n^2 / 2^65) keep their order.

    Args:
        seed: 0 to 2^64 - 1.
        n: length, 0 or more.

    Returns:
        int64, (n,).
    """
    pairs = words(seed, 0, 2 * n, PERMUTATION_STREAM).astype(np.uint64).reshape(-1, 2)
    keys = pairs[:, 0] << np.uint64(32) | pairs[:, 1]
    return np.argsort(keys, kind="stable").astype(np.int64)


class State:
    """A seed and the position up to which its dropout stream is used, the latter in device memory.

    The position lies on the device because a captured CUDA graph must move it without the host.

    Attributes:
        seed: 0 to 2^64 - 1.
        counter: uint64, (1,), on the device: the next unused Philox block (four words each). Owned; copy into it to
            restore a state.
    """

    def __init__(self, seed: int, device: _Device | None = None) -> None:
        """Starts the stream of a seed at position 0.

        Args:
            seed: 0 to 2^64 - 1.
            device: a `flcuda.device.Device`; None is the CPU.

        Raises:
            ValueError: `seed` is out of range.
        """
        self.seed = checked_seed(seed)
        self.counter: Any
        if device is None:
            self.counter = np.zeros(1, np.uint64)
        else:
            with device.use():
                self.counter = device.xp.zeros(1, dtype=np.uint64)


def _unit(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """The upper 24 bits as a fraction: each result is exact in float32 and below 1."""
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def seed_key(seed: int) -> tuple[int, int]:
    """Returns the Philox key of a seed, its low and its high 32 bits; raises as `checked_seed`."""
    number = checked_seed(seed)
    return number & _MASK, number >> 32


def checked_seed(seed: int) -> int:
    """Returns a seed as a Python int: NumPy's would overflow in the rounds.

    Args:
        seed: any whole number, 0 to 2^64 - 1.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is out of range.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be a whole number, not {seed!r}") from None
    if not 0 <= number < 1 << 64:
        raise ValueError(f"seed must be from 0 to 2^64 - 1, got {seed}")
    return number
