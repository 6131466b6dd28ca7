"""The convolution op on the CPU: results, layouts, outputs, bad input, and what a thread remembers."""

import copy
import pickle
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import flcuda
from flcuda import device as devices
from flcuda.ops import convolution as op
from flcuda.ops.convolution import Convolution, convolution

DTYPES = [np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.fixture(autouse=True)
def nothing_remembered():
    op._remembered.calls.clear()


def padded_loop(x, w, y, stride, padding, dilation, groups):
    """One loop over taps that relates three float64 arrays: yields matching parts of padded x, w and y."""
    c, k = w.shape[1], w.shape[0] // groups
    for group in range(groups):
        cs, ks = slice(group * c, group * c + c), slice(group * k, group * k + k)
        for tap in np.ndindex(*w.shape[2:]):
            read = tuple(
                slice(t * d, t * d + (o - 1) * s + 1, s)
                for t, d, o, s in zip(tap, dilation, y.shape[2:], stride, strict=True)
            )
            yield x[(slice(None), cs, *read)], w[(ks, slice(None), *tap)], y[:, ks]


def expected(direction, geometry, first, second, x_shape=None, w_shape=None):
    """The result in float64."""
    pads = [(0, 0), (0, 0), *zip(*geometry.padding, strict=True)]
    a, b = (np.asarray(array, np.float64) for array in (first, second))
    rest = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    if direction == "forward":
        y = np.zeros(geometry.output_shape(a.shape, b.shape))
        for x_part, w_part, y_part in padded_loop(np.pad(a, pads), b, y, *rest):
            y_part += np.einsum("nc...,kc->nk...", x_part, w_part)
        return y
    if direction == "backward_data":
        x = np.zeros([size + sum(pad) for size, pad in zip(x_shape, pads, strict=True)])
        for x_part, w_part, y_part in padded_loop(x, b, a, *rest):
            x_part += np.einsum("nk...,kc->nc...", y_part, w_part)
        return x[tuple(slice(before, before + size) for size, (before, _) in zip(x_shape, pads, strict=True))]
    w = np.zeros(w_shape)
    for x_part, w_part, y_part in padded_loop(np.pad(a, pads), w, b, *rest):
        summed = (0, *range(2, y_part.ndim))
        w_part += np.tensordot(y_part, x_part, (summed, summed))
    return w


def close(actual, wanted):
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[str(actual.dtype)]
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, atol=tolerance * (1 + np.abs(wanted).max()))


def random(rng, shape, dtype=np.float64, layout="nchw"):
    a = devices.empty(shape, dtype, device="cpu", layout=layout)
    a[...] = rng.standard_normal(shape)
    return a


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_three_directions(dtype, layout, rng):
    geometry = convolution(stride=(2, 1), padding=((1, 2), (0, 1)), dilation=(1, 2), groups=2)
    x, w = random(rng, (3, 4, 9, 8), dtype, layout), random(rng, (6, 2, 3, 2), dtype, layout)
    y = geometry.forward(x, w)
    close(y, expected("forward", geometry, x, w))
    assert y.dtype == dtype
    assert devices.memory_layout(y) == layout
    dy = random(rng, y.shape, dtype, layout)
    dx = geometry.backward_data(dy, w, x.shape)
    close(dx, expected("backward_data", geometry, dy, w, x_shape=x.shape))
    assert devices.memory_layout(dx) == layout
    dw = geometry.backward_filter(x, dy, w.shape)
    close(dw, expected("backward_filter", geometry, x, dy, w_shape=w.shape))
    assert devices.memory_layout(dw) == layout


@pytest.mark.parametrize(("ndim", "size"), [(1, (12,)), (3, (4, 5, 6))])
def test_other_ranks(ndim, size, rng):
    geometry = convolution(stride=2, padding=1, ndim=ndim)
    x, w = random(rng, (2, 3, *size)), random(rng, (4, 3, *[3] * ndim))
    y = geometry.forward(x, w)
    close(y, expected("forward", geometry, x, w))
    close(geometry.backward_data(y, w, x.shape), expected("backward_data", geometry, y, w, x_shape=x.shape))
    close(geometry.backward_filter(x, y, w.shape), expected("backward_filter", geometry, x, y, w_shape=w.shape))


