"""The loss scaler: both ways of use, every transition, wrong orders, skipping, limits, state."""

import copy
import gc
import pickle
import weakref

import ml_dtypes
import numpy as np
import pytest
from scaler_cases import TRANSITIONS, checked, random_steps

from flcuda import amp, nn, optim
from flcuda import functional as F
from flcuda.autograd import Function, Tensor
from flcuda.errors import FlcudaError
from flcuda.ops import optimizer as optimizer_ops
from flcuda.ops.flags import join_flags
from flcuda.parameters import Parameter


class Poison(Function):
    """Passes x; puts a value into one element of the gradient."""

    def forward(self, x, value):
        self.value = value
        return x * 1

    def backward(self, grad):
        grad = grad.copy()
        if self.value is not None:
            grad.reshape(-1)[-1] = self.value
        return (grad,)


class Network(nn.Module):
    """Three convolutions with batch norm; the gradient can be poisoned behind any of them."""

    def __init__(self, precision: str) -> None:
        options = {"precision": precision, "device": "cpu"}
        draws = nn.Draws(1)
        for i, channels in enumerate((2, 3, 4)):
            setattr(self, f"conv{i}", nn.Conv2D(channels, channels + 1, 3, padding=1, seed=draws, **options))
            setattr(self, f"bn{i}", nn.BatchNorm2D(channels + 1, **options))
        self.fc = nn.Linear(5, 4, seed=draws, **options)
        self.poison: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = getattr(self, f"conv{i}")(x)
            x = F.relu(getattr(self, f"bn{i}")(Poison.apply(x, value=self.poison.get(i))))
        return self.fc(F.global_avg_pool2d(x))


def loss_of(model: Network, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    return F.cross_entropy(model(rng.standard_normal((4, 2, 5, 5)).astype(np.float32)), rng.integers(0, 4, 4))


def pair(precision: str = "float16", **options) -> tuple[Network, optim.SGD, amp.DynamicScaler]:
    model = Network(precision)
    return model, optim.SGD(model, 0.1, momentum=0.9, weight_decay=0.01), amp.DynamicScaler(**options)


def everything(model: Network, optimizer: optim.SGD) -> list[np.ndarray]:
    arrays = [a for arena in model.arenas for a in (arena.master, arena.data)] + list(optimizer._velocity)
    arrays += [a for s in model.statistics for a in (s.running, s.running_counts, s.pending, s.pending_counts)]
    return [a.copy() for a in arrays]


def synchronous_step(model: Network, optimizer: optim.SGD, scaler: amp.DynamicScaler, seed: int) -> bool:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, seed)).backward()
    scaler.unscale(optimizer)
    valid = scaler.adjust_scale_factor()
    if valid:
        optimizer.step()
    return valid


@pytest.mark.parametrize("precision", list(nn.PRECISIONS))
def test_both_ways_are_one_and_a_power_of_two_changes_nothing(precision):
    runs = []
    for way in ("plain", "step", "synchronous"):
        model, optimizer, scaler = pair(precision, init_scale=1024.0)
        for seed in range(4):
            if way == "plain":
                optimizer.zero_grad()
                loss_of(model, seed).backward()
                optimizer.step()
            elif way == "step":
                scaler.step(optimizer, loss_of(model, seed))
            else:
                assert synchronous_step(model, optimizer, scaler, seed)
        runs.append(everything(model, optimizer))
    for plain, step, synchronous in zip(*runs, strict=True):
        np.testing.assert_array_equal(step, synchronous)
        if precision not in ("float16", "bfloat16"):  # those keep more of small gradients when scaled
            np.testing.assert_array_equal(step, plain)
        else:
            np.testing.assert_allclose(step.astype(np.float64), plain.astype(np.float64), rtol=0.1, atol=2e-2)


