"""The profile of a training step on the GPU: its times are the device's, and add up to the step's."""

import numpy as np
import pytest

import flcuda
from flcuda import amp, models, nn, optim
from flcuda import device as devices
from flcuda import functional as F
from flcuda.autograd import Tensor
from flcuda.training.step_profile import copy_bandwidth, profile_step, step_regret


@pytest.fixture
def device():
    found = devices.resolve("cuda")
    with found.use():
        yield found


def training(device, precision="float16", batch=64, size=112):
    model = models.resnet18(num_classes=100, precision=precision, device=device)
    optimizer = optim.SGD(model, 0.01, momentum=0.9)
    scaler = amp.DynamicScaler() if precision == "float16" else None
    rng = np.random.default_rng(0)
    x = Tensor(device.xp.asarray(rng.standard_normal((batch, 3, size, size), np.float32)))
    images = nn.precision_of(precision).enter(x)
    labels = device.xp.asarray(rng.integers(0, 100, batch))

    def step():
        loss = F.cross_entropy(model(images), labels)
        if scaler is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            scaler.step(optimizer, loss)
        return loss

    return step, model, optimizer


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_parts_add_up_to_the_captured_step(device, precision):
    """A captured step has no gaps of the host; watched, an event stands between any two parts."""
    step, model, optimizer = training(device, precision)
    profile = profile_step(step, model, optimizer, captured=flcuda.capture(step), steps=5, images=64)
    assert profile.queued
    assert profile.captured_ms is not None
    assert profile.captured_ms < 1.05 * profile.wall_ms
    marks = 2 * len(profile.parts)
    assert 0.9 * profile.captured_ms < profile.ms < 1.1 * profile.captured_ms + 0.003 * marks
    assert sum(map(profile.floor_ms, profile.parts)) < profile.ms
    took, predicted = profile.convolutions
    assert predicted is not None
    assert 0.7 < took / predicted < 1.5


def test_parts_are_not_below_half_of_their_floors(device):
    """Caches may help, but a part far below its floor was not timed as what it is."""
    profile = profile_step(*training(device, batch=256), steps=5)
    assert profile.peaks is not None
    for part in profile.parts:
        floor = profile.floor_ms(part)
        if floor > 0.02:
            assert part.ms > 0.5 * floor, part


def test_the_copy_is_near_the_memorys_peak(device):
    from flcuda.finder.peaks import peaks

    found = peaks(device)
    assert found is not None
    assert 0.6 * found.bandwidth < copy_bandwidth(device) < found.bandwidth


def test_watched_steps_train_as_others_do(device):
    with flcuda.policy(deterministic=True):
        step, model, optimizer = training(device, batch=8, size=64)
        other, twin, _ = training(device, batch=8, size=64)
        count = []

        def counted():
            count.append(1)
            return step()

        profile_step(counted, model, optimizer, steps=2)
        for _ in count:
            other()
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, twin.state_dict()[key], key)


def test_regret_of_the_dearest_convolutions(device):
    step, model, optimizer = training(device)
    step()
    regret = step_regret(step, model, optimizer, dearest=4, rounds=3, captured=True)
    assert len(regret.retried) == 4
    for entry in regret.retried:
        assert len(entry.labels) == len(entry.captured_ms) == 3
        assert entry.in_step_ms[0] > 0
        # The rest of the step is the same.
        assert all(0.5 * regret.step_ms < ms < 2 * regret.step_ms for ms in entry.captured_ms[0])
    assert 0 <= regret.share < 0.1
    # Nothing of it stays.
    float(step())
