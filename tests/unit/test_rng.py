"""Philox against its authors' known answers, and what is built on it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flcuda import rng


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        # Random123, tests/kat_vectors, philox4x32 10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    found = rng.philox4x32(np.array([counter, counter], np.uint32), key)
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, [answer, answer])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 70), st.integers(0, 70))
def test_a_number_depends_on_its_position_only(seed: int, offset: int, skip: int, n: int) -> None:
    skip = min(skip, n)
    for draw in (rng.uniform, rng.normal):
        np.testing.assert_array_equal(draw(seed, offset, n)[skip:], draw(seed, offset + skip, n - skip))


def test_positions_beyond_32_bits_are_other_blocks() -> None:
    assert not np.array_equal(rng.words(1, 0, 8), rng.words(1, 4 << 32, 8))
    expected = rng.philox4x32(np.array([[5, 1, 0, 0]], np.uint32), (7, 3))[0]
    np.testing.assert_array_equal(rng.words((3 << 32) + 7, 4 * ((1 << 32) + 5), 4), expected)


def test_chunks_join_without_a_seam() -> None:
    n = 4 * rng._CHUNK + 13
    whole = rng.words(9, 2, n)
    np.testing.assert_array_equal(whole[-40:], rng.words(9, 2 + n - 40, 40))


def test_uniform_is_in_the_unit_interval_and_even() -> None:
    values = rng.uniform(3, 0, 200_000)
    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    # chi squared with 49 degrees of freedom: 0.9999 quantile 96
    assert ((counts - 4000) ** 2 / 4000).sum() < 96


def test_normal_has_the_moments_and_no_infinity() -> None:
    values = rng.normal(5, 1, 200_001).astype(np.float64)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    assert abs((values**4).mean() - 3) < 0.1
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


@given(st.integers(0, 2**64 - 1), st.integers(0, 300))
def test_permutation_holds_each_number_once(seed: int, n: int) -> None:
    found = rng.permutation(seed, n)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(np.sort(found), np.arange(n))


def test_permutations_are_even() -> None:
    counts = np.zeros((4, 4))
    for seed in range(4000):
        counts[np.arange(4), rng.permutation(seed, 4)] += 1
    assert np.abs(counts - 1000).max() < 150


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.uint32, np.int64, np.uint64])
def test_seeds_and_positions_of_numpy_are_numbers_too(kind: type) -> None:
    for draw in (rng.uniform, rng.normal):
        np.testing.assert_array_equal(draw(kind(77), kind(125), kind(9)), draw(77, 125, 9))
    assert type(rng.State(kind(77)).seed) is int


def test_streams_of_one_seed_differ() -> None:
    drawn = [rng.words(0, 0, 64, stream) for stream in (rng.VALUES_STREAM, rng.PERMUTATION_STREAM, rng.DROPOUT_STREAM)]
    assert not np.intersect1d(drawn[0], drawn[1]).size
    assert not np.intersect1d(drawn[0], drawn[2]).size


def test_state_starts_at_zero_on_the_host() -> None:
    state = rng.State(11)
    assert state.seed == 11
    assert state.counter.dtype == np.uint64
    np.testing.assert_array_equal(state.counter, [0])


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: rng.uniform(-1, 0, 1), "seed"),
        (lambda: rng.uniform(1 << 64, 0, 1), "seed"),
        (lambda: rng.uniform(0, -1, 1), "offset"),
        (lambda: rng.uniform(0, 1 << 66, 1), "offset"),
        (lambda: rng.uniform(0, 0, -1), "n must"),
        (lambda: rng.normal(0, 0, -1), "n must not be negative, got -1"),
        (lambda: rng.words(0, 0, 1, -1), "stream"),
        (lambda: rng.State(-1), "seed"),
        (lambda: rng.philox4x32(np.zeros((3, 2), np.uint32), (0, 0)), "counters"),
        (lambda: rng.philox4x32(np.zeros((1, 4), np.uint32), (1 << 32, 0)), "key"),
    ],
)
def test_bad_arguments_are_named(call: object, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        call()  # type: ignore[operator]