@pytest.mark.parametrize("precision", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("way", ["step", "synchronous"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_invalid_gradient_skips_everything_to_the_bit(precision, way, layer, value):
    model, optimizer, scaler = pair(precision, init_scale=256.0)
    do = scaler.step if way == "step" else None
    for seed in range(2):
        if do:
            do(optimizer, loss_of(model, seed))
        else:
            synchronous_step(model, optimizer, scaler, seed)
    before = everything(model, optimizer)
    model.poison = {layer: value}
    if do:
        do(optimizer, loss_of(model, 2))
    else:
        assert not synchronous_step(model, optimizer, scaler, 2)
    for a, b in zip(before, everything(model, optimizer), strict=True):
        np.testing.assert_array_equal(a, b)
    assert scaler.scale_factor == 128.0
    flags = scaler.is_invalid_array
    names = [s.name for arena in model.arenas for s in arena.segments]
    bad = {names[i] for i in np.flatnonzero(flags[2:])}
    assert flags[0] == 1
    assert flags[1] == np.flatnonzero(flags[2:])[0]
    # what lies behind the poisoned place in the order of backward
    assert f"conv{layer}.weight" in bad
    assert not {name for name in bad if int(name[-8] if "conv" in name and "weight" in name else 0) > layer}
    assert not {"fc.weight", "fc.bias"} & bad
    model.poison = {}
    if do:
        do(optimizer, loss_of(model, 3))
    else:
        assert synchronous_step(model, optimizer, scaler, 3)
    assert scaler.is_invalid_array[0] == 0
    assert scaler.is_invalid_array[1] == len(names)
    assert all((a != b).any() for a, b in zip(before, everything(model, optimizer), strict=True))


def test_float16_overflow_finds_its_scale():
    """A scale that is too high for float16 halves until steps are valid."""
    model, optimizer, scaler = pair("float16", init_scale=2.0**24, max_scale=2.0**24)
    for seed in range(40):
        scaler.step(optimizer, loss_of(model, seed))
    state = scaler.state_dict()
    assert 0 < state["skipped_steps"] < 30
    assert state["scale"] == 2.0**24 / 2 ** state["skipped_steps"]
    assert state["consecutive_skips"] == 0
    assert all(np.isfinite(a.astype(np.float64)).all() for a in everything(model, optimizer))


def poisoned_run(scaler: amp.DynamicScaler, pattern: str) -> list[float]:
    """Runs steps, x for an invalid one; gives the scale after each."""
    model, optimizer, _ = pair("float32")
    scales = []
    for seed, kind in enumerate(pattern):
        model.poison = {1: np.nan} if kind == "x" else {}
        scaler.step(optimizer, loss_of(model, seed))
        scales.append(scaler.scale_factor)
    return scales


@pytest.mark.parametrize("name", TRANSITIONS)
def test_transitions(name):
    options, pattern, scales = TRANSITIONS[name]
    assert poisoned_run(amp.DynamicScaler(4.0, **options), pattern) == scales


def test_the_defaults_grow_no_further_than_they_began():
    scaler = amp.DynamicScaler(growth_interval=1)
    assert poisoned_run(scaler, ".." + "x.") == [65536, 65536, 32768, 65536]


def test_100_000_random_steps_follow_a_plain_model(rng):
    for _ in range(10):
        random_steps("cpu", rng, 10_000)


@pytest.mark.parametrize("way", ["step", "synchronous"])
@pytest.mark.parametrize(("step", "layer"), [(0, 2), (1, 0), (3, 1)])
def test_a_step_with_nan_is_as_if_it_had_not_been(way, step, layer):
    """NaN at one step in one layer: the training goes on as one without that step."""
    runs = []
    for poisoned in (True, False):
        model, optimizer, scaler = pair("float32", init_scale=2.0**10)
        for seed in range(5):
            if seed == step and not poisoned:
                continue
            model.poison = {layer: np.nan} if seed == step else {}
            if way == "step":
                scaler.step(optimizer, loss_of(model, seed))
            else:
                assert synchronous_step(model, optimizer, scaler, seed) == (seed != step)
        assert scaler.state_dict()["steps"] == 5 if poisoned else 4
        assert scaler.scale_factor == (2.0**9 if poisoned else 2.0**10)
        runs.append(everything(model, optimizer))
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("way", ["step", "synchronous"])
def test_any_optimizer(kind, way):
    """A skipped step advances no count of Adam's either."""
    runs = []
    for poisoned in (True, False):
        model = Network("float32")
        optimizer, scaler = kind(model, 1e-2, weight_decay=0.01), amp.DynamicScaler(64.0)
        for seed in range(4):
            if seed == 1 and not poisoned:
                continue
            model.poison = {1: np.inf} if seed == 1 else {}
            if way == "step":
                scaler.step(optimizer, loss_of(model, seed))
            else:
                assert synchronous_step(model, optimizer, scaler, seed) == (seed != 1)
        assert optimizer.state_dict()["steps"] == 3
        runs.append(model.state_dict())
    for name in runs[0]:
        np.testing.assert_array_equal(runs[0][name], runs[1][name])


def test_an_endless_row_of_skips_names_scale_step_and_parameters():
    model, optimizer, scaler = pair("float32", init_scale=8.0, min_scale=1.0)
    scaler.step(optimizer, loss_of(model, 0))
    model.poison = {1: np.nan}
    for seed in range(49):
        scaler.step(optimizer, loss_of(model, seed))
    message = (
        r"50 steps in a row up to step 51 had .* the scale is 1 \(its floor 1\)\. In that step gradients were invalid "
        r"in 'conv0.weight', 'conv0.bias', 'bn0.weight', 'bn0.bias', 'conv1.weight' and 1 more"
    )
    with pytest.raises(FlcudaError, match=message):
        scaler.step(optimizer, loss_of(model, 49))
    # It says so as long as it lasts, and no longer.
    with pytest.raises(FlcudaError, match="51 steps in a row"):
        scaler.step(optimizer, loss_of(model, 50))
    model.poison = {}
    scaler.step(optimizer, loss_of(model, 51))
    scaler.check()


@pytest.mark.parametrize("most", [1, 3])
def test_a_batch_is_not_repeated_without_end(most):
    model, optimizer, scaler = pair("float32", max_consecutive_skips=most)
    model.poison = {2: np.inf}
    for _ in range(most - 1):
        assert not synchronous_step(model, optimizer, scaler, 0)
    with pytest.raises(FlcudaError, match=f"^{most} steps in a row"):
        synchronous_step(model, optimizer, scaler, 0)
    assert scaler.state_dict()["consecutive_skips"] == most


def test_micro_batches():
    runs = []
    for way in ("synchronous", "step"):
        model, optimizer, scaler = pair("float32", init_scale=64.0)
        for seed in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, seed) * 0.5).backward()
            if way == "step":
                scaler.step(optimizer, loss_of(model, seed + 10) * 0.5)
                continue
            scaler.scale(loss_of(model, seed + 10) * 0.5).backward()
            scaler.unscale(optimizer)
            assert scaler.adjust_scale_factor()
            optimizer.step()
        assert model.bn1.bn.num_batches_tracked.tolist() == [6]
        runs.append(everything(model, optimizer))
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)
    # an invalid first half makes the whole step invalid, its statistics too
    before = everything(model, optimizer)
    model.poison = {0: np.nan}
    scaler.scale(loss_of(model, 0)).backward()
    model.poison = {}
    scaler.step(optimizer, loss_of(model, 1))
    for a, b in zip(before, everything(model, optimizer), strict=True):
        np.testing.assert_array_equal(a, b)


def test_unscaling_tensors_restores_their_gradients(rng):
    """The re-created system's test "Scaling": loss times scale, gradient as without."""
    w = Parameter(rng.standard_normal((4, 6)), layout="nchw", device="cpu", name="w")
    plain = Tensor(w.values(), requires_grad=True)
    unused = Tensor(np.ones(3), requires_grad=True)
    x, target = rng.standard_normal((5, 6)).astype(np.float32), rng.integers(0, 4, 5)
    F.cross_entropy(F.linear(x, w), target).backward()
    expected = w.grad.copy()
    w.grad = None
    scaler = amp.DynamicScaler(1024.0)
    for t in (w, plain):
        loss = F.cross_entropy(F.linear(x, t), target)
        scaled = scaler.scale(loss)
        assert float(scaled) == pytest.approx(float(loss) * 1024)
        scaled.backward()
    np.testing.assert_allclose(w.grad, expected * 1024, rtol=1e-6)
    scaler.unscale([w, unused, plain, w])
    np.testing.assert_allclose(w.grad, expected, rtol=1e-6)
    np.testing.assert_allclose(plain.grad, expected, rtol=1e-6)
    assert w.grad is w.buffer
    assert unused.grad is None
    assert scaler.is_invalid_array.tolist() == [0, 3, 0, 0, 0]
    assert scaler.adjust_scale_factor()


def test_overflow_that_appears_only_after_unscaling_counts():
    w = Tensor(np.array([3e38], np.float32), requires_grad=True)
    scaler = amp.DynamicScaler(2.0**-10)
    scaler.scale(F.scale(w, 0.0)).backward()
    w.grad = np.array([1e38], np.float32)
    scaler.unscale([w])
    assert not scaler.adjust_scale_factor()
    assert scaler.is_invalid_array.tolist() == [1, 0, 1]


class Gradient(Function):
    """A loss whose gradient with respect to a parameter is a given array, whatever the scale."""

    def forward(self, x, grad):
        self.grad = grad
        return np.zeros((), np.float32)

    def backward(self, grad):
        return (self.grad,)


def one_parameter(dtype: str, size: int = 3, **options) -> tuple[Parameter, optim.SGD]:
    w = Parameter(np.ones(size), dtype, device="cpu", name="w")
    model = nn.Module()
    model.w = w
    return w, optim.SGD(model, 0.5, **options)


