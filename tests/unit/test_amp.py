"""The loss scaler: both ways of use, every transition, wrong orders, skipping, limits, state."""

import numpy as np
import pytest

from flcuda import amp, nn, optim
from flcuda import functional as F
from flcuda.autograd import Function, Tensor
from flcuda.errors import FlcudaError
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


def test_growth_counts_good_steps_since_the_last_change():
    scaler = amp.DynamicScaler(4.0, growth_interval=3, max_scale=64.0)
    assert poisoned_run(scaler, "....x...") == [4, 4, 8, 8, 4, 4, 4, 8]


def test_other_factors():
    scaler = amp.DynamicScaler(16.0, growth_factor=4, backoff_factor=0.25, growth_interval=1, max_scale=100.0)
    assert poisoned_run(scaler, ".x.") == [64, 16, 64]


def test_floor_and_ceiling_cannot_be_passed():
    scaler = amp.DynamicScaler(4.0, min_scale=1.5, max_scale=8.0, growth_interval=1)
    assert poisoned_run(scaler, "..." + "xxxx" + "..") == [8, 8, 8, 4, 2, 2, 2, 4, 8]
    scaler = amp.DynamicScaler(growth_interval=1)
    assert poisoned_run(scaler, ".." + "x.") == [65536, 65536, 32768, 65536]


def test_100_000_updates_follow_a_plain_model(rng):
    options = {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 5,
        "min_scale": 2**-3,
        "max_scale": 2.0**9,
    }
    scaler = amp.DynamicScaler(16.0, **options)
    scaler._on(nn.devices.CPU)
    scaler._flags = np.zeros(3, np.int32)
    scale, good, total, row = 16.0, 0, 0, 0
    for invalid in rng.random(100_000) < np.repeat(rng.random(1000) * 0.5, 100):
        scaler._flags[0] = invalid
        scaler._update()
        if invalid:
            scale = max(scale / 2, 2**-3)
            good, total, row = 0, total + 1, row + 1
        else:
            good, row = good + 1, 0
            if good == 5:
                scale, good = min(scale * 2, 2.0**9), 0
        assert float(scaler._scale) == scale == 1 / float(scaler._inv_scale)
    assert scaler._counters.tolist() == [good, total, row]


def test_an_endless_row_of_skips_names_scale_and_parameter():
    model, optimizer, scaler = pair("float32", init_scale=8.0, min_scale=1.0)
    model.poison = {1: np.nan}
    for seed in range(49):
        scaler.step(optimizer, loss_of(model, seed))
    with pytest.raises(FlcudaError, match=r"50 steps in a row .*scale is 1, its floor 1\).*'conv0.weight'"):
        scaler.step(optimizer, loss_of(model, 49))
    model, optimizer, scaler = pair("float32", max_consecutive_skips=3)
    model.poison = {2: np.inf}
    assert not synchronous_step(model, optimizer, scaler, 0)
    assert not synchronous_step(model, optimizer, scaler, 1)
    with pytest.raises(FlcudaError, match="3 steps in a row"):
        synchronous_step(model, optimizer, scaler, 2)
    scaler.state_dict()


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
    assert scaler.is_invalid_array.tolist() == [0, 2, 0, 0]
    assert scaler.adjust_scale_factor()


def test_overflow_that_appears_only_after_unscaling_counts():
    w = Tensor(np.array([3e38], np.float32), requires_grad=True)
    scaler = amp.DynamicScaler(2.0**-10)
    scaler.scale(F.scale(w, 0.0)).backward()
    w.grad = np.array([1e38], np.float32)
    scaler.unscale([w])
    assert not scaler.adjust_scale_factor()


def test_no_gradients_at_all():
    scaler = amp.DynamicScaler(8.0)
    w = Tensor(np.array([1.0], np.float32), requires_grad=True)
    scaler.scale(w)
    scaler.unscale([w])
    assert scaler.is_invalid_array.tolist() == [0, 0]
    assert scaler.adjust_scale_factor()


def test_wrong_orders():
    model, optimizer, scaler = pair("float32")
    with pytest.raises(FlcudaError, match="is_invalid_array"):
        _ = scaler.is_invalid_array
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
    scaler.step(optimizer, loss_of(model, 0))


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
        "version": 1,
        "scale": 4.0,
        "good_steps": 2,
        "skipped_steps": 1,
        "consecutive_skips": 0,
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
        {**state, "version": 2},
        {**state, "scale": 0.0},
        {**state, "good_steps": -1},
        {"version": 1},
        {**state, "a": 1},
    ):
        with pytest.raises(ValueError, match=r"version|scale|good_steps|missing|unexpected"):
            other.load_state_dict(bad)
    assert other.state_dict() == scaler.state_dict()


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