def test_out_is_written_or_added_to(rng):
    geometry = convolution(padding=1)
    x, w = random(rng, (2, 3, 5, 5)), random(rng, (4, 3, 3, 3))
    # Every other element of a larger array: positive strides, no overlap, not contiguous.
    memory = np.full((2, 4, 5, 10), np.nan)
    y = memory[..., ::2]
    assert geometry.forward(x, w, out=y) is y
    close(y, expected("forward", geometry, x, w))
    assert np.isnan(memory[..., 1::2]).all()
    for direction, shape in (("backward_data", x.shape), ("backward_filter", w.shape)):
        inputs = (y, w) if direction == "backward_data" else (x, y)
        out = random(rng, shape)
        before = out.copy()
        assert getattr(geometry, direction)(*inputs, shape, out=out, accumulate=True) is out
        key = "x_shape" if direction == "backward_data" else "w_shape"
        close(out, before + expected(direction, geometry, *inputs, **{key: shape}))
        # The next call writes: nothing of the first remains.
        getattr(geometry, direction)(*inputs, shape, out=out)
        close(out, expected(direction, geometry, *inputs, **{key: shape}))


def test_searching_does_not_touch_what_is_added_to(rng):
    geometry = convolution(padding=1)
    x, w, dy = random(rng, (4, 3, 6, 6)), random(rng, (4, 3, 3, 3)), random(rng, (4, 4, 6, 6))
    out = np.ones(w.shape)
    geometry.backward_filter(x, dy, w.shape, out=out, accumulate=True)
    close(out, 1 + expected("backward_filter", geometry, x, dy, w_shape=w.shape))


def test_dw_in_a_given_layout(rng):
    geometry = convolution()
    x, dy = random(rng, (2, 3, 5, 5)), random(rng, (2, 4, 3, 3))
    dw = geometry.backward_filter(x, dy, (4, 3, 3, 3), layout="nhwc")
    assert devices.memory_layout(dw) == "nhwc"
    close(dw, expected("backward_filter", geometry, x, dy, w_shape=(4, 3, 3, 3)))


def test_one_channel_follows_the_other_operand(rng):
    # A single channel is both layouts at once: the filters decide.
    x, w = random(rng, (2, 1, 5, 5)), random(rng, (4, 1, 3, 3), layout="nhwc")
    assert devices.memory_layout(convolution().forward(x, w)) in ("nchw", "nhwc")
    x = random(rng, (2, 3, 5, 5), layout="nhwc")
    assert devices.memory_layout(convolution().forward(x, random(rng, (4, 3, 1, 1)))) == "nhwc"


def test_broadcast_inputs_are_copied(rng):
    geometry = convolution(padding=1)
    x = np.broadcast_to(random(rng, (1, 3, 5, 5)), (4, 3, 5, 5))
    w = np.broadcast_to(random(rng, (4, 3, 1, 1)), (4, 3, 3, 3))
    for _ in range(2):  # searched, then remembered
        close(geometry.forward(x, w), expected("forward", geometry, x, w))
    dy = np.broadcast_to(np.float64(0.5), (4, 4, 5, 5))
    for _ in range(2):
        close(geometry.backward_data(dy, w, x.shape), expected("backward_data", geometry, dy, w, x_shape=x.shape))


def test_strided_inputs_run(rng):
    geometry = convolution(padding=1)
    x = random(rng, (3, 4, 6, 8))[:, ::2, 1:, ::2]
    w = random(rng, (3, 3, 2, 4)).transpose(3, 2, 1, 0)
    y = geometry.forward(x, w)
    close(y, expected("forward", geometry, x, w))
    assert y.flags.c_contiguous