def tried(way: str, w: Parameter, optimizer: optim.SGD, scaler: amp.DynamicScaler, grad: list[float]) -> bool:
    """Does a step with a given gradient; says whether it was valid."""
    loss = Gradient.apply(w, grad=np.array(grad).astype(w.dtype))
    if way == "step":
        scaler.step(optimizer, loss)
        return not scaler.is_invalid_array[0]
    scaler.scale(loss).backward()
    scaler.unscale(optimizer)
    valid = scaler.adjust_scale_factor()
    optimizer.step()
    optimizer.zero_grad()
    return valid


@pytest.mark.parametrize("way", ["step", "synchronous"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_overflow_that_appears_only_in_the_update_counts(way, dtype):
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max) if dtype == "bfloat16" else float(np.finfo(dtype).max)
    w, optimizer = one_parameter(dtype)
    scaler = amp.DynamicScaler(0.5, min_scale=0.25)
    assert tried(way, w, optimizer, scaler, [0.0, largest / 2.1, -1.0])
    w, optimizer = one_parameter(dtype)
    assert not tried(way, w, optimizer, scaler, [1.0, -largest, 0.0])
    assert scaler.is_invalid_array.tolist() == [1, 0, 1]
    assert w.master.tolist() == [1, 1, 1]
    assert scaler.scale_factor == 0.25


@pytest.mark.parametrize("way", ["step", "synchronous"])
def test_finite_gradients_whose_sum_is_not_are_valid(way):
    w, optimizer = one_parameter("float32")
    assert tried(way, w, optimizer, amp.DynamicScaler(1.0), [3e38, 3e38, 3e38])
    np.testing.assert_allclose(w.master, -1.5e38, rtol=1e-6)


@pytest.mark.parametrize("way", ["step", "synchronous"])
def test_a_norm_that_is_not_finite_counts_where_gradients_are_clipped(way):
    w, optimizer = one_parameter("float32", max_norm=1.0)
    scaler = amp.DynamicScaler(1.0, min_scale=1.0, max_consecutive_skips=2)
    assert not tried(way, w, optimizer, scaler, [3e38, 3e38, 3e38])
    assert scaler.is_invalid_array.tolist() == [1, 1, 0]
    assert w.master.tolist() == [1, 1, 1]
    assert scaler.state_dict()["skipped_steps"] == 1
    assert tried(way, w, optimizer, scaler, [0.3, 0.0, 0.4])
    np.testing.assert_allclose(w.master, [1 - 0.15, 1, 1 - 0.2], rtol=1e-6)
    assert not tried(way, w, optimizer, scaler, [3e38, 3e38, 3e38])
    with pytest.raises(FlcudaError, match=r"2 steps in a row .*the norm of all together is not"):
        tried(way, w, optimizer, scaler, [3e38, 3e38, 3e38])


def test_clipping_under_a_scaler_is_clipping_without():
    runs = []
    for way in ("plain", "step", "synchronous"):
        model = Network("float32")
        optimizer, scaler = optim.SGD(model, 0.1, momentum=0.9, max_norm=0.1), amp.DynamicScaler(512.0)
        for seed in range(3):
            if way == "plain":
                optimizer.zero_grad()
                loss_of(model, seed).backward()
                optimizer.step()
            elif way == "step":
                scaler.step(optimizer, loss_of(model, seed))
            else:
                assert synchronous_step(model, optimizer, scaler, seed)
        runs.append(everything(model, optimizer))
    for plain, step, synchronous in zip(*runs, strict=True):
        np.testing.assert_array_equal(step, synchronous)
        np.testing.assert_array_equal(step, plain)


def test_no_gradients_at_all():
    scaler = amp.DynamicScaler(8.0)
    w = Tensor(np.array([1.0], np.float32), requires_grad=True)
    scaler.scale(w)
    scaler.unscale([w])
    assert scaler.is_invalid_array.tolist() == [0, 1, 0]
    assert scaler.adjust_scale_factor()


@pytest.mark.parametrize("way", ["step", "synchronous"])
def test_clipping_reads_the_gradients_a_second_time_only_where_they_may_have_changed(way, monkeypatch):
    model = Network("float16")
    optimizer, scaler = optim.SGD(model, 0.1, max_norm=0.1), amp.DynamicScaler(512.0)
    searches = []
    for module in (amp.finite, optim):
        search = module.find_invalid
        monkeypatch.setattr(module, "find_invalid", lambda *a, f=search, **o: (searches.append(1), f(*a, **o)))
    if way == "step":
        scaler.step(optimizer, loss_of(model, 0))
    else:
        assert synchronous_step(model, optimizer, scaler, 0)
    # Between unscale and the optimizer's step gradients may be changed by hand.
    assert len(searches) == {"step": 2, "synchronous": 4}[way]
    assert len(optimizer.arenas) == 2


def test_no_gradients_and_empty_gradients():
    """Another model's loss; and a gradient without elements."""
    model, optimizer, scaler = pair("float32", init_scale=8.0)
    other = Network("float32")
    before = [arena.master.copy() for arena in model.arenas]
    optimizer.weight_decay = 0.0
    scaler.step(optimizer, loss_of(other, 0))
    for a, arena in zip(before, model.arenas, strict=True):
        np.testing.assert_array_equal(a, arena.master)
    assert not scaler.is_invalid_array[2:].any()
    empty, full = Tensor(np.ones((0, 3), np.float32), requires_grad=True), Tensor(np.ones(2), requires_grad=True)
    for value, flags in ((1.0, [0, 2, 0, 0]), (np.nan, [1, 1, 0, 1])):
        scaler.scale(Tensor(np.array(1.0), True))
        empty.grad, full.grad = np.ones((0, 3), np.float32), np.array([1.0, value])
        scaler.unscale([empty, full])
        assert scaler.is_invalid_array.tolist() == flags
        assert scaler.adjust_scale_factor() == (flags[0] == 0)
    w, optimizer = one_parameter("float32", size=0)
    assert tried("step", w, optimizer, amp.DynamicScaler(), [])


def test_wrong_orders():
    model, optimizer, scaler = pair("float32")
    with pytest.raises(FlcudaError, match="is_invalid_array"):
        _ = scaler.is_invalid_array
    scaler.check()
    scaler.poll()
    with pytest.raises(FlcudaError, match="unscale: wrong order, nothing was scaled"):
        scaler.unscale(optimizer)
    with pytest.raises(FlcudaError, match="adjust_scale_factor: wrong order, nothing was scaled"):
        scaler.adjust_scale_factor()
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(FlcudaError, match=r"adjust_scale_factor: wrong order, .*not unscaled"):
        scaler.adjust_scale_factor()
    scaler.unscale(optimizer)
    with pytest.raises(FlcudaError, match=r"unscale: wrong order, .*were unscaled"):
        scaler.unscale(optimizer)
    with pytest.raises(FlcudaError, match="scale: wrong order"):
        scaler.scale(loss_of(model, 0))
    with pytest.raises(FlcudaError, match="step: wrong order"):
        scaler.step(optimizer, loss_of(model, 0))
    assert scaler.adjust_scale_factor()
    with pytest.raises(FlcudaError, match="adjust_scale_factor: wrong order, nothing was scaled"):
        scaler.adjust_scale_factor()
    for call in (scaler.scale, lambda loss: scaler.step(optimizer, loss)):
        with pytest.raises(ValueError, match="loss: is scaled already"):
            call(scaler.scale(loss_of(model, 0)))
    optimizer.zero_grad()
    scaler.step(optimizer, loss_of(model, 0))
    with pytest.raises(FlcudaError, match="unscale: wrong order, nothing was scaled"):
        scaler.unscale(optimizer)


def test_bad_losses_and_tensors():
    scaler = amp.DynamicScaler()
    with pytest.raises(TypeError, match="loss: has dtype float16"):
        scaler.scale(Tensor(np.array(1.0, np.float16), True))
    with pytest.raises(ValueError, match=r"loss: has shape \(2,\)"):
        scaler.scale(Tensor(np.ones(2), True))
    half = Parameter(np.ones(3), "float16", device="cpu")
    scaler.scale(Tensor(np.array(1.0), True))
    with pytest.raises(TypeError, match="target: tensor 0 is float16"):
        scaler.unscale([half])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"init_scale": 0.0}, "init_scale: 0.0"),
        ({"init_scale": 1e6}, "init_scale: 1000000.0"),
        ({"init_scale": float("inf")}, "init_scale: inf"),
        ({"max_scale": float("inf")}, "max_scale: inf"),
        ({"max_scale": 1e39}, "max_scale: 1e\\+39"),
        ({"min_scale": 1e-39}, "min_scale: 1e-39"),
        ({"growth_factor": float("nan")}, "growth_factor: nan"),
        ({"min_scale": 0.0}, "min_scale: 0.0"),
        ({"min_scale": 1e6}, "min_scale: 1000000.0"),
        ({"growth_factor": 1.0}, "growth_factor: 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor: 1.0"),
        ({"backoff_factor": 0}, "backoff_factor: 0"),
        ({"growth_interval": 0}, "growth_interval: 0"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips: 0"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        amp.DynamicScaler(**arguments)


@pytest.mark.parametrize("used", [False, True])
def test_state_is_restored_mid_interval(used):
    scaler = amp.DynamicScaler(8.0, growth_interval=4, max_scale=1024.0)
    poisoned_run(scaler, "x..")
    state = scaler.state_dict()
    assert state == {
        "version": 2,
        "scale": 4.0,
        "good_steps": 2,
        "skipped_steps": 1,
        "consecutive_skips": 0,
        "steps": 3,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 4,
        "min_scale": 1e-4,
        "max_scale": 1024.0,
        "max_consecutive_skips": 50,
    }
    other = amp.DynamicScaler()
    if used:
        poisoned_run(other, "x.")
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert poisoned_run(other, "...") == poisoned_run(scaler, "...") == [4, 8, 8]
    for bad in (
        {**state, "version": 3},
        {**state, "version": "2"},
        {**state, "good_steps": -1},
        {"version": 2},
        {"version": 1},
        {**state, "a": 1},
    ):
        with pytest.raises(ValueError, match=r"version|good_steps|missing|unexpected"):
            other.load_state_dict(bad)
    assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (None, TypeError, "^state: None is no mapping"),
        ([], TypeError, r"^state: \[\] is no mapping"),
        ({"scale": None}, TypeError, "^scale: None"),
        ({"scale": True}, TypeError, "^scale: True"),
        ({"scale": 0.0}, ValueError, "^scale: 0.0 is outside"),
        ({"scale": 2.0**20}, ValueError, "^scale: 1048576.0 is outside"),
        ({"min_scale": 0.0}, ValueError, "^min_scale: 0.0"),
        ({"good_steps": 1.0}, TypeError, "^good_steps: 1.0"),
        (
            {"steps": 2**63, "scale": 16.0, "growth_interval": 7},
            ValueError,
            r"^steps: 92\d+ is more than",
        ),
        ({"growth_interval": 2**70}, ValueError, "^growth_interval: "),
        ({"max_consecutive_skips": 2.5}, TypeError, "^max_consecutive_skips: 2.5"),
    ],
)
def test_a_state_that_is_not_taken_changes_nothing(change, error, match):
    scaler = amp.DynamicScaler(8.0, growth_interval=4, max_scale=1024.0)
    poisoned_run(scaler, "x..")
    state = scaler.state_dict()
    with pytest.raises(error, match=match):
        scaler.load_state_dict({**state, **change} if isinstance(change, dict) else change)
    assert scaler.state_dict() == state
    largest = {**state, "steps": 2**63 - 1}
    scaler.load_state_dict(largest)
    assert scaler.state_dict() == largest


