"""The optimizers against their formulas written out per parameter, arguments, skipping, clipping, and state."""

import numpy as np
import pytest

from flcuda import functional as F
from flcuda import nn, optim
from flcuda.errors import FlcudaError
from flcuda.ops.finite import find_invalid
from flcuda.parameters import Parameter


def network(precision: str = "float64") -> nn.Sequential:
    options = {"precision": precision, "device": "cpu"}
    draws = nn.Draws(1)
    return nn.Sequential(
        nn.Conv2D(2, 3, 3, seed=draws, **options),
        nn.BatchNorm2D(3, **options),
        nn.Flatten(),
        nn.Linear(27, 4, seed=draws, **options),
    )


def backward(model: nn.Module, rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 2, 5, 5)).astype(np.float32)
    F.cross_entropy(model(x), rng.integers(0, 4, 6)).backward()


# Every class, and every branch of SGD's formula.
MAKERS = {
    "sgd": lambda model, **options: optim.SGD(model, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **options),
    "dampened": lambda model, **options: optim.SGD(model, 0.1, 0.9, dampening=0.5, weight_decay=0.1, **options),
    "adam": lambda model, **options: optim.Adam(model, 0.01, weight_decay=0.1, **options),
    "adamw": lambda model, **options: optim.AdamW(model, 0.01, (0.8, 0.99), 1e-6, **options),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def everything(model: nn.Module, optimizer: optim.Optimizer) -> list[np.ndarray]:
    """Copies of every array that a step may change."""
    arrays = [a for arena in model.arenas for a in (arena.master, arena.data)]
    arrays += [a for flats in optimizer._states().values() for a in flats]
    arrays += [optimizer.steps] if optimizer.counts_steps else []
    arrays += [a for s in model.statistics for a in (s.running, s.running_counts)]
    return [a.copy() for a in arrays]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.05},
        {"momentum": 0.9},
        {"momentum": 0.8, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
)
@pytest.mark.parametrize("precision", ["float64", "float32", "float16"])
def test_the_formula(rng, options, precision):
    model = network(precision)
    model[0].bias.decay = False
    optimizer = optim.SGD(model, 0.1, **options)
    momentum, decay = options.get("momentum", 0.0), options.get("weight_decay", 0.0)
    expected = {name: p.values().astype(np.float64) for name, p in model.named_parameters()}
    velocity = {name: np.zeros(p.shape) for name, p in model.named_parameters()}
    for step in range(3):
        optimizer.zero_grad()
        backward(model, rng)
        optimizer.lr = lr = 0.1 / (step + 1)
        for name, p in model.named_parameters():
            g = p.grad.astype(np.float64) + (decay if name != "0.bias" else 0) * expected[name]
            velocity[name] = momentum * velocity[name] + g
            expected[name] -= lr * (g + momentum * velocity[name] if options.get("nesterov") else velocity[name])
        optimizer.step()
        for name, p in model.named_parameters():
            tolerance = 1e-12 if precision == "float64" else 2e-6
            np.testing.assert_allclose(p.values(), expected[name], rtol=tolerance, atol=tolerance, err_msg=name)
            expected[name] = p.values().astype(np.float64)


