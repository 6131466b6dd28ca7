"""The convolution op on the CPU: results, layouts, outputs, bad input, and what a thread remembers."""

import contextlib
import copy
import dataclasses
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import weakref
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import flcuda
from flcuda import device as devices
from flcuda import nn
from flcuda.autograd import Tensor
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem
from flcuda.ops import convolution as op
from flcuda.ops.convolution import Convolution, convolution

DTYPES = [np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    op._remembered.mine.clear()
    monkeypatch.setattr(op, "_searches", op._Searches())


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


@pytest.mark.parametrize("x_layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("channels", [1, 3])
def test_y_in_a_given_layout_with_a_bias(channels, layout, x_layout, rng):
    geometry = convolution(padding=1)
    x, bias = random(rng, (2, channels, 5, 6), layout=x_layout), rng.standard_normal(4)
    for w_layout in ("nchw", "nhwc"):
        w = random(rng, (4, channels, 3, 3), layout=w_layout)
        for _ in range(2):
            y = geometry.forward(x, w, bias=bias, layout=layout)
            close(y, expected("forward", geometry, x, w) + bias[:, None, None])
            assert devices.memory_layout(y) == layout
    with pytest.raises(ValueError, match="bias"):
        geometry.forward(x, w, bias=bias[:3])
    with pytest.raises(TypeError, match="bias"):
        geometry.forward(x, w, bias=bias.astype(np.float32))


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
    assert not op._remembered.mine.calls


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
        ({"stride": 1.0}, TypeError, "stride"),
        ({"stride": True}, TypeError, "stride"),
        ({"dilation": 1.0}, TypeError, "dilation"),
        ({"groups": True}, TypeError, "groups"),
        ({"groups": 1.0}, TypeError, "groups"),
        ({"math": ["fma"]}, ValueError, "math"),
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
    # What is equal to a number that is remembered, 1.0 or True, is refused all the same.
    assert convolution(1, 1, 1, 1) is convolution(1, 1, 1, 1)
    assert convolution() is convolution()
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
    assert not op._remembered.mine.calls


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
    assert len(op._remembered.mine.calls) == 2


# --- what is remembered: bounds ---------------------------------------------------------------------------------------


def test_what_is_remembered_is_bounded(rng, monkeypatch):
    monkeypatch.setattr(op, "REMEMBERED", 3)
    mine = op._remembered.mine
    w = random(rng, (1, 1, 1, 1))
    for size in range(1, 8):
        convolution().forward(random(rng, (1, 1, size, 1)), w)
        assert len(mine.calls) <= 3
    assert len(mine.calls) == 3
    assert {shapes[0][2] for *_, shapes, _, _ in mine.calls} == {5, 6, 7}


def test_one_layer_does_not_push_out_the_others(rng, monkeypatch):
    monkeypatch.setattr(op, "REMEMBERED_BY_LAYER", 2)
    problems = counted_plans(monkeypatch)
    mine = op._remembered.mine
    w, other = random(rng, (1, 1, 1, 1)), random(rng, (2, 1, 1, 1))
    x = random(rng, (1, 1, 4, 4))
    convolution().forward(x, other)
    for size in range(1, 8):
        convolution().forward(random(rng, (1, 1, size, 1)), w)
    assert len(mine.calls) == 3
    assert sum(len(keys) for keys in mine.layers.values()) == 3
    planned = len(problems)
    convolution().forward(x, other)
    assert len(problems) == planned
    op._remembered.mine.clear()
    assert not mine.calls
    assert not mine.layers


def test_all_threads_together_are_bounded(rng, monkeypatch):
    """The thread that has most gives way; each result is right all the same."""
    monkeypatch.setattr(op, "REMEMBERED_BY_ALL", 10)
    w = random(rng, (1, 1, 1, 1))
    xs = [random(rng, (1, 1, size, 1)) for size in range(1, 9)]
    for x in xs:
        convolution().forward(x, w)
    mine = op._remembered.mine
    assert len(mine.calls) == 8
    failures, counts = [], []
    here = threading.Barrier(3, timeout=60)

    def work():
        try:
            for x in xs[:6]:
                close(convolution().forward(x, w), np.asarray(x * w))
            here.wait()
            counts.append(len(op._remembered.mine.calls))
            here.wait()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    here.wait()
    total = sum(len(each.calls) for each in op._threads)
    here.wait()
    for thread in threads:
        thread.join()
    assert not failures
    assert total == 10
    assert sorted([*counts, len(mine.calls)]) == [3, 3, 4]
    for x in xs:
        close(convolution().forward(x, w), np.asarray(x * w))


def test_the_plans_of_a_thread_go_with_it(rng):
    x, w = random(rng, (2, 3, 8, 8)), random(rng, (4, 3, 3, 3))
    plans = []

    def work():
        convolution().forward(x, w)
        plans.extend(weakref.ref(call.plan) for call in op._remembered.mine.calls.values())

    before = len(op._threads)
    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()
    assert len(plans) == 3
    assert all(plan() is None for plan in plans)
    assert len(op._threads) == before


def test_nothing_is_forgotten_during_a_capture(rng, monkeypatch):
    monkeypatch.setattr(op, "REMEMBERED", 2)
    monkeypatch.setattr(op, "_policy_for", lambda *_: op.current_policy())
    w = random(rng, (1, 1, 1, 1))
    convolution().forward(random(rng, (1, 1, 1, 1)), w)
    plan = op.finder.plan

    def planned(problem, **keywords):
        monkeypatch.setattr(devices, "is_capturing", lambda: False)
        made = plan(problem, **keywords)
        monkeypatch.setattr(devices, "is_capturing", lambda: True)
        return made

    monkeypatch.setattr(op.finder, "plan", planned)
    for size in range(2, 6):
        convolution().forward(random(rng, (1, 1, size, 1)), w)
    assert len(op._remembered.mine.calls) == 5
    monkeypatch.setattr(op.finder, "plan", plan)
    monkeypatch.setattr(devices, "is_capturing", lambda: False)
    convolution().forward(random(rng, (1, 1, 6, 1)), w)
    assert len(op._remembered.mine.calls) == 2


MANY_SHAPES = """
import numpy as np
import flcuda
from flcuda.ops import convolution as op

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))

geometry = op.convolution(padding=1)
w = np.ones((2, 1, 3, 3), np.float32)
with flcuda.policy(mode="heuristic"):
    for number in range(2000):
        y = geometry.forward(np.ones((1, 1, 3 + number // 40, 3 + number % 40), np.float32), w)
        if number == 499:
            before = resident()
print(resident() - before, len(op._remembered.mine.calls))
"""


def test_two_thousand_shapes_leave_the_hosts_memory_flat(tmp_path):
    environment = {**os.environ, "FLCUDA_CHOICES": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, check=True, timeout=300, env=environment
    )
    grown, remembered = map(int, done.stdout.split())
    assert remembered == op.REMEMBERED_BY_LAYER
    # 1500 choices in the store's memory, some 2 KiB each, and what an allocator leaves.
    assert grown < 16 << 10, f"{grown} KiB"


# --- variable shapes --------------------------------------------------------------------------------------------------


@pytest.fixture
def modes(monkeypatch):
    """The mode of the policy of each plan that is made, by the size of its input."""
    asked = []
    plan = op.finder.plan

    def noting(problem, *, policy=None, **keywords):
        asked.append((problem.direction, problem.x_shape[2], policy.mode))
        return plan(problem, policy=policy, **keywords)

    monkeypatch.setattr(op.finder, "plan", noting)
    monkeypatch.setattr(op, "SEARCHED", 3)
    monkeypatch.setattr(op, "_searches", op._Searches())
    return asked


def test_a_layer_is_searched_for_so_many_shapes_and_one_warning_says_so(rng, modes):
    geometry, w = convolution(padding=1), random(rng, (2, 1, 3, 3))

    def run(size):
        x = random(rng, (1, 1, size, 4))
        y = geometry.forward(x, w)
        close(y, expected("forward", geometry, x, w))
        dw = geometry.backward_filter(x, y, w.shape)
        close(dw, expected("backward_filter", geometry, x, y, w_shape=w.shape))

    for size in (3, 4, 5):
        run(size)
    with pytest.warns(UserWarning, match="heuristics choose from now on") as caught:
        run(6)
    text = str(caught[0].message)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "3 shapes" in text
    assert "forward n1 c1 6x4 k2 3x3 p1 " in text
    assert "flcuda find" in text
    for size in (7, 6, 3):
        run(size)
    assert modes == [
        (direction, size, "find" if size < 6 else "heuristic")
        for size in (3, 4, 5, 6, 7)
        for direction in ("forward", "backward_filter")
    ]


def test_another_layer_policy_or_dtype_counts_for_itself(rng, modes, recwarn):
    geometry = convolution(padding=1)
    for dtype in (np.float64, np.float32):
        for channels in (1, 2):
            for deterministic in (False, True):
                w = random(rng, (2, channels, 3, 3), dtype)
                with flcuda.policy(deterministic=deterministic):
                    for size in (3, 4, 5):
                        geometry.forward(random(rng, (1, channels, size, 4), dtype), w)
    assert {mode for *_, mode in modes} == {"find"}
    assert len(modes) == 24
    assert not recwarn.list


def test_what_is_stored_is_used_and_does_not_count(rng, modes):
    geometry, w = convolution(padding=1), random(rng, (2, 1, 3, 3))
    for size in range(3, 9):
        x = random(rng, (1, 1, size, 4))
        problem = ConvolutionProblem.from_arrays("forward", x=x, w=w, padding=1)
        flcuda.find(dataclasses.replace(problem, x_alignment=16, w_alignment=16), device="cpu")
    for size in range(3, 9):
        geometry.forward(random(rng, (1, 1, size, 4)), w)
    assert {mode for *_, mode in modes} == {"find"}
    for size in range(10, 13):
        geometry.forward(random(rng, (1, 1, size, 4)), w)
    assert {mode for *_, mode in modes} == {"find"}
    x = random(rng, (1, 1, 20, 4))
    with pytest.warns(UserWarning, match="a convolution has been searched for 3 shapes"):
        geometry.forward(x, w)
    # Stored later: measured choices are better than what the heuristic says, for a thread that asks again.
    op._remembered.mine.clear()
    problem = dataclasses.replace(
        ConvolutionProblem.from_arrays("forward", x=x, w=w, padding=1), x_alignment=16, w_alignment=16
    )
    best = flcuda.find(problem, device="cpu").best
    geometry.forward(x, w)
    assert modes[-1] == ("forward", 20, "find")
    (call,) = op._remembered.mine.calls.values()
    assert call.plan.choice.identity == best.identity
    assert call.plan.choice.median_ms is not None


def test_the_counting_is_bounded(monkeypatch):
    monkeypatch.setattr(op, "LAYERS", 4)
    monkeypatch.setattr(op, "SEARCHED", 2)
    searches = op._Searches()
    for layer in range(20):
        assert [searches.permits(layer, (size,)) for size in range(5)] == [True, True, False, False, False]
        assert searches.permits(layer, (1,))
        assert [searches.is_news(layer) for _ in range(2)] == [True, False]
        assert len(searches.shapes) <= 4
        assert len(searches.warned) <= 4
        assert max(map(len, searches.shapes.values())) == 2
    assert searches.is_news(0)


def test_modes_other_than_find_are_left_alone(rng, modes, recwarn):
    geometry, w = convolution(padding=1), random(rng, (2, 1, 3, 3))
    with flcuda.policy(mode="heuristic"):
        for size in range(3, 10):
            geometry.forward(random(rng, (1, 1, size, 4)), w)
    assert not recwarn.list
    assert not op._searches.shapes


# --- the first call of an accumulating kind ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["find", "heuristic"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_search_leaves_what_is_added_to_alone(direction, mode, rng):
    """The first call searches, on scratch outputs: what was in `out` is there once, and so is the result."""
    problem = ConvolutionProblem.parse(f"{direction} n3 c4 7x6 k6 3x2 p1x0 s2x1 float64 acc")
    arrays = problem.random_arrays(seed=3)
    first, second = (arrays[name] for name in problem.inputs)
    out = arrays["out"]
    before = out.copy()
    geometry = convolution(stride=(2, 1), padding=(1, 0))
    wanted = before + expected(direction, geometry, first, second, x_shape=problem.x_shape, w_shape=problem.w_shape)
    with flcuda.policy(mode=mode):
        if direction == "forward":
            flcuda.plan(problem, device="cpu")(first, second, out=out)
        else:
            getattr(geometry, direction)(first, second, out.shape, out=out, accumulate=True)
    close(out, wanted)


# --- Note [hit], on CuPy arrays of memory that is not there -----------------------------------------------------------

MEMORY = 1 << 20
ADDRESSES = itertools.count(0x7F0000000000, MEMORY)


class Recorded:
    """A plan that says by what it was called, and is called on its own device only."""

    def __init__(self, problem, device, state):
        self.problem = problem
        self.device = device
        self.state = state

    def run(self, *operands):
        self.run_at(tuple(each.data.ptr for each in operands), operands)

    def run_at(self, addresses, operands):
        assert self.state.current == self.device.index
        self.state.log.append((self.problem, addresses, operands))


@pytest.fixture
def fake(monkeypatch):
    """CuPy without a GPU: arrays can be made, and a plan writes down what it is asked to run."""
    cupy = pytest.importorskip("cupy")

    class State:
        current = 0
        log: ClassVar[list] = []
        problems: ClassVar[list] = []

        @staticmethod
        def array(shape, layout="nchw", *, dtype=np.float16, offset=0, device=0, steps=None, address=None):
            memory = cupy.cuda.UnownedMemory(next(ADDRESSES) if address is None else address, MEMORY, None, device)
            strides = devices.contiguous_strides(shape, layout) if steps is None else steps
            strides = tuple(step * np.dtype(dtype).itemsize for step in strides)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, offset), strides)

    @contextlib.contextmanager
    def use(device):
        before, State.current = State.current, device.index
        yield
        State.current = before

    def plan(problem, *, policy, device):
        State.problems.append((problem, policy, device))
        return Recorded(problem, device, State)

    monkeypatch.setattr(devices.Device, "use", use)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: State.current)
    monkeypatch.setattr(
        cupy.cuda,
        "alloc",
        lambda size: cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(next(ADDRESSES), MEMORY, None, State.current), 0),
    )
    monkeypatch.setattr(devices, "is_capturing", lambda: False)
    monkeypatch.setattr(op, "_policy_for", lambda *_: op.current_policy())
    monkeypatch.setattr(op.finder, "plan", plan)
    State.log.clear()
    State.problems.clear()
    return State