def test_a_state_of_version_1():
    """It has no count of all steps."""
    scaler = amp.DynamicScaler()
    state = {**scaler.state_dict(), "version": 1, "scale": 128.0, "good_steps": 7, "skipped_steps": 3}
    del state["steps"]
    scaler.load_state_dict(state)
    assert scaler.state_dict() == {**state, "version": 2, "steps": 3}


@pytest.mark.parametrize("used", [False, True])
def test_a_loaded_row_of_skips_blames_no_gradients(used):
    model, optimizer, scaler = pair("float32", init_scale=256.0, max_consecutive_skips=3)
    if used:
        model.poison = {1: np.nan}
        scaler.step(optimizer, loss_of(model, 0))
        model.poison = {}
    scaler.load_state_dict({**scaler.state_dict(), "consecutive_skips": 3, "skipped_steps": 3, "steps": 8})
    for look in (scaler.check, scaler.poll):
        with pytest.raises(FlcudaError, match=r"^3 steps in a row up to step 8 .*That is what the loaded state says"):
            look()
    scaler.step(optimizer, loss_of(model, 1))
    scaler.check()
    assert scaler.state_dict()["consecutive_skips"] == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_goes_on_by_itself(copied, used):
    model, optimizer, scaler = pair("float32", init_scale=256.0, growth_interval=3)
    if used:
        scaler.step(optimizer, loss_of(model, 0))
    state = scaler.state_dict()
    other = copied(scaler)
    assert other.state_dict() == state
    model.poison = {1: np.nan}
    for seed in range(2):
        other.step(optimizer, loss_of(model, seed))
    assert other.scale_factor == float(other._scale) == 64.0
    assert float(other._inv_scale) == 1 / 64
    assert other.state_dict()["skipped_steps"] == 2
    assert scaler.state_dict() == state


