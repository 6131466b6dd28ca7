"""Arenas: values and gradients keep their places, padding stays zero, copies have storage of their own."""

import copy
import pickle

import numpy as np
import pytest

from flcuda import device as devices
from flcuda import functional as F
from flcuda import nn, optim
from flcuda.autograd import Tensor
from flcuda.parameters import (
    Arena,
    BatchNormState,
    Parameter,
    Statistics,
    build_arenas,
    build_statistics,
    gradient_number,
)

DTYPES = list(devices.DTYPES)


def parameters(rng: np.random.Generator, dtype: str, layout: str) -> list[tuple[str, Parameter]]:
    shapes = [(5, 3, 2, 3), (7,), (), (4, 9), (64, 2, 1, 1)]
    return [
        (f"p{i}", Parameter(rng.standard_normal(s), dtype, layout=layout, device="cpu", decay=i % 2 == 0))
        for i, s in enumerate(shapes)
    ]


def padding(arena: Arena) -> np.ndarray:
    mask = np.ones(arena.size, bool)
    for segment in arena.segments:
        mask[segment.offset : segment.offset + segment.size] = False
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_moving_into_an_arena_keeps_values_gradients_and_layout(rng, dtype, layout):
    named = parameters(rng, dtype, layout)
    values = [p.values() for _, p in named]
    data = [p.data.copy() for _, p in named]
    named[0][1].receive(rng.standard_normal((5, 3, 2, 3)).astype(data[0].dtype))
    grad = named[0][1].grad.copy()
    (arena,) = build_arenas(named)
    assert arena.is_current()
    assert arena.master.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert (arena.master is arena.data) == (dtype in ("float32", "float64"))
    assert arena.offsets.tolist() == [*(s.offset for s in arena.segments), arena.size]
    for (name, p), segment, master, compute in zip(named, arena.segments, values, data, strict=True):
        assert (segment.name, segment.decay, p.name) == (name, p.decay, name)
        assert segment.offset * arena.dtype.itemsize % 256 == 0
        np.testing.assert_array_equal(p.values(), master)
        np.testing.assert_array_equal(p.data, compute)
        assert np.shares_memory(p.data, arena.data)
        assert np.shares_memory(p.master, arena.master)
        assert np.shares_memory(p.buffer, arena.grad)
        assert p.data.strides == p.buffer.strides
        if p.ndim == 4 and p.shape[1:] != (2, 1, 1):
            assert devices.memory_layout(p.data) == devices.memory_layout(p.master) == layout
    np.testing.assert_array_equal(named[0][1].grad, grad)
    assert named[0][1].grad is named[0][1].buffer
    assert named[1][1].grad is None
    for flat in (arena.data, arena.master, arena.grad):
        assert not flat[padding(arena)].any()


def test_one_arena_a_dtype(rng):
    named = [*parameters(rng, "float16", "nhwc"), ("w", Parameter(rng.standard_normal(3), "float32", device="cpu"))]
    half, single = build_arenas(named)
    assert (half.dtype, half.master.dtype, single.dtype) == (np.float16, np.float32, np.float32)
    assert [s.name for s in single.segments] == ["w"]
    with pytest.raises(ValueError, match="'w' is float32"):
        Arena([p for _, p in named])


def test_padding_stays_zero_over_training(rng):
    model = nn.Sequential(
        nn.Conv2D(3, 5, 3, precision="float16", device="cpu", seed=1),
        nn.BatchNorm2D(5, precision="float16", device="cpu"),
        nn.GlobalAvgPool2D(),
        nn.Linear(5, 3, precision="float16", device="cpu", seed=2),
    )
    optimizer = optim.SGD(model, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    before = model.state_dict()
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(rng.standard_normal((4, 3, 7, 6)).astype(np.float32)), np.array([0, 1, 2, 0])).backward()
        optimizer.step()
    assert all((before[key] != value).any() for key, value in model.state_dict().items())
    for arena, velocity in zip(model.arenas, optimizer._velocity, strict=True):
        for flat in (arena.data, arena.master, arena.grad, velocity):
            assert not flat[padding(arena)].any()
            assert np.isfinite(flat.astype(np.float32)).all()
        for p in arena.parameters:  # the 16-bit copy is the rounded master
            np.testing.assert_array_equal(p.data, p.master.astype(p.dtype))


def test_arenas_are_built_once_and_anew_when_parameters_change():
    model = nn.Sequential(nn.Linear(3, 2, device="cpu", seed=0), nn.Linear(2, 2, device="cpu", seed=1))
    arenas = model.arenas
    assert model.arenas is arenas
    inner = model[0].arenas  # a part takes its own parameters over
    assert not arenas[0].is_current()
    assert inner[0].is_current()
    assert model.arenas is not arenas
    assert not inner[0].is_current()
    model.extra = nn.Linear(2, 1, device="cpu", seed=2)
    assert [s.name for s in model.arenas[0].segments][-2:] == ["extra.weight", "extra.bias"]
    model.arenas[0].data[...] = 3
    assert (model.extra.weight.values() == 3).all()