@pytest.mark.parametrize("precision", ["float64", "float32", "float16"])
@pytest.mark.parametrize("kind", ["dampened", "adam", "adamw"])
def test_the_other_formulas(rng, kind, precision):
    model = network(precision)
    model[0].bias.decay = False
    optimizer = MAKERS[kind](model)
    tolerance = 1e-12 if precision == "float64" else 4e-6
    values = {name: p.values().astype(np.float64) for name, p in model.named_parameters()}
    first, second = ({name: np.zeros(p.shape) for name, p in model.named_parameters()} for _ in range(2))
    for step in range(1, 5):
        optimizer.zero_grad()
        backward(model, rng)
        optimizer.lr = lr = 0.02 / step
        gradients = {name: p.grad.astype(np.float64) for name, p in model.named_parameters()}
        if step == 3:
            # A skipped step counts nowhere.
            optimizer.step(flags=np.array([1, 0], np.int32))
            optimizer.zero_grad()
            continue
        optimizer.step()
        count = step - (step > 3)
        for name, p in model.named_parameters():
            g, value = gradients[name], values[name]
            decays = name != "0.bias"
            if kind != "adamw":
                g = g + 0.1 * decays * value
            if kind == "dampened":
                first[name] = 0.9 * first[name] + (1 if count == 1 else 0.5) * g
                wanted = value - lr * first[name]
            else:
                beta1, beta2, eps = (0.9, 0.999, 1e-8) if kind == "adam" else (0.8, 0.99, 1e-6)
                if kind == "adamw":
                    value = value * (1 - lr * 0.01 * decays)
                first[name] = beta1 * first[name] + (1 - beta1) * g
                second[name] = beta2 * second[name] + (1 - beta2) * g * g
                denominator = np.sqrt(second[name] / (1 - beta2**count)) + eps
                wanted = value - lr * (first[name] / (1 - beta1**count)) / denominator
            np.testing.assert_allclose(p.values(), wanted, rtol=tolerance, atol=tolerance, err_msg=name)
            np.testing.assert_array_equal(p.data, p.values().astype(p.dtype))
            values[name] = p.values().astype(np.float64)
    assert optimizer.steps.tolist() == [3]
    assert optimizer.state_dict()["steps"] == 3


def test_a_parameter_without_a_gradient_counts_as_zero(rng):
    class Partly(nn.Module):
        def __init__(self) -> None:
            self.used = network()
            self.unused = nn.Linear(2, 2, device="cpu", precision="float64", seed=0)

        def forward(self, x):
            return self.used(x)

    model = Partly()
    optimizer = optim.SGD(model, 0.1, momentum=0.9, weight_decay=0.1)
    before = model.unused.weight.values()
    for p in model.parameters():
        p.buffer[...] = np.nan  # what a former step may have left
    backward(model, rng)
    optimizer.step()
    np.testing.assert_allclose(model.unused.weight.values(), before * (1 - 0.1 * 0.1), rtol=1e-14)
    assert np.isfinite(model.arenas[0].master).all()


def test_zero_grad_writes_nothing_and_micro_batches_add_up(rng):
    """Two halves with half the loss each are the whole batch; batch norm is left out, it sees other statistics."""
    options = {"precision": "float64", "device": "cpu"}
    models = [
        nn.Sequential(nn.Conv2D(2, 3, 3, seed=1, **options), nn.Flatten(), nn.Linear(27, 4, seed=2, **options))
        for _ in range(2)
    ]
    optimizers = [optim.SGD(model, 0.5, momentum=0.9) for model in models]
    for _ in range(3):
        x, target = rng.standard_normal((6, 2, 5, 5)), rng.integers(0, 4, 6)
        F.cross_entropy(models[0](x), target).backward()
        for part in (slice(0, 3), slice(3, 6)):
            (F.cross_entropy(models[1](x[part]), target[part]) * 0.5).backward()
        for optimizer in optimizers:
            optimizer.step()
            kept = optimizer.arenas[0].grad.copy()
            optimizer.zero_grad()
            np.testing.assert_array_equal(optimizer.arenas[0].grad, kept)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        np.testing.assert_allclose(p.data, q.data, rtol=1e-12, atol=1e-14)


def test_a_step_settles_the_statistics(rng):
    model = network()
    optimizer = optim.SGD(model, 0.1)
    backward(model, rng)
    assert model[1].bn.num_batches_tracked.tolist() == [0]
    optimizer.step()
    np.testing.assert_array_equal(model[1].bn.running_mean, model[1].bn.pending_mean)
    assert model[1].bn.running_mean.all()
    assert model[1].bn.num_batches_tracked.tolist() == [1]


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32", "float64"])
def test_a_flagged_step_changes_no_bit(rng, make, precision):
    model = network(precision)
    optimizer = make(model)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, rng)
        optimizer.step()
    before = everything(model, optimizer)
    backward(model, rng)
    model.arenas[0].grad[...] = np.nan
    optimizer.step(flags=np.array([1, 0, 1], np.int32))
    for a, b in zip(before, everything(model, optimizer), strict=True):
        np.testing.assert_array_equal(a, b)
    optimizer.zero_grad()
    backward(model, rng)
    optimizer.step(flags=np.array([0, 3, 0], np.int32))
    assert all((a != b).any() for a, b in zip(before, everything(model, optimizer), strict=True))