def test_join_flags():
    parts = [np.array(p, np.int32) for p in ([0, 2, 0, 0], [1, 1, 0, 1, 1], [1, 0, 1])]
    out = np.full(8, -1, np.int32)
    join_flags(parts, out)
    assert out.tolist() == [1, 3, 0, 0, 0, 1, 1, 1]
    join_flags([parts[0], parts[0]], out[:6])
    assert out[:6].tolist() == [0, 4, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="out"):
        join_flags(parts, out[:5])
    with pytest.raises(TypeError, match="out"):
        join_flags(parts, out.astype(np.int64))


@pytest.mark.parametrize("asked", [False, True])
def test_a_step_with_invalid_gradients_changes_nothing_whoever_asks_for_it(asked):
    """The flags reach the optimizer when gradients are unscaled, so forgetting to ask costs no model."""
    model, optimizer, scaler = pair("float16", init_scale=256.0)
    scaler.step(optimizer, loss_of(model, 0))
    before = everything(model, optimizer)
    model.poison = {1: np.nan}
    scaler.scale(loss_of(model, 1)).backward()
    scaler.unscale(optimizer)
    if asked:
        assert not scaler.adjust_scale_factor()
    optimizer.step()
    for a, b in zip(before, everything(model, optimizer), strict=True):
        np.testing.assert_array_equal(a, b)
    if not asked:
        assert not scaler.adjust_scale_factor()
    model.poison = {}
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    assert all((a != b).any() for a, b in zip(before, everything(model, optimizer), strict=True))