def test_an_empty_batch_needs_no_source(rng, monkeypatch):
    monkeypatch.setattr(op.finder, "plan", lambda *_, **__: pytest.fail("nothing is to be planned"))
    geometry = convolution(padding=1, stride=2)
    x, w = np.empty((0, 3, 7, 7), np.float32), random(rng, (4, 3, 3, 3), np.float32)
    y = geometry.forward(x, w)
    assert y.shape == (0, 4, 4, 4)
    assert y.dtype == np.float32
    assert geometry.backward_data(y, w, x.shape).shape == x.shape
    np.testing.assert_array_equal(geometry.backward_filter(x, y, w.shape), np.zeros(w.shape))
    out = np.ones(w.shape, np.float32)
    geometry.backward_filter(x, y, w.shape, out=out, accumulate=True)
    np.testing.assert_array_equal(out, np.ones(w.shape))
    geometry.backward_filter(x, y, w.shape, out=out)
    np.testing.assert_array_equal(out, np.zeros(w.shape))
    with pytest.raises(ValueError, match="w_shape"):
        geometry.forward(x, w[:, :2])
    with pytest.raises(TypeError, match="mixed"):
        geometry.forward(x, w.astype(np.float64))


X, W = (2, 4, 6, 6), (4, 4, 3, 3)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda x, w: convolution().forward(x[0], w), ValueError, r"w_shape|x_shape"),
        (lambda x, w: convolution().forward(x[:, :3], w), ValueError, "channels"),
        (lambda x, w: convolution(groups=3).forward(x, w), ValueError, "groups"),
        (lambda x, w: convolution(groups=2).forward(x, w[:3, :2]), ValueError, "groups"),
        (lambda x, w: convolution().forward(x[:, :, :2], w), ValueError, "kernel"),
        (lambda x, w: convolution(dilation=3).forward(x, w), ValueError, "kernel"),
        (lambda x, w: convolution(ndim=1).forward(x, w), ValueError, "entries"),
        (lambda x, w: convolution().forward(x, w.astype(np.float32)), TypeError, "mixed"),
        (lambda x, w: convolution().forward(x.astype(int), w.astype(int)), TypeError, "x has dtype int64"),
        (lambda x, w: convolution().forward(x.tolist(), w), TypeError, "x"),
        (lambda x, w: convolution().forward(x[:, :, ::-1], w), ValueError, "positive"),
        (lambda x, w: convolution().forward(x, w, out=np.empty((2, 4, 3, 4))), ValueError, "out"),
        (lambda x, w: convolution().forward(x, w, out=np.empty((2, 4, 4, 4), np.float32)), TypeError, "mixed"),
        (lambda x, w: convolution().forward(x, w, out=overlapping()), ValueError, "overlap"),
        (
            lambda x, w: convolution().forward(x, w, out=np.broadcast_to(x[:1, :, :4, :4], (2, 4, 4, 4))),
            ValueError,
            "out",
        ),
        (lambda x, w: convolution().forward(x, w, out=read_only()), ValueError, "read-only"),
        (lambda x, w: convolution().backward_data(x, w, X), ValueError, "dy"),
        (lambda x, w: convolution().backward_filter(x, x, W), ValueError, "dy"),
        (lambda x, w: convolution(padding=1).backward_filter(x, x, W, accumulate=True), ValueError, "accumulate"),
        (lambda x, w: convolution(math="tensor_op").forward(x, w), ValueError, "tensor_op"),
    ],
)
def test_bad_input_names_the_argument(make, error, match, rng):
    x, w = random(rng, X), random(rng, W)
    with pytest.raises(error, match=match):
        make(x, w)
    assert not op._remembered.calls


def overlapping():
    return np.lib.stride_tricks.as_strided(np.empty(400), (2, 4, 4, 4), (8 * 64, 8 * 16, 8 * 3, 8))


def read_only():
    out = np.empty((2, 4, 4, 4))
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"stride": 0}, ValueError, "stride"),
        ({"stride": (1, 2, 3)}, ValueError, "stride"),
        ({"stride": 1.5}, TypeError, "stride"),
        ({"dilation": 0}, ValueError, "dilation"),
        ({"padding": -1}, ValueError, "padding"),
        ({"padding": (1, (0, -1))}, ValueError, "padding"),
        ({"padding": (1, 2, 3)}, ValueError, "padding"),
        ({"groups": 0}, ValueError, "groups"),
        ({"groups": "2"}, TypeError, "groups"),
        ({"math": "fast"}, ValueError, "math"),
        ({"ndim": 0}, ValueError, "ndim"),
    ],
)
def test_bad_geometry_names_the_argument(arguments, error, match):
    with pytest.raises(error, match=match):
        convolution(**arguments)