def only_hits(monkeypatch):
    monkeypatch.setattr(Convolution, "_run", lambda *_: pytest.fail("the long way was taken"))


def test_the_same_filter_is_a_hit(fake, monkeypatch):
    geometry = convolution(padding=1)
    w = fake.array((8, 4, 3, 3), "nhwc")
    gradient = fake.array((8, 4, 3, 3), "nhwc")
    xs = [fake.array((n, 4, 6, 5), "nhwc") for n in (1, 2, 1, 2)]
    for x in xs[:2]:
        for _ in range(2):  # planned, then noted
            y = geometry.forward(x, w)
            geometry.backward_data(y, w, x.shape)
            geometry.backward_filter(x, y, w.shape, out=gradient)
            geometry.backward_filter(x, y, w.shape, out=gradient, accumulate=True)
    assert len(fake.problems) == 8
    only_hits(monkeypatch)
    for x in xs:
        fake.log.clear()
        y = geometry.forward(x, w)
        dx = geometry.backward_data(y, w, x.shape)
        assert geometry.backward_filter(x, y, w.shape, out=gradient) is gradient
        assert geometry.backward_filter(x, y, w.shape, out=gradient, accumulate=True) is gradient
        assert [(problem.direction, problem.accumulate) for problem, *_ in fake.log] == [
            ("forward", False),
            ("backward_data", False),
            ("backward_filter", False),
            ("backward_filter", True),
        ]
        for problem, addresses, operands in fake.log:
            assert addresses == tuple(each.data.ptr for each in operands)
            for name, each in zip(problem.operands, operands, strict=True):
                assert each.shape == problem.shape_of(name)
                assert devices.element_strides(each) == problem.strides_of(name)
        assert [operands for *_, operands in fake.log] == [
            (x, w, y),
            (y, w, dx),
            (x, y, gradient),
            (x, y, gradient),
        ]


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """All that a call may differ in."""

    x: Any
    w: Any
    geometry: Convolution
    dy: Any = None
    layout: str | None = None
    policy: tuple[tuple[str, Any], ...] = ()
    current: int = 0

    def call(self, fake, direction):
        fake.current = self.current
        fake.log.clear()
        known = len(fake.problems)
        within = flcuda.policy(**dict(self.policy)) if self.policy else contextlib.nullcontext(flcuda.Policy())
        with within as current:
            check_call(fake, direction, self)
        for _, policy, device in fake.problems[known:]:
            assert policy == current
            assert device.index == self.x.device.id


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_hit_is_never_another_call(direction, fake):
    """A call that differs in one thing from one that is a hit runs the plan of its own Problem, at its addresses."""
    geometry = convolution(padding=1, stride=2)
    x_shape, w_shape, y_shape = (2, 8, 6, 6), (8, 8, 3, 3), (2, 8, 3, 3)
    base = Circumstances(fake.array(x_shape), fake.array(w_shape), geometry, fake.array(y_shape))
    gapped = (600, 75, 12, 2)
    others = [
        {"x": fake.array(x_shape)},
        {"x": fake.array((3, 8, 6, 6)), "dy": fake.array((3, 8, 3, 3))},
        {"x": fake.array((2, 8, 5, 6))},
        {"x": fake.array(x_shape, "nhwc")},
        {"x": fake.array(x_shape, steps=gapped)},
        {"x": fake.array(x_shape, offset=2)},
        {"x": fake.array(x_shape, offset=8)},
        {"w": fake.array(w_shape)},
        {"w": fake.array(w_shape, "nhwc")},
        {"w": fake.array(w_shape, offset=4)},
        {"w": fake.array((4, 8, 3, 3)), "dy": fake.array((2, 4, 3, 3))},
        {"dy": fake.array(y_shape)},
        {"dy": fake.array(y_shape, "nhwc")},
        {"dy": fake.array(y_shape, steps=gapped)},
        {"dy": fake.array(y_shape, offset=2)},
        {"geometry": convolution(padding=1, stride=2, math="tensor_op")},
        {"geometry": convolution(padding=1, stride=2, dilation=1, groups=1, ndim=2), "layout": "nhwc"},
        {"geometry": convolution(padding=((1, 0), (1, 0)), stride=2)},
        {"policy": (("deterministic", True),)},
        {"policy": (("workspace_limit", 0),)},
        {"current": 1},
        {name: fake.array(shape, device=1) for name, shape in (("x", x_shape), ("w", w_shape), ("dy", y_shape))},
        {
            name: fake.array(shape, dtype=np.float32)
            for name, shape in (("x", x_shape), ("w", w_shape), ("dy", y_shape))
        },
    ]
    settings = [base, *(dataclasses.replace(base, **other) for other in others)]
    for _ in range(3):
        for setting in settings:
            for _ in range(2):
                setting.call(fake, direction)
            for _ in range(3):
                base.call(fake, direction)
    # Back and forth between any two.
    for setting in random_order(settings * 40):
        setting.call(fake, direction)