def test_zero_grad_forgets_what_unscale_said():
    model, optimizer, scaler = pair("float32", init_scale=256.0)
    twin, other, _ = pair("float32")
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale(optimizer)
    assert scaler.adjust_scale_factor()
    model.discard_statistics()
    for m, o in ((model, optimizer), (twin, other)):
        o.zero_grad()
        loss_of(m, 1).backward()
        o.step()
    for a, b in zip(everything(model, optimizer), everything(twin, other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_scaler_for_models_of_different_arenas():
    """The same names, but one arena here and two there."""
    scaler = amp.DynamicScaler(8.0)
    x, target = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32), np.array([0, 1, 2] * 2)
    for precision in ("float32", "float16", "float32"):
        options = {"precision": precision, "device": "cpu"}
        model = nn.Sequential(nn.Linear(3, 3, bias=False, **options), nn.BatchNorm2D(3, **options))
        scaler.step(optim.SGD(model, 0.1), F.cross_entropy(model(x), target))
        assert scaler.is_invalid_array.tolist() == [0, 3, 0, 0, 0]
    w = Tensor(np.ones(2), requires_grad=True)
    scaler.scale(F.cross_entropy(F.linear(x[:, :2], Tensor(np.ones((3, 2), np.float32), True)), target))
    scaler.unscale([w])
    assert scaler.adjust_scale_factor()
    scaler.step(optim.SGD(model, 0.1), F.cross_entropy(model(x), target))
    assert scaler.is_invalid_array.tolist() == [0, 3, 0, 0, 0]


def test_a_loaded_state_begins_a_new_step():
    model, optimizer, scaler = pair("float32")
    state = scaler.state_dict()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale(optimizer)
    scaler.load_state_dict(state)
    optimizer.zero_grad()
    scaler.step(optimizer, loss_of(model, 0))


# --- who may do what between two steps


def scaled(model: Network, scaler: amp.DynamicScaler, seed: int) -> None:
    scaler.scale(loss_of(model, seed)).backward()


def test_after_an_invalid_check_no_step_changes_anything_until_zero_grad():
    model, optimizer, scaler = pair("float32", init_scale=256.0)
    scaler.step(optimizer, loss_of(model, 0))
    before = everything(model, optimizer)
    model.poison = {1: np.nan}
    scaled(model, scaler, 1)
    scaler.unscale(optimizer)
    assert not scaler.adjust_scale_factor()
    model.poison = {}
    for _ in range(3):
        optimizer.step()
        for a, b in zip(before, everything(model, optimizer), strict=True):
            np.testing.assert_array_equal(a, b)
    # A backward without scale is no part of that step.
    loss_of(model, 2).backward()
    with pytest.raises(FlcudaError, match="step: a backward has added to the gradients after unscale"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    assert all((a != b).any() for a, b in zip(before, everything(model, optimizer), strict=True))


@pytest.mark.parametrize("asked", [False, True])
def test_a_backward_between_unscale_and_step_is_an_error(asked):
    """Nobody has looked at what it adds."""
    model, optimizer, scaler = pair("float32", init_scale=256.0)
    scaler.step(optimizer, loss_of(model, 0))
    first = scaler.scale(loss_of(model, 1))
    model.poison = {2: np.nan}
    second = scaler.scale(loss_of(model, 2))
    model.poison = {}
    first.backward()
    scaler.unscale(optimizer)
    if asked:
        assert scaler.adjust_scale_factor()
    second.backward()
    parameters = [p.values() for p in model.parameters()]
    with pytest.raises(FlcudaError, match="step: a backward has added to the gradients after unscale"):
        optimizer.step()
    for p, q in zip(model.parameters(), parameters, strict=True):
        np.testing.assert_array_equal(p.values(), q)
    if not asked:
        assert scaler.adjust_scale_factor()
    optimizer.zero_grad()
    model.discard_statistics()
    scaler.step(optimizer, loss_of(model, 3))
    assert not scaler.is_invalid_array[0]


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_clipping_is_by_the_gradients_that_the_step_sees(factor):
    """Changed by hand after unscale."""
    model = Network("float32")
    optimizer, scaler = optim.SGD(model, 1.0, max_norm=0.01), amp.DynamicScaler(256.0)
    scaled(model, scaler, 0)
    scaler.unscale(optimizer)
    assert scaler.adjust_scale_factor()
    norm = np.sqrt(sum(np.square(p.grad.astype(np.float64) / 256).sum() for p in model.parameters())) * factor
    for p in model.parameters():
        p.grad *= np.float32(factor)
    before = [p.values().astype(np.float64) for p in model.parameters()]
    optimizer.step()
    moved = np.sqrt(sum(np.square(p.values() - q).sum() for p, q in zip(model.parameters(), before, strict=True)))
    assert moved == pytest.approx(min(norm, 0.01), rel=1e-2)


def test_with_clipping_a_gradient_that_is_spoiled_by_hand_skips_the_step():
    model = Network("float32")
    optimizer, scaler = optim.SGD(model, 1.0, max_norm=0.01), amp.DynamicScaler(256.0)
    scaled(model, scaler, 0)
    scaler.unscale(optimizer)
    assert scaler.adjust_scale_factor()
    model.fc.bias.grad[0] = np.nan
    before = [p.values() for p in model.parameters()]
    optimizer.step()
    for p, q in zip(model.parameters(), before, strict=True):
        np.testing.assert_array_equal(p.values(), q)


def test_tensors_with_invalid_gradients_can_be_tried_again():
    runs = []
    for poisoned in (True, False):
        model, optimizer, scaler = pair("float32", init_scale=256.0)
        scaler.step(optimizer, loss_of(model, 0))
        before = everything(model, optimizer)
        if poisoned:
            model.poison = {1: np.nan}
            scaled(model, scaler, 1)
            scaler.unscale(model.parameters())
            assert not scaler.adjust_scale_factor()
            assert all(p.grad is None for p in model.parameters())
            model.discard_statistics()
            model.poison = {}
            for a, b in zip(before, everything(model, optimizer), strict=True):
                np.testing.assert_array_equal(a, b)
        scaled(model, scaler, 1)
        scaler.unscale(model.parameters())
        assert scaler.adjust_scale_factor()
        optimizer.step()
        runs.append(everything(model, optimizer))
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_second_optimizer_needs_a_scaler_of_its_own():
    model, optimizer, scaler = pair("float32", init_scale=256.0)
    other, its, _ = pair("float32")
    match = "gave this optimizer's parameters no gradient; they are another one's, which needs a scaler of its own"
    scaled(model, scaler, 0)
    before = everything(other, its)
    loss = loss_of(other, 0)
    other.discard_statistics()
    with pytest.raises(FlcudaError, match="step: .*" + match):
        scaler.step(its, loss)
    with pytest.raises(FlcudaError, match="unscale: .*" + match):
        scaler.unscale(its)
    for a, b in zip(before, everything(other, its), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not its.has_gradients()
    scaler.step(optimizer, loss_of(model, 0))
    assert scaler.scale_factor == 256.0
    # One after the other it may serve both; and who forgets its gradients waits for no step.
    scaler.step(its, loss_of(other, 1))
    scaled(other, scaler, 2)
    its.zero_grad()
    scaler.step(its, loss_of(other, 2))
    assert scaler.state_dict()["steps"] == 3


@pytest.mark.parametrize("by", ["another", "none"])
def test_gradients_that_another_scaler_or_none_has_scaled_are_refused(by):
    model, optimizer, scaler = pair("float32", init_scale=256.0)
    if by == "another":
        other = amp.DynamicScaler(16.0)
        scaled(model, other, 0)
        with pytest.raises(ValueError, match="loss: is scaled already"):
            scaler.step(optimizer, other.scale(loss_of(model, 0)))
    else:
        loss_of(model, 0).backward()
    before = [p.grad.copy() for p in model.parameters()]
    with pytest.raises(FlcudaError, match=r"step: .* this scaler did not scale .* call its zero_grad"):
        scaler.step(optimizer, loss_of(model, 1))
    for p, q in zip(model.parameters(), before, strict=True):
        np.testing.assert_array_equal(p.grad, q)
    optimizer.zero_grad()
    scaler.step(optimizer, loss_of(model, 1))


def test_arguments_are_checked_before_anything_changes():
    model, optimizer, scaler = pair("float32", init_scale=256.0)
    with pytest.raises(TypeError, match="optimizer: Network is no Optimizer"):
        scaler.step(model, loss_of(model, 0))
    for loss, match in ((np.array(1.0, np.float32), "loss: ndarray"), (1.0, "loss: float")):
        for call in (scaler.scale, lambda loss: scaler.step(optimizer, loss)):
            with pytest.raises(TypeError, match=match):
                call(loss)
    assert not optimizer.has_gradients()
    assert scaler._device is None
    # None of these was a step, nor the first half of one.
    with pytest.raises(FlcudaError, match="unscale: wrong order, nothing was scaled"):
        scaler.unscale(optimizer)
    w, v = (Tensor(np.ones(3, np.float32), requires_grad=True) for _ in range(2))
    scaler.scale(Tensor(np.array(1.0), True))
    w.grad, v.grad = np.full(3, 512, np.float32), np.full(3, np.inf, np.float32)
    half = Parameter(np.ones(3), "float16", device="cpu")
    for target, match in (
        ([w, np.zeros(3)], "target: element 1 is a ndarray"),
        ([w, half], "target: tensor 1 is float16"),
        (model, "target: Network is neither"),
        (w, "target: Tensor is neither"),
        (3, "target: int is neither"),
    ):
        with pytest.raises(TypeError, match=match):
            scaler.unscale(target)
        assert w.grad.tolist() == [512, 512, 512]
    scaler.unscale(iter([w, v]))
    assert w.grad.tolist() == [2, 2, 2]
    assert scaler.is_invalid_array.tolist() == [1, 1, 0, 1]


def test_an_optimizer_whose_arenas_are_gone_is_refused_before_the_backward(monkeypatch):
    model, optimizer, scaler = pair("float32", init_scale=256.0)
    whole = nn.Sequential(model)
    assert whole.arenas
    searches = []
    monkeypatch.setattr(amp.finite, "find_invalid", lambda *a, **o: searches.append(1))
    loss = loss_of(model, 0)
    with pytest.raises(FlcudaError, match="step: the model's parameters moved to other arenas"):
        scaler.step(optimizer, loss)
    assert all(p.grad is None for p in model.parameters())
    scaler.scale(loss).backward()
    with pytest.raises(FlcudaError, match="unscale: the model's parameters moved to other arenas"):
        scaler.unscale(optimizer)
    assert not searches
    monkeypatch.undo()
    scaler.unscale(optim.SGD(whole, 0.1))
    assert scaler.adjust_scale_factor()


def test_flags_last_as_long_as_the_scaler():
    """A CUDA graph that has captured a step writes them at every replay."""
    model, optimizer, scaler = pair("float16", init_scale=256.0)
    w, other = one_parameter("float32")
    scaler.step(optimizer, loss_of(model, 0))
    flags, parts = scaler.is_invalid_array, scaler._last.parts
    kept = [weakref.ref(a) for a in (flags, *parts)]
    address = flags.ctypes.data
    del flags, parts
    assert tried("step", w, other, scaler, [1.0, 2.0, 3.0])
    assert scaler.is_invalid_array.tolist() == [0, 1, 0]
    scaler.scale(Tensor(np.array(1.0), True))
    scaler.unscale([Tensor(np.ones(2), requires_grad=True)])
    assert scaler.adjust_scale_factor()
    scaler.load_state_dict(scaler.state_dict())
    gc.collect()
    assert all(a() is not None for a in kept)
    scaler.step(optimizer, loss_of(model, 1))
    assert scaler.is_invalid_array.ctypes.data == address


# --- late news


class FakeSlot:
    """A slot whose copy arrives when the test says so."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.arrived = True
        self.asked = 0
        self.bytes = np.zeros(capacity, np.uint8)

    def fetch(self, arrays):
        assert self.arrived, "a slot was taken while a copy was on its way to it"
        content = np.concatenate([a.reshape(-1).view(np.uint8) for a in arrays])
        self.bytes[: content.size] = content
        self.arrived = False

    def done(self):
        self.asked += 1
        return self.arrived

    def read(self):
        assert self.arrived, "a slot was read before its copy had arrived"
        return self.bytes


class FakeSlots:
    """What a ring makes its slots with, on a device that works when the test says so."""

    def __init__(self) -> None:
        self.made: list[list[FakeSlot]] = []

    def __call__(self, capacity: int) -> list[FakeSlot]:
        self.made.append([FakeSlot(capacity) for _ in range(amp.NEWS_SLOTS)])
        return self.made[-1]

    def on_the_way(self) -> int:
        return sum(not slot.arrived for slot in self.made[-1]) if self.made else 0

    def work(self) -> None:
        for slots in self.made:
            for slot in slots:
                slot.arrived = True


def state_of(scale: float, *counters: int) -> np.ndarray:
    return np.concatenate([np.array([scale, 1 / scale]).view(np.int64), np.array(counters, np.int64)])


def test_the_ring_tells_in_order_and_waits_for_nothing():
    slots = FakeSlots()
    ring = amp.Ring(slots)
    assert ring.receive() is None
    sent = [
        (state_of(2.0**i, i, 2, 3, 10 + i), [checked(("a", "b"), np.array([1, 1, 0, i % 2], np.int32))])
        for i in range(7)
    ]
    expected = [amp.News(2.0**i, (i, 2, 3, 10 + i), True, ("b",) if i % 2 else ()) for i in range(7)]
    for i in range(4):
        assert ring.send(*sent[i])
    assert not ring.send(*sent[4])  # all slots are on their way
    assert ring.receive() is None
    # The second arrives before the first: nothing is told out of order.
    slots.made[0][1].arrived = True
    assert ring.receive() is None
    slots.made[0][0].arrived = True
    assert [ring.receive() for _ in range(3)] == [*expected[:2], None]
    assert ring.send(*sent[4])
    assert ring.send(*sent[5])
    assert not ring.send(*sent[6])
    slots.work()
    assert [ring.receive() for _ in range(5)] == [*expected[2:6], None]
    assert len(slots.made) == 1


def test_the_ring_forgets_but_does_not_reuse_a_slot_too_early():
    slots = FakeSlots()
    ring = amp.Ring(slots)
    checks = [checked(("a",), np.array([0, 1, 0], np.int32))]
    for i in range(4):
        assert ring.send(state_of(1.0, i, 0, 0, i), checks)
    ring.forget()
    assert not ring.send(state_of(1.0, 9, 0, 0, 9), checks)
    slots.work()
    assert ring.receive() is None
    assert ring.send(state_of(1.0, 9, 0, 0, 9), checks)
    slots.work()
    assert ring.receive() == amp.News(1.0, (9, 0, 0, 9), False, ())


def test_the_ring_takes_larger_slots_beside_the_old_ones():
    """To free the old ones would be to wait for the device."""
    slots = FakeSlots()
    ring = amp.Ring(slots)
    small, large = np.array([0, 1, 0], np.int32), np.zeros(2 + 5000, np.int32)
    large[1002] = 1
    large[0] = 1
    names = tuple(f"p{i}" for i in range(5000))
    assert ring.send(state_of(1.0, 0, 0, 0, 1), [checked(("a",), small)])
    old = weakref.ref(slots.made[0][1])
    assert ring.send(state_of(1.0, 0, 0, 0, 2), [checked(names, large)])
    assert [made[0].capacity for made in slots.made] == [4096, 32768]
    slots.work()
    assert ring.receive() == amp.News(1.0, (0, 0, 0, 1), False, ())
    assert ring.receive() == amp.News(1.0, (0, 0, 0, 2), True, ("p1000",))
    slots.made.pop(0)
    gc.collect()
    assert old() is not None


def test_the_ring_sends_several_checks_and_names_those_that_found_something():
    slots = FakeSlots()
    ring = amp.Ring(slots)
    flags = [np.array(f, np.int32) for f in ([1, 1, 0, 1], [0, 1, 0], [1, 0, 1])]
    checks = [checked(names, f) for names, f in zip((("a", "b"), ("c",), ("d",)), flags, strict=True)]
    assert ring.send(state_of(1.0, 0, 0, 0, 1), checks)
    slots.work()
    assert ring.receive() == amp.News(1.0, (0, 0, 0, 1), True, ("b", "d"))
    # Valid is what the first word says, whatever lies behind it.
    assert ring.send(state_of(1.0, 0, 0, 0, 2), [checked(("a",), np.array([0, 1, 1], np.int32))])
    slots.work()
    assert ring.receive() == amp.News(1.0, (0, 0, 0, 2), False, ())


def late_pair(**options):
    """A model on the CPU and a scaler that hears of its steps late, as on CUDA."""
    model, optimizer, scaler = pair("float32", **options)
    slots = FakeSlots()
    scaler._on(nn.devices.CPU)
    scaler._ring, scaler._late = amp.Ring(slots), True
    return model, optimizer, scaler, slots


def test_the_error_comes_by_itself_when_the_news_has_arrived():
    model, optimizer, scaler, slots = late_pair(init_scale=8.0, min_scale=1.0, max_consecutive_skips=20)
    model.poison = {1: np.nan}
    for seed in range(30):
        scaler.step(optimizer, loss_of(model, seed))  # the device is behind: nobody knows yet
    assert slots.on_the_way() == 3
    slots.work()
    # 24 is the first of 8, 16, 24 that is too long a row.
    with pytest.raises(FlcudaError, match=r"24 steps in a row up to step 24 .* scale is 1 .* 'conv0.weight'"):
        scaler.step(optimizer, loss_of(model, 30))
    assert scaler.state_dict()["steps"] == 31
    # Told once; a row that goes on is told again.
    for seed in range(8):
        scaler.step(optimizer, loss_of(model, seed))
    slots.work()
    with pytest.raises(FlcudaError, match=r"\d\d steps in a row up to step 3\d"):
        scaler.step(optimizer, loss_of(model, 0))


def test_a_row_is_told_once_though_more_of_it_is_on_the_way():
    model, optimizer, scaler, slots = late_pair(max_consecutive_skips=1)
    model.poison = {1: np.nan}
    for seed in range(3):
        scaler.step(optimizer, loss_of(model, seed))
    model.poison = {}
    slots.work()
    with pytest.raises(FlcudaError, match=r"^1 steps in a row up to step 1 "):
        scaler.step(optimizer, loss_of(model, 3))
    for seed in range(4):
        scaler.step(optimizer, loss_of(model, seed))
        slots.work()


def test_a_device_far_behind_costs_no_wait_and_no_slot():
    model, optimizer, scaler, slots = late_pair(max_consecutive_skips=1)
    for seed in range(20):
        scaler.step(optimizer, loss_of(model, seed))
    assert slots.on_the_way() == amp.NEWS_SLOTS
    slots.work()
    for seed in range(amp.NEWS_SLOTS):
        scaler.step(optimizer, loss_of(model, seed))
        slots.work()
    assert len(slots.made) == 1
    model.poison = {0: np.inf}
    scaler.step(optimizer, loss_of(model, 0))
    model.poison = {}
    slots.work()
    with pytest.raises(FlcudaError, match="1 steps in a row up to step 25 "):
        scaler.step(optimizer, loss_of(model, 0))


def test_a_row_that_ended_is_no_error():
    model, optimizer, scaler, slots = late_pair(max_consecutive_skips=20)
    for seed, kind in enumerate("x" * 19 + "." + "x" * 19 + "."):
        model.poison = {1: np.nan} if kind == "x" else {}
        scaler.step(optimizer, loss_of(model, seed))
        slots.work()
    scaler.check()
    assert scaler.state_dict()["skipped_steps"] == 38


def test_poll_sends_and_tells():
    model, optimizer, scaler, slots = late_pair(max_consecutive_skips=2)
    model.poison = {1: np.nan}
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale(optimizer)
    assert not scaler.adjust_scale_factor()
    scaler._update()  # as a replay of a captured step would
    scaler.poll()
    assert slots.on_the_way() == 1
    scaler.poll()
    slots.work()
    with pytest.raises(FlcudaError, match="2 steps in a row up to step 2 "):
        scaler.poll()


@pytest.mark.parametrize("look", ["poll", "check"])
def test_replays_of_one_optimizers_step_are_not_told_with_anothers_names(look):
    model, optimizer, scaler, slots = late_pair(max_consecutive_skips=2)
    w, other = one_parameter("float32")
    scaler.step(optimizer, loss_of(model, 0))
    captured = scaler.is_invalid_array
    assert tried("step", w, other, scaler, [1.0, 2.0, 3.0])
    for _ in range(2):  # as replays of the model's captured step would
        captured[:3] = 1, 0, 1
        optimizer_ops.scaler_update(scaler._scale, scaler._inv_scale, scaler._counters, captured, steps=scaler._steps)
    if look == "poll":
        scaler.poll()
        slots.work()
    with pytest.raises(FlcudaError, match=r"2 steps in a row up to step 4 .* invalid in 'conv0.weight'\."):
        getattr(scaler, look)()


def test_slots_are_made_with_the_flags_and_not_when_news_is_sent():
    """At the first step with an optimizer; later the device is busy, and to make them may be to wait for it."""
    scaler, slots = amp.DynamicScaler(), FakeSlots()
    scaler._on(nn.devices.CPU)
    scaler._ring, scaler._late = amp.Ring(slots), True
    model = nn.Module()
    for i in range(2000):
        setattr(model, f"p{i}", Parameter(np.ones(1), device="cpu"))
    optimizer = optim.SGD(model, 0.1)
    for _ in range(amp.NEWS_INTERVAL + 1):
        scaler.step(optimizer, F.scale(model.p0, 1.0))
        assert [made[0].capacity for made in slots.made] == [8192]
    assert slots.on_the_way() == 1


def test_a_loaded_state_knows_nothing_of_news_on_the_way():
    model, optimizer, scaler, slots = late_pair(max_consecutive_skips=2)
    state = scaler.state_dict()
    model.poison = {1: np.nan}
    for seed in range(3):
        scaler.step(optimizer, loss_of(model, seed))
    model.poison = {}
    scaler.load_state_dict(state)
    slots.work()
    for seed in range(3):
        scaler.step(optimizer, loss_of(model, seed))
        slots.work()
    assert scaler.state_dict()["steps"] == 3


def test_a_captured_step_sends_asks_and_makes_nothing(monkeypatch):
    model, optimizer, scaler, slots = late_pair(max_consecutive_skips=2)
    for seed in range(2):
        scaler.step(optimizer, loss_of(model, seed))
    made = scaler.is_invalid_array, scaler._state, slots.made[0][0].asked
    monkeypatch.setattr(amp.devices, "is_capturing", lambda: True)
    model.poison = {1: np.nan}
    for seed in range(3):
        scaler.step(optimizer, loss_of(model, seed))
    scaler.poll()
    assert slots.on_the_way() == 1
    assert made[0] is scaler.is_invalid_array
    assert made[1] is scaler._state
    assert made[2] == slots.made[0][0].asked
    monkeypatch.undo()
    scaler.poll()
    slots.work()
    with pytest.raises(FlcudaError, match="3 steps in a row up to step 5 "):
        scaler.poll()


# --- find_invalid


class Dlpack:
    """An array of a library that is only known by DLPack."""

    def __init__(self, a: np.ndarray) -> None:
        self.a = a

    def __dlpack__(self, **options):
        return self.a.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.a.__dlpack_device__()


def test_find_invalid_takes_arrays_of_all_kinds():
    half = np.zeros((3, 4), np.float16)
    brain = np.zeros((2, 2), ml_dtypes.bfloat16)
    brain[1, 1] = np.inf
    strided = np.zeros((4, 6), np.float64)
    strided[1, 1] = np.nan  # between the elements that are looked at
    last = np.zeros((2, 3, 4, 5), np.float32).transpose(0, 3, 1, 2)
    last[1, 4, 2, 3] = -np.inf
    arrays = [half, None, np.zeros((0, 5), np.float32), strided[::2, ::2], brain, Dlpack(np.full(3, np.nan)), last]
    flags = amp.find_invalid(arrays)
    assert flags.dtype == np.int32
    assert flags.tolist() == [1, 4, 0, 0, 0, 0, 1, 1, 1]
    assert amp.find_invalid(iter(arrays[:4])).tolist() == [0, 4, 0, 0, 0, 0]
    assert amp.find_invalid([]).tolist() == [0, 0]
    assert amp.find_invalid([None, None]).tolist() == [0, 2, 0, 0]
    assert amp.find_invalid([np.array(3.0)]).tolist() == [0, 1, 0]
    assert amp.find_invalid([np.broadcast_to(np.float32(np.nan), (3, 4))]).tolist() == [1, 0, 1]


@pytest.mark.parametrize("single", [np.zeros((2, 3)), np.zeros(3), Dlpack(np.zeros(3)), Tensor(np.zeros((2, 3)))])
def test_find_invalid_takes_no_single_array(single):
    with pytest.raises(TypeError, match=f"arrays: a single {type(single).__name__}; pass a list"):
        amp.find_invalid(single)


@pytest.mark.parametrize("wrong", [np.zeros(3, np.int64), [1.0, 2.0], 1.0, np.zeros(3, np.complex64)])
def test_find_invalid_names_what_it_cannot_take(wrong):
    with pytest.raises(TypeError, match=r"arrays\[1\]"):
        amp.find_invalid([np.zeros(3), wrong])
