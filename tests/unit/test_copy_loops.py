"""The loops by which the strided copy kernel visits two arrays."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flcuda.ops.arrays import copy_loops


@st.composite
def _views(draw: st.DrawFn) -> np.ndarray:
    """A view of int16 numbers 0, 1, 2, ...: permuted, sliced, reversed."""
    ndim = draw(st.integers(0, 5))
    shape = draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim))
    steps = draw(st.lists(st.sampled_from([1, 2, -1, -2]), min_size=ndim, max_size=ndim))
    larger = np.arange(np.prod([2 * size for size in shape], dtype=int), dtype=np.int16)
    view = larger.reshape([2 * size for size in shape])[tuple(slice(None, None, step) for step in steps)]
    return view.transpose(draw(st.permutations(range(ndim))))


@given(_views(), st.data())
def test_loops_visit_each_pair_once(src: np.ndarray, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(src.ndim)))
    out = np.zeros([src.shape[dim] for dim in order], np.int32).transpose(np.argsort(order))
    loops = copy_loops(out.shape, out.strides, src.strides, out.itemsize, src.itemsize)
    first = int(src.reshape(-1)[0])
    memory = np.zeros(out.size, np.int32)
    for places in itertools.product(*(range(length) for length, _, _ in loops)):
        to = sum(place * step for place, (_, step, _) in zip(places, loops, strict=True))
        memory[to] = first + sum(place * step for place, (_, _, step) in zip(places, loops, strict=True))
    found = memory.reshape([src.shape[dim] for dim in order]).transpose(np.argsort(order))
    np.testing.assert_array_equal(found, src)


def test_dense_copies_are_one_loop() -> None:
    assert copy_loops((2, 3, 4, 5), (120, 40, 10, 2), (240, 80, 20, 4), 2, 4) == [(120, 1, 1)]
    # nchw to nhwc: batch, space, channels
    nhwc = np.empty((2, 4, 5, 3), np.float32).transpose(0, 3, 1, 2)
    assert copy_loops(nhwc.shape, nhwc.strides, (240, 80, 20, 4), 4, 4) == [(2, 60, 60), (20, 3, 1), (3, 1, 20)]
