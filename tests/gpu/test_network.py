"""Network, optimizer and scaler on CUDA: the same as on the CPU device, and what only CUDA has."""

import copy
import pickle

import numpy as np
import pytest

from flcuda import amp, device, models, nn, optim
from flcuda import functional as F
from flcuda.autograd import Function, Tensor
from flcuda.errors import FlcudaError

# of a network's values against the CPU device in the same precision, relative to the largest
TOLERANCE = {"float64": 1e-10, "float32": 2e-4, "tf32": 3e-2, "float16": 5e-2, "bfloat16": 3e-1}


@pytest.fixture
def cupy():
    return device.cupy()


def network(precision: str, place: str) -> nn.Sequential:
    options = {"precision": precision, "device": place}
    draws = nn.Draws(3)
    return nn.Sequential(
        nn.Conv2D(3, 8, 3, padding=1, seed=draws, **options),
        nn.BatchNorm2D(8, **options),
        nn.ReLU(),
        nn.ConvTranspose2D(8, 8, 2, 2, seed=draws, **options),
        nn.BatchNorm2D(8, momentum=None, **options),
        nn.MaxPool2D(3, 2, 1),
        nn.AvgPool2D(2),
        nn.Dropout(0.2, device=place, seed=draws),
        nn.Flatten(),
        nn.Linear(8 * 3 * 4, 10, seed=draws, **options),
    )


def train(precision: str, place: str, seed: int, steps: int = 3) -> tuple[nn.Sequential, list[float]]:
    rng = np.random.default_rng(seed)
    model = network(precision, place)
    optimizer = optim.SGD(model, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    scaler = amp.DynamicScaler(256.0)
    losses = []
    for _ in range(steps):
        xp = device.resolve(place).xp
        x = xp.asarray(rng.standard_normal((8, 3, 6, 8)).astype(np.float32))
        target = xp.asarray(rng.integers(0, 10, 8))
        loss = F.cross_entropy(model(x), target, label_smoothing=0.1)
        scaler.step(optimizer, loss)
        losses.append(float(loss))
    return model, losses


@pytest.mark.parametrize("precision", list(nn.PRECISIONS))
def test_training_equals_the_cpu_device(precision):
    ours, our_losses = train(precision, "cuda", 0)
    theirs, their_losses = train(precision, "cpu", 0)
    np.testing.assert_allclose(our_losses, their_losses, rtol=TOLERANCE[precision])
    expected = theirs.state_dict()
    for key, value in ours.state_dict().items():
        scale = max(abs(expected[key]).max(), 1e-3)
        np.testing.assert_allclose(value, expected[key], atol=TOLERANCE[precision] * scale, rtol=0, err_msg=key)


def test_initial_values_are_bit_equal_on_both_devices():
    a, b = (models.resnet18(10, stem="small", device=place, seed=4).state_dict() for place in ("cuda", "cpu"))
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])