def random_order(items):
    return [items[place] for place in np.random.default_rng(1).permutation(len(items))]


def test_what_does_not_fit_is_refused_after_a_hit(fake):
    geometry = convolution(padding=1)
    x, w, dy, dw = (fake.array(shape) for shape in ((2, 8, 6, 6), (4, 8, 3, 3), (2, 4, 6, 6), (4, 8, 3, 3)))
    for _ in range(3):
        geometry.forward(x, w)
        geometry.backward_data(dy, w, x.shape)
        geometry.backward_filter(x, dy, w.shape, out=dw)
    fake.log.clear()
    for call, words in (
        (lambda: geometry.forward(x, fake.array((4, 8, 3, 3), device=1)), "cuda:1"),
        (lambda: geometry.forward(fake.array((2, 8, 6, 6), device=1), w), "cuda:1"),
        (lambda: geometry.backward_data(dy, w, (2, 8, 7, 6)), "dy"),
        (lambda: geometry.backward_data(fake.array((2, 4, 6, 6), device=1), w, x.shape), "cuda:1"),
        (lambda: geometry.backward_filter(x, dy, (4, 8, 3, 5), out=dw), "dy"),
        (lambda: geometry.backward_filter(x, dy, (4, 4, 3, 3), out=dw), "w_shape"),
        (lambda: geometry.backward_filter(x, fake.array((2, 4, 6, 5)), w.shape, out=dw), "dy"),
        (lambda: geometry.backward_filter(x, fake.array((3, 4, 6, 6)), w.shape, out=dw), "dy"),
        (lambda: geometry.backward_filter(x, fake.array((2, 4, 6, 6), device=1), w.shape, out=dw), "cuda:1"),
        (lambda: geometry.backward_filter(fake.array((2, 8, 6, 6), device=1), dy, w.shape, out=dw), "cuda:1"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="mixed"):
        geometry.backward_filter(x, fake.array((2, 4, 6, 6), dtype=np.float32), w.shape, out=dw)
    with pytest.raises(TypeError, match="mixed"):
        geometry.forward(fake.array((2, 8, 6, 6), dtype=ml_dtypes.bfloat16), w)
    with pytest.raises(TypeError, match="mixed"):
        geometry.backward_filter(x, fake.array((2, 4, 6, 6), dtype=ml_dtypes.bfloat16), w.shape, out=dw)
    with pytest.raises(ValueError, match="cuda:0"):
        geometry.backward_filter(x, np.zeros((2, 4, 6, 6), np.float16), w.shape, out=dw)
    assert not fake.log


def test_x_shapes_of_one_y_are_told_apart(fake):
    """With a stride, inputs of several sizes have outputs of one."""
    geometry, w = convolution(stride=2), fake.array((4, 8, 3, 3))
    dy = fake.array((2, 4, 3, 3))
    for _ in range(3):
        for shape in ((2, 8, 7, 7), (2, 8, 8, 7), (2, 8, 8, 8)):
            for _ in range(3):
                assert geometry.backward_data(dy, w, shape).shape == shape
                assert fake.log[-1][0].x_shape == shape


def test_layers_of_equal_shapes_are_hits_all(fake, monkeypatch):
    """They share a plan; and a policy that is entered anew for each step is the same policy."""
    geometry, x = convolution(padding=1), fake.array((2, 8, 6, 6))
    filters = [fake.array((8, 8, 3, 3)) for _ in range(5)]
    for changes in ({}, {"deterministic": True}):
        for _ in range(2):
            with flcuda.policy(**changes):
                for w in filters:
                    geometry.forward(x, w)
        with flcuda.policy(**changes), monkeypatch.context() as patch:
            only_hits(patch)
            for w in filters:
                y = geometry.forward(x, w)
                assert fake.log[-1][1] == (x.data.ptr, w.data.ptr, y.data.ptr)
    assert len(fake.problems) == 2


def check_call(fake, direction, given):
    x, w, geometry = given.x, given.w, given.geometry
    if direction == "forward":
        first, second = x, w
        out = geometry.forward(x, w, layout=given.layout)
    elif direction == "backward_data":
        first, second = given.dy, w
        out = geometry.backward_data(first, w, x.shape)
    else:
        first, second = x, given.dy
        out = geometry.backward_filter(x, second, w.shape, out=w)
        assert out is w
    ((problem, addresses, operands),) = fake.log
    assert addresses == tuple(each.data.ptr for each in (first, second, out))
    assert all(a is b for a, b in zip(operands, (first, second, out), strict=True))
    before, after = geometry.padding
    wanted = ConvolutionProblem.from_arrays(
        direction,
        **dict(zip([name[-1] for name in problem.operands], (first, second, out), strict=True)),
        padding=tuple(zip(before, after, strict=True)),
        stride=geometry.stride,
        math="tensor_op" if geometry.math or x.dtype == np.float16 else "fma",
    )
    assert problem == wanted
    if direction == "forward" and given.layout:
        assert devices.memory_layout(out) == given.layout


def test_shapes_set_in_place_are_noticed(fake):
    """CuPy lets the shape of an array be set."""
    geometry = convolution(padding=1)
    x, w = fake.array((2, 8, 6, 6)), fake.array((8, 8, 3, 3))
    for _ in range(3):
        geometry.forward(x, w)
    x.shape = (1, 8, 12, 6)
    assert geometry.forward(x, w).shape == (1, 8, 12, 6)
    assert fake.log[-1][0].x_shape == (1, 8, 12, 6)
    x.shape = (2, 8, 6, 6)
    geometry.forward(x, w)
    w.shape = (4, 16, 3, 3)
    with pytest.raises(ValueError, match="channels"):
        geometry.forward(x, w)


def test_filters_are_not_kept_alive_nor_mistaken_for_later_ones(fake):
    geometry = convolution(padding=1)
    x = fake.array((2, 8, 6, 6))
    seen = set()
    for _ in range(50):
        w = fake.array((8, 8, 3, 3))
        seen.add(id(w))
        for _ in range(3):
            y = geometry.forward(x, w)
            assert fake.log[-1][1] == (x.data.ptr, w.data.ptr, y.data.ptr)
        fake.log.clear()
        gone = weakref.ref(w)
        del w
        assert gone() is None
    assert len(seen) < 50, "the test needs an id that comes again"
    assert len(fake.problems) == 1


def test_what_is_forgotten_is_no_hit_any_more(fake, monkeypatch):
    monkeypatch.setattr(op, "REMEMBERED_BY_LAYER", 2)
    geometry, w = convolution(padding=1), fake.array((8, 8, 3, 3))
    plans = []
    for size in (4, 5, 6, 4):
        x = fake.array((2, 8, size, 6))
        for _ in range(3):
            geometry.forward(x, w)
        plans.append(weakref.ref(next(reversed(op._remembered.mine.calls.values())).plan))
    gc.collect()
    assert [plan() is None for plan in plans] == [True, True, False, False]
    assert len(fake.problems) == 4


def test_filters_that_change_with_every_call_do_not_pile_up(fake, monkeypatch):
    monkeypatch.setattr(op, "REMEMBERED", 8)
    geometry, x = convolution(padding=1), fake.array((2, 8, 6, 6))
    filters = [fake.array((8, 8, 3, 3)) for _ in range(30)]
    for w in filters * 2:
        geometry.forward(x, w)
        assert len(op._remembered.mine.forward) <= 8


def test_what_is_no_cupy_array_takes_the_long_way(fake, rng):
    """After CuPy arrays have made hits."""
    geometry, w = convolution(padding=1), fake.array((8, 4, 3, 3))
    x = fake.array((2, 4, 6, 6))
    for _ in range(3):
        geometry.forward(x, w)
    with pytest.raises(TypeError, match="x"):
        geometry.forward([[1.0]], w)
    with pytest.raises((TypeError, ValueError), match="w"):
        geometry.forward(random(rng, (2, 4, 6, 6), np.float16), w)
    with pytest.raises(TypeError, match="w"):
        geometry.forward(x, None)


def test_a_bias_is_added_by_the_checked_way_first_then_directly(fake, monkeypatch):
    """To what the layouts of outputs and the identity of the bias say."""
    launched, checked = [], []

    class Module:
        def get_function(self, name):
            return lambda grid, block, arguments: launched.append((name, grid, block, arguments))

    monkeypatch.setattr(op, "load_module", lambda name: Module())
    monkeypatch.setattr(op.bias_ops, "bias_forward", lambda y, bias: checked.append((y, bias)) or y)
    for layout, sizes in (("nchw", (2, 8, 30)), ("nhwc", (60, 8, 1))):
        launched.clear()
        checked.clear()
        geometry, w = convolution(padding=1), fake.array((8, 4, 3, 3), layout)
        x = fake.array((2, 4, 6, 5), layout)
        bias, other = fake.array((8,)), fake.array((8,))
        for _ in range(3):  # planned, noted, hit
            geometry.forward(x, w, bias=bias)
        assert len(checked) == 3
        y = geometry.forward(x, w, bias=bias)
        assert len(checked) == 3
        ((name, grid, block, arguments),) = launched
        assert name == "bias_forward_f16"
        assert grid[0] * block[0] >= y.size
        assert arguments[0] is y
        assert arguments[1] is bias
        assert arguments[2:] == sizes
        assert {type(size) for size in arguments[2:]} == {np.int64}
        y = geometry.forward(x, w, bias=other)
        assert checked[-1] == (y, other)
        geometry.forward(x, w)
        assert len(launched) == 1


def test_a_layer_is_a_hit_too(fake, monkeypatch):
    """nn.Conv2D: what it works out of its input is worked out again when the input or its own settings change."""
    layer = nn.Conv2D(4, 8, 3, padding="same", bias=False, precision="float16", device="cpu", seed=0)
    layer.weight.data = fake.array((8, 4, 3, 3), "nhwc")
    x = Tensor(fake.array((2, 4, 6, 5), "nhwc"), requires_grad=True)
    for _ in range(2):
        layer(x)
    with monkeypatch.context() as patch:
        only_hits(patch)
        assert layer(x).shape == (2, 8, 6, 5)
        assert layer(x.data).shape == (2, 8, 6, 5)
    layer.dilation = (2, 2)
    assert layer(x).shape == (2, 8, 6, 5)
    assert fake.log[-1][0].dilation == (2, 2)
    assert fake.log[-1][0].padding_before == (2, 2)
    layer.stride = (2, 2)
    assert layer(x).shape == (2, 8, 3, 3)
    with pytest.raises(ValueError, match=r"is not \(N, C, H, W\)"):
        layer(Tensor(fake.array((4, 6, 5))))
    with pytest.raises(TypeError, match="floating-point"):
        layer(Tensor(fake.array((2, 4, 6, 5), "nhwc", dtype=np.int16)))
    assert layer(x).shape == (2, 8, 3, 3)