def test_missing_gradients_are_zeros_for_the_update(rng):
    named = parameters(rng, "float32", "nhwc")
    (arena,) = build_arenas(named)
    arena.grad[...] = np.nan
    named[3][1].receive(np.ones((4, 9), np.float32))
    arena.fill_missing()
    assert [bool(np.all(p.buffer == (i == 3))) for i, (_, p) in enumerate(named)] == [True] * 5
    arena.zero_grad()
    assert all(p.grad is None for _, p in named)


def test_an_arena_knows_when_it_was_given_a_gradient(rng):
    arenas = [build_arenas(parameters(rng, "float32", "nchw"))[0] for _ in range(2)]
    assert [arena.last_gradient for arena in arenas] == [0, 0]
    first, second = (arena.parameters[0] for arena in arenas)
    first.receive(np.ones(first.shape, np.float32))
    between = gradient_number()
    second.receive(np.ones(second.shape, np.float32))
    assert 0 < arenas[0].last_gradient < between < arenas[1].last_gradient
    seen = arenas[0].last_gradient
    arenas[0].zero_grad()
    arenas[0].fill_missing()
    assert arenas[0].last_gradient == seen
    (first * 2.0).backward(np.ones(first.shape, np.float32))
    assert arenas[0].last_gradient > arenas[1].last_gradient
    # Gradients that move into another arena count as given there.
    assert build_arenas([("a", first)])[0].last_gradient > seen


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_has_its_own_storage(rng, dtype, copied):
    named = parameters(rng, dtype, "nhwc")
    (arena,) = build_arenas(named)
    p = named[0][1]
    p.receive(np.ones(p.shape, p.dtype))
    q = copied(p)
    np.testing.assert_array_equal(q.data, p.data)
    np.testing.assert_array_equal(q.master, p.master)
    assert (q.name, q.decay, q.layout, q.requires_grad, q.grad) == ("p0", True, "nhwc", True, None)
    assert q.data.strides == p.data.strides
    assert not np.shares_memory(q.data, arena.data)
    q.write(np.zeros(p.shape))
    assert p.values().any()
    assert len(pickle.dumps(p)) < 2000  # the view, not the arena


def test_write_checks_the_shape(rng):
    p = Parameter(rng.standard_normal((2, 3)), device="cpu", name="w")
    with pytest.raises(ValueError, match=r"values: shape \(3, 2\) is not w's \(2, 3\)"):
        p.write(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="dtype: 'int8'"):
        Parameter(np.zeros(3), "int8", device="cpu")
    with pytest.raises(ValueError, match="layout: 'hwcn'"):
        Parameter(np.zeros(3), layout="hwcn", device="cpu")


def state(channels: int, momentum: float | None = 0.1) -> BatchNormState:
    ones = np.ones(channels, np.float32)
    return BatchNormState(Parameter(ones, device="cpu"), Parameter(0 * ones, device="cpu"), momentum, 1e-5)


def forward(bn: BatchNormState, x: np.ndarray) -> None:
    F.batch_norm(Tensor(x.astype(np.float32)), bn, training=True)


def test_statistics_start_move_settle_and_go_back(rng):
    states = [state(5), state(70), state(3)]
    forward(states[1], rng.standard_normal((4, 70)))
    pending = [s._arrays()[3:] for s in states]
    pending = [[a.copy() for a in arrays] for arrays in pending]
    (storage,) = build_statistics(states)
    assert not storage.settled
    for s, arrays in zip(states, pending, strict=True):
        assert s.statistics is storage
        assert not s.running_mean.any()
        assert (s.running_var == 1).all()
        assert s.num_batches_tracked.tolist() == [0]
        for now, old in zip(s._arrays()[3:], arrays, strict=True):
            np.testing.assert_array_equal(now, old)
    storage.settle()
    assert storage.settled
    np.testing.assert_array_equal(states[1].running_mean, pending[1][0])
    np.testing.assert_array_equal(states[1].running_var, pending[1][1])
    assert states[1].num_batches_tracked.tolist() == [1]
    good = storage.running.copy()
    forward(states[0], rng.standard_normal((4, 5)))
    storage.settle(np.array([1, 0], np.int32))  # an invalid step
    np.testing.assert_array_equal(storage.running, good)
    np.testing.assert_array_equal(storage.pending, good)
    assert states[0].pending_batches.tolist() == [0]
    forward(states[0], rng.standard_normal((4, 5)))
    storage.discard()
    np.testing.assert_array_equal(storage.pending, good)
    assert storage.settled


def test_a_copied_state_keeps_running_and_pending(rng):
    s = state(5)
    (storage,) = build_statistics([state(9), s])
    forward(s, rng.standard_normal((4, 5)))
    twin = copy.deepcopy(s)
    assert twin.statistics is not storage
    assert not twin.statistics.settled
    for a, b in zip(s._arrays(), twin._arrays(), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.shares_memory(a, b)
    forward(twin, rng.standard_normal((4, 5)))
    assert (twin.pending_mean != s.pending_mean).all()


def test_statistics_do_not_overlap():
    storage = Statistics([1, 64, 65], "float64", devices.CPU)
    for i in range(3):
        for a in storage.views(i, pending=False):
            assert (a == 0).all()
            a += i + 1
    assert [float(storage.views(i, pending=False)[1].sum()) for i in range(3)] == [1, 128, 195]