def test_inv_scale_and_flags_hold_until_zero_grad(rng):
    """A second step takes the same gradients in the same way, and once they are forgotten all is as ever."""
    model, other = network(), network()
    optimizers = [optim.SGD(m, 0.1, momentum=0.9) for m in (model, other)]
    x, target = rng.standard_normal((6, 2, 5, 5)), rng.integers(0, 4, 6)
    (F.cross_entropy(model(x), target) * 64).backward()
    F.cross_entropy(other(x), target).backward()
    optimizers[0].unscaled(np.array([1 / 64]), np.zeros(2, np.int32))
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
    before = [p.values() for p in model.parameters()]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(p.data, q.data)
    optimizers[0].unscaled(np.array([1 / 64]), np.ones(2, np.int32))
    for _ in range(2):
        optimizers[0].step()
        for p, q in zip(model.parameters(), before, strict=True):
            np.testing.assert_array_equal(p.data, q)
    optimizers[0].zero_grad()
    assert optimizers[0].inv_scale is None
    assert optimizers[0].flags is None


def test_inv_scale_is_forgotten_by_zero_grad(rng):
    model, other = network(), network()
    optimizers = [optim.SGD(m, 0.1, momentum=0.9) for m in (model, other)]
    for scale in (64.0, 1.0):
        x, target = rng.standard_normal((6, 2, 5, 5)), rng.integers(0, 4, 6)
        (F.cross_entropy(model(x), target) * scale).backward()
        F.cross_entropy(other(x), target).backward()
        if scale != 1:
            optimizers[0].inv_scale = np.array([1 / scale])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(p.data, q.data)


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_resumed_is_uninterrupted(rng, make, precision):
    """With a skipped step on either side of the interruption."""

    def steps(model, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            backward(model, np.random.default_rng(number))
            optimizer.step(flags=np.array([number % 3 == 0, 0], np.int32))

    model = network(precision)
    optimizer = make(model, max_norm=3.0)
    steps(model, optimizer, range(5))
    state, parameters = optimizer.state_dict(), model.state_dict()
    steps(model, optimizer, range(5, 10))
    other = network(precision)
    resumed = make(other)
    steps(other, resumed, range(20, 22))
    other.load_state_dict(parameters)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["steps"] == state["steps"] == (3 if optimizer.counts_steps else 0)
    assert resumed.max_norm == 3.0
    steps(other, resumed, range(5, 10))
    for a, b in zip(everything(model, optimizer), everything(other, resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_states_say_what_they_are(rng):
    model = network()
    adam, adamw = optim.Adam(model), optim.AdamW(model)
    backward(model, rng)
    adam.step()
    state = adam.state_dict()
    assert (state["version"], state["optimizer"], state["betas"]) == (1, "Adam", (0.9, 0.999))
    assert sorted(state["exp_avg"]) == sorted(name for name, _ in model.named_parameters())
    assert state["exp_avg_sq"]["0.weight"].any()
    before = everything(model, adamw)
    for other, match in (
        ({}, "optimizer: 'Adam' where this optimizer has 'AdamW'"),
        ({"optimizer": "AdamW", "version": 2}, "version: 2"),
        ({"optimizer": "AdamW", "betas": (0.9, 1.0)}, "betas"),
        ({"optimizer": "AdamW", "steps": -1}, "steps"),
        ({"optimizer": "AdamW", "exp_avg": {}}, "missing exp_avg: 0.weight"),
    ):
        with pytest.raises(ValueError, match=match):
            adamw.load_state_dict({**state, **other})
    with pytest.raises(ValueError, match="missing key: betas"):
        adamw.load_state_dict(optim.SGD(model, 0.1, momentum=0.5).state_dict())
    for a, b in zip(before, everything(model, adamw), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_from_before_there_were_versions(rng):
    optimizer = optim.SGD(network(), 0.1, momentum=0.9)
    old = {name: optimizer.state_dict()[name] for name in ("lr", "momentum", "nesterov", "weight_decay", "velocity")}
    old["velocity"]["0.bias"][...] = 3
    optimizer.load_state_dict({**old, "lr": 0.25})
    assert (optimizer.lr, optimizer.dampening, optimizer.max_norm) == (0.25, 0.0, None)
    assert (optimizer.state_dict()["velocity"]["0.bias"] == 3).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_dicts_go_round(rng, momentum):
    model = network("float16")
    optimizer = optim.SGD(model, 0.1, momentum=momentum, weight_decay=0.01)
    backward(model, rng)
    optimizer.step()
    optimizer.lr = 0.05
    state, parameters = optimizer.state_dict(), model.state_dict()
    if momentum:
        assert state["velocity"]["0.weight"].shape == (3, 2, 3, 3)
        assert state["velocity"]["0.weight"].dtype == np.float32
    other = network("float16")
    resumed = optim.SGD(other, 7.0, momentum=0.5, nesterov=True)
    other.load_state_dict(parameters)
    velocity = resumed._velocity
    resumed.load_state_dict(state)
    assert (resumed.lr, resumed.momentum, resumed.nesterov, resumed.weight_decay) == (0.05, momentum, False, 0.01)
    if momentum:
        assert all(a is b for a, b in zip(velocity, resumed._velocity, strict=True))
    seed = int(rng.integers(1 << 30))
    for m, o in ((model, optimizer), (other, resumed)):
        o.zero_grad()
        backward(m, np.random.default_rng(seed))
        o.step()
    for a, b in zip(everything(model, optimizer), everything(other, resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_wrong_state_changes_nothing(rng):
    model = network()
    optimizer = optim.SGD(model, 0.1, momentum=0.9)
    backward(model, rng)
    optimizer.step()
    state = optimizer.state_dict()
    before = everything(model, optimizer)
    velocity = dict(state["velocity"])
    velocity["0.weight"] = np.zeros((3, 3))
    del velocity["0.bias"]
    velocity["head"] = np.zeros(3)
    with pytest.raises(ValueError, match="state: ") as error:
        optimizer.load_state_dict({**state, "velocity": velocity, "lr": 5.0})
    assert "missing velocity: 0.bias" in str(error.value)
    assert "unexpected velocity: head" in str(error.value)
    assert "velocity 0.weight: shape (3, 3) where the model has (3, 2, 3, 3)" in str(error.value)
    for bad in ({**state, "lr": -1.0}, {**state, "momentum": 2}, {**state, "extra": 1}, {"lr": 1.0}):
        with pytest.raises(ValueError, match=r"lr|momentum|key"):
            optimizer.load_state_dict(bad)
    assert optimizer.lr == 0.1
    for a, b in zip(before, everything(model, optimizer), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (None, TypeError, "^state: None is no mapping"),
        ([], TypeError, r"^state: \[\] is no mapping"),
        ({"exp_avg": None}, TypeError, "^exp_avg: None is no mapping"),
        ({"exp_avg_sq": [1]}, TypeError, r"^exp_avg_sq: \[1\] is no mapping"),
        ({"steps": 2**63, "lr": 5.0, "eps": 1.0}, ValueError, "^steps: 9223372036854775808 is more than"),
        ({"steps": 1.5}, TypeError, "^steps: 1.5"),
        ({"lr": None}, TypeError, "^lr: None"),
        ({"betas": None}, TypeError, "^betas: None"),
    ],
)
def test_a_state_that_is_not_taken_changes_nothing(rng, change, error, match):
    model = network()
    optimizer = optim.Adam(model, 0.1, max_norm=2.0)
    backward(model, rng)
    optimizer.step()
    state = optimizer.state_dict()
    with pytest.raises(error, match=match):
        optimizer.load_state_dict({**state, **change} if isinstance(change, dict) else change)
    found = optimizer.state_dict()
    assert [found[name] for name in ("steps", "lr", "betas", "eps", "max_norm")] == [1, 0.1, (0.9, 0.999), 1e-8, 2.0]
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, values in state[kind].items():
            np.testing.assert_array_equal(found[kind][name], values)


def test_max_norm_is_set_by_a_load_only(make):
    optimizer = make(network())
    with pytest.raises(AttributeError, match="max_norm"):
        optimizer.max_norm = 1.0
    optimizer.load_state_dict({**optimizer.state_dict(), "max_norm": 1.0})
    assert optimizer.max_norm == 1.0
    assert optimizer.sums is not None


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"lr": -0.1}, ValueError, "lr: -0.1"),
        ({"lr": float("nan")}, ValueError, "lr: nan"),
        ({"lr": "0.1"}, TypeError, "lr: '0.1'"),
        ({"lr": 0.1, "momentum": -0.5}, ValueError, "momentum: -0.5"),
        ({"lr": 0.1, "momentum": 1.5}, ValueError, "momentum: 1.5"),
        ({"lr": 0.1, "nesterov": True}, ValueError, "nesterov: True"),
        ({"lr": 0.1, "momentum": 0.9, "nesterov": 1}, TypeError, "nesterov: 1"),
        ({"lr": 0.1, "weight_decay": -1e-4}, ValueError, "weight_decay: -0.0001"),
        ({"lr": 0.1, "momentum": 0.9, "dampening": 1.5}, ValueError, "dampening: 1.5"),
        ({"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "nesterov": True}, ValueError, "nesterov: True"),
        ({"lr": 0.1, "max_norm": 0.0}, ValueError, "max_norm: 0.0"),
        ({"lr": 0.1, "max_norm": float("inf")}, ValueError, "max_norm: inf"),
    ],
)
def test_bad_arguments(arguments, kind, match):
    with pytest.raises(kind, match=match):
        optim.SGD(network(), **arguments)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"lr": -0.1}, ValueError, "lr: -0.1"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas: 1.0"),
        ({"betas": 0.9}, TypeError, "betas: 0.9"),
        ({"betas": (0.9, "0.9")}, TypeError, "betas: '0.9'"),
        ({"eps": 0.0}, ValueError, "eps: 0.0"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay: -1.0"),
        ({"max_norm": -1.0}, ValueError, "max_norm: -1.0"),
    ],
)
def test_bad_arguments_of_adam(kind, arguments, error, match):
    with pytest.raises(error, match=match):
        kind(network(), **arguments)


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["nothing", "flags", "sums"])
@pytest.mark.parametrize("precision", ["float16", "float32"])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_is_a_smaller_inv_scale(rng, make, precision, max_norm, given):
    """Over all arenas together: 16-bit networks have two; and whoever has summed the squares."""
    runs = []
    seed = int(rng.integers(1 << 30))
    for clipped in (True, False):
        model = network(precision)
        optimizer = make(model, max_norm=max_norm) if clipped else make(model)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, np.random.default_rng([seed, step]))
            norm = np.sqrt(sum(np.square(p.grad.astype(np.float64)).sum() for p in model.parameters())) / 8
            factor = min(1.0, max_norm / norm)
            assert (factor < 1) == (max_norm < 1)
            optimizer.inv_scale = np.array([1 / 8 if clipped else factor / 8])
            flags = None if given == "nothing" else np.zeros(2, np.int32)
            if clipped and given == "sums":
                for arena, sums in zip(optimizer.arenas, optimizer.sums, strict=True):
                    check = np.zeros(2 + len(arena.segments), np.int32)
                    find_invalid(arena.grad, arena.offsets, check, sums=sums)
                optimizer.apply(optimizer.inv_scale, flags, sums_are_current=True)
            else:
                optimizer.step(flags=flags)
        runs.append([p.values() for p in model.parameters()])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("arena", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_skips_the_step(rng, make, bad, arena):
    model = network("float16")
    optimizer = make(model, max_norm=1.0)
    backward(model, rng)
    optimizer.step()
    before = everything(model, optimizer)
    for flags in (None, np.zeros(2, np.int32)):
        optimizer.zero_grad()
        backward(model, rng)
        model.arenas[arena].grad[1] = bad
        optimizer.step(flags=flags)
        assert flags is None or flags[0] == 1
    for a, b in zip(before, everything(model, optimizer), strict=True):
        np.testing.assert_array_equal(a, b)
    optimizer.zero_grad()
    backward(model, rng)
    optimizer.step()
    assert all((a != b).any() for a, b in zip(before, everything(model, optimizer), strict=True))


def test_a_norm_that_overflows_once_unscaled_skips_the_step(rng, make):
    model = network("float32")
    optimizer = make(model, max_norm=1.0)
    backward(model, rng)
    before = everything(model, optimizer)
    optimizer.inv_scale = np.array([1e40])
    optimizer.step()
    for a, b in zip(before, everything(model, optimizer), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bad_models():
    with pytest.raises(TypeError, match="model: list"):
        optim.SGD([Parameter(np.zeros(3), device="cpu")], 0.1)
    with pytest.raises(ValueError, match="model: "):
        optim.SGD(nn.ReLU(), 0.1)
    optimizer = optim.SGD(network(), 0.1)
    with pytest.raises(ValueError, match="lr: -1"):
        optimizer.lr = -1
    assert optimizer.lr == 0.1


def test_an_optimizer_whose_model_moved_away_says_so(rng):
    model = network()
    optimizer = optim.SGD(model, 0.1)
    larger = nn.Sequential(model, nn.Linear(4, 4, device="cpu", precision="float64", seed=0))
    optim.SGD(larger, 0.1)
    backward(model, rng)
    with pytest.raises(FlcudaError, match="make the optimizer last"):
        optimizer.step()


def test_a_frozen_parameter_stays_as_it_is(rng, make):
    model = network()
    model[0].weight.requires_grad = False
    optimizer = make(model)
    before = [p.values() for p in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, rng)
        optimizer.step()
    changed = [(p.values() != b).any() for p, b in zip(model.parameters(), before, strict=True)]
    assert changed == [False] + [True] * (len(changed) - 1)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_an_assigned_gradient_is_the_one_that_counts(rng, precision):
    """Clipping by assignment, as with PyTorch."""
    runs = []
    seeds = rng.integers(0, 1 << 30, 2)
    for assigned in (True, False):
        model = network(precision)
        optimizer = optim.SGD(model, 0.5)
        for p in model.parameters():
            p.write(p.values() * 0.5)
        for i, seed in enumerate(seeds):
            backward(model, np.random.default_rng(seed))
            for p in model.parameters():
                if i == 0 and assigned:
                    p.grad = p.grad * p.dtype.type(0.25)
                elif i == 0:
                    p.grad *= p.dtype.type(0.25)
        optimizer.step()
        assert all(p.grad is p.buffer for p in model.parameters())
        runs.append([p.values() for p in model.parameters()])
    for assigned, in_place in zip(*runs, strict=True):
        np.testing.assert_array_equal(assigned, in_place)


def test_a_velocity_of_no_numbers_changes_nothing(rng):
    optimizer = optim.SGD(network(), 0.1, momentum=0.9)
    state = optimizer.state_dict()
    state["velocity"]["3.bias"] = np.array(list("abcd"))
    with pytest.raises(TypeError, match=r"velocity 3\.bias: dtype str"):
        optimizer.load_state_dict({**state, "lr": 5.0})
    assert optimizer.lr == 0.1