def test_equal_geometries_are_one_object():
    assert convolution(stride=2, padding=1) is convolution(stride=(2, 2), padding=[(1, 1), (1, 1)])
    assert convolution(stride=2) is not convolution(dilation=2)
    assert Convolution(((0,), (0,)), (1,), (1,)) == convolution(ndim=1)
    assert hash(Convolution(((0,), (0,)), (1,), (1,))) == hash(convolution(ndim=1))


def test_unpickled_in_another_process_it_equals_and_hashes_as_one_made_there():
    geometry = convolution(stride=2, math="fma")
    assert pickle.loads(pickle.dumps(geometry)) is geometry
    assert copy.deepcopy(geometry) is geometry
    code = """
import pickle, sys
from flcuda.ops.convolution import convolution
sent, made = pickle.loads(sys.stdin.buffer.read()), convolution(stride=2, math="fma")
assert sent == made and hash(sent) == hash(made), (sent, made)
"""
    # Strings hash differently in each process.
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(geometry), check=True, timeout=120)


def counted_plans(monkeypatch):
    problems = []
    plan = op.finder.plan

    def counting(problem, **keywords):
        problems.append(problem)
        return plan(problem, **keywords)

    monkeypatch.setattr(op.finder, "plan", counting)
    return problems


def test_a_call_is_planned_once_and_again_for_each_difference(rng, monkeypatch):
    problems = counted_plans(monkeypatch)
    x, w = random(rng, (2, 3, 8, 8), np.float32), random(rng, (4, 3, 3, 3), np.float32)
    geometry = convolution(padding=1, stride=4)

    def run(expected_plans, convolve=geometry, x=x, w=w, **keywords):
        y = convolve.forward(x, w, **keywords)
        close(y, expected("forward", convolve, x, w))
        assert len(problems) == expected_plans

    run(1)
    run(1)
    run(1, x=x + 1)
    run(2, x=devices.to_layout(x, "nhwc"))
    run(3, w=devices.to_layout(w, "nhwc"))
    run(4, x=x[:1])
    run(5, out=np.empty((2, 4, 2, 2), np.float32))
    # The same output shape with another dilation: CuPy's finder took one for the other.
    run(6, convolve=convolution(padding=1, stride=4, dilation=2))
    with flcuda.policy(deterministic=True):
        run(7)
    run(7)
    assert len(set(problems)) == len(problems) - 2  # two differ by policy or by an equal `out` only


def test_each_thread_plans_for_itself(rng, monkeypatch):
    problems = counted_plans(monkeypatch)
    x, w = random(rng, (2, 3, 8, 8)), random(rng, (4, 3, 3, 3))
    wanted = expected("forward", convolution(), x, w)
    failures = []

    def work():
        try:
            for _ in range(3):
                close(convolution().forward(x, w), wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(problems) == 4
    assert not op._remembered.calls


def test_what_is_remembered_is_bounded(rng, monkeypatch):
    monkeypatch.setattr(op, "REMEMBERED", 3)
    w = random(rng, (1, 1, 1, 1))
    for size in range(1, 8):
        convolution().forward(random(rng, (1, 1, size, 1)), w)
        assert len(op._remembered.calls) <= 3
    assert len(op._remembered.calls) == 3


def test_arrays_of_other_libraries_come_in_through_dlpack(rng, monkeypatch):
    class Foreign:
        def __init__(self, a):
            self.a = a

        def __dlpack__(self, **keywords):
            return self.a.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self.a.__dlpack_device__()

    problems = counted_plans(monkeypatch)
    x, w = random(rng, (2, 3, 5, 5)), random(rng, (4, 3, 3, 3))
    wanted = expected("forward", convolution(), x, w)
    out = np.empty(wanted.shape)
    for _ in range(3):
        close(convolution().forward(Foreign(x), Foreign(w)), wanted)
        foreign_out = Foreign(out)
        out[...] = 0
        assert convolution().forward(x, Foreign(w), out=foreign_out) is foreign_out
        close(out, wanted)
    close(convolution().forward(x, w), wanted)
    # Planned and remembered once, as arrays of ours: with and without out.
    assert len(problems) == 2
    assert len(op._remembered.calls) == 2