def test_two_runs_of_one_seed_start_alike_and_pickle_and_deepcopy_work():
    model, _ = train("bfloat16", "cuda", 1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert str(next(twin.parameters()).device) == "cuda:0"
        for key, value in twin.state_dict().items():
            np.testing.assert_array_equal(value, model.state_dict()[key])
        assert device.memory_layout(twin[0].weight.data) == "nhwc"


class Poison(Function):
    def forward(self, x):
        return x.copy()

    def backward(self, grad):
        grad = grad.copy()
        grad[-1, -1] = np.nan
        return (grad,)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_an_invalid_step_changes_no_bit(precision, cupy, rng):
    model = models.ResNet((1, 1, 1, 1), 10, 3, "small", precision=precision, device="cuda")
    optimizer = optim.SGD(model, 0.1, momentum=0.9)
    scaler = amp.DynamicScaler(1024.0)
    x, target = cupy.asarray(rng.standard_normal((4, 3, 8, 8)).astype(np.float32)), cupy.asarray(rng.integers(0, 10, 4))

    def everything():
        arrays = [a for arena in model.arenas for a in (arena.master, arena.data)] + optimizer._velocity
        arrays += [a for s in model.statistics for a in (s.running, s.running_counts, s.pending, s.pending_counts)]
        return [a.get() for a in arrays]

    scaler.step(optimizer, F.cross_entropy(model(x), target))
    before = everything()
    scaler.step(optimizer, F.cross_entropy(Poison.apply(model(x)), target))
    for a, b in zip(before, everything(), strict=True):
        np.testing.assert_array_equal(a, b)
    flags = scaler.is_invalid_array.get()
    names = [s.name for arena in model.arenas for s in arena.segments]
    assert flags[0] == 1
    assert names[flags[1]] == "conv1.weight"
    assert flags[2 + names.index("fc.weight")] == 1
    assert scaler.scale_factor == 512
    scaler.step(optimizer, F.cross_entropy(model(x), target))
    assert all((a != b).any() for a, b in zip(before, everything(), strict=True))
    assert scaler.state_dict()["skipped_steps"] == 1


def test_a_training_step_does_not_wait_for_the_device(cupy, rng):
    """While a kernel keeps the stream busy, the host gets through a whole step and only then waits."""
    model = network("float32", "cuda")
    optimizer = optim.SGD(model, 0.05, momentum=0.9)
    scaler = amp.DynamicScaler(16.0)
    x = cupy.asarray(rng.standard_normal((8, 3, 6, 8)).astype(np.float32))
    target = cupy.asarray(rng.integers(0, 10, 8))
    for _ in range(2):  # searches and compiles
        scaler.step(optimizer, F.cross_entropy(model(x), target))
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n) {} }', "spin"
    )
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        scaler.step(optimizer, F.cross_entropy(model(x), target))
        stream.synchronize()
        spin((1,), (1,), (np.int64(2_000_000_000),))  # about a second
        end = cupy.cuda.Event()
        scaler.step(optimizer, F.cross_entropy(model(x), target))
        end.record()
        assert not end.done
        stream.synchronize()
        assert end.done


def test_gradients_and_graph_are_freed_as_backward_goes(cupy, rng):
    """A deep plain network's backward holds no more than its forward did, and nothing is left."""
    pool = cupy.get_default_memory_pool()
    x = Tensor(cupy.asarray(rng.standard_normal((64, 64, 64, 64)).astype(np.float32)), requires_grad=True)
    y = x
    for _ in range(20):
        y = F.relu(y)
    g = cupy.ones_like(y.data)
    cupy.cuda.Device().synchronize()
    held = pool.used_bytes()
    y.backward(g)
    del y, g
    assert pool.used_bytes() <= held - 20 * x.data.nbytes  # 20 activations and g went, one gradient came


def test_mixed_devices_are_an_error(cupy):
    model = nn.Conv2D(3, 4, 3, device="cuda", seed=0)
    with pytest.raises((ValueError, TypeError), match=r"cpu.*cuda|cuda.*cpu|NumPy"):
        model(np.zeros((1, 3, 5, 5), np.float32))
    scaler = amp.DynamicScaler()
    scaler.scale(Tensor(cupy.ones(()), True))
    with pytest.raises(ValueError, match="loss: is on cpu"):
        scaler.scale(Tensor(np.ones(()), True))


def test_a_row_of_skips_raises(cupy, rng):
    """By itself, some steps later: here the device is given the time."""
    model = network("float16", "cuda")
    optimizer = optim.SGD(model, 0.05)
    scaler = amp.DynamicScaler()
    x = cupy.asarray(rng.standard_normal((8, 3, 6, 8)).astype(np.float32))
    target = cupy.asarray(rng.integers(0, 10, 8))

    def steps(count):
        for _ in range(count):
            scaler.step(optimizer, F.cross_entropy(Poison.apply(model(x)), target))
            cupy.cuda.Device().synchronize()

    steps(50)
    with pytest.raises(FlcudaError, match=r"5\d steps in a row up to step 5\d .*'0\.weight'"):
        steps(10)
    with pytest.raises(FlcudaError, match=r"5\d steps in a row"):
        scaler.check()
