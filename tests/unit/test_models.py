"""ResNets: torchvision's structure, keys and initial values; any input size."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from flcuda import finder, models, nn
from flcuda import functional as F


@pytest.fixture(autouse=True)
def no_measuring() -> Iterator[None]:
    with finder.policy(mode="heuristic"):
        yield


@pytest.fixture(scope="module")
def resnet34() -> models.ResNet:
    return models.resnet34(device="cpu")


def test_resnet34_has_torchvisions_parameters(resnet34):
    named = dict(resnet34.named_parameters())
    assert sum(p.data.size for p in named.values()) == 21_797_672
    assert len(named) == 110
    assert sum(isinstance(module, nn.Conv2D) for _, module in resnet34.named_modules()) == 36
    assert list(named)[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert list(named)[-2:] == ["fc.weight", "fc.bias"]
    assert named["layer3.0.downsample.0.weight"].shape == (256, 128, 1, 1)
    assert named["layer4.2.conv2.weight"].shape == (512, 512, 3, 3)
    buffers = [name for name, _ in resnet34.named_buffers()]
    assert len(buffers) == 36 * 3
    assert "layer2.0.downsample.1.num_batches_tracked" in buffers


def test_resnet50_has_torchvisions_parameters():
    model = models.resnet50(device="cpu")
    named = dict(model.named_parameters())
    assert sum(p.data.size for p in named.values()) == 25_557_032
    assert len(named) == 161
    assert len([name for name, _ in model.named_buffers()]) == 53 * 3
    names = ("conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "downsample.0", "downsample.1")
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in named))
    assert layers[2:10] == [f"layer1.0.{name}" for name in names]
    shapes = {
        "layer1.0.conv1": (64, 64, 1, 1),
        "layer1.0.downsample.0": (256, 64, 1, 1),
        "layer1.1.conv1": (64, 256, 1, 1),
        "layer3.0.conv2": (256, 256, 3, 3),
        "layer4.0.conv3": (2048, 512, 1, 1),
        "layer4.0.downsample.0": (2048, 1024, 1, 1),
    }
    for layer, shape in shapes.items():
        assert named[f"{layer}.weight"].shape == shape
    assert named["fc.weight"].shape == (1000, 2048)
    # The stride is at the 3x3 convolution, and the shortcut's goes with it.
    for block in (model.layer2[0], model.layer4[0]):
        assert [conv.stride for conv in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (2, 2), (1, 1)]
        assert block.downsample[0].stride == (2, 2)
    assert model.layer1[0].downsample[0].stride == (1, 1)
    assert model.layer2[1].downsample is None
    state = model.state_dict()
    for key, value in state.items():
        if value.ndim == 4:
            k, _, r, s = value.shape
            assert abs(value.std() / math.sqrt(2 / (k * r * s)) - 1) < 0.03, key
        elif key.endswith(("bn3.weight", "running_var")):
            assert (value == 1).all(), key


def test_initial_values(resnet34):
    state = resnet34.state_dict()
    for key, value in state.items():
        if value.ndim == 4:
            k, _, r, s = value.shape
            assert abs(value.std() / math.sqrt(2 / (k * r * s)) - 1) < 0.03, key
            assert abs(value.mean()) < 0.02 * value.std() + 3 * value.std() / math.sqrt(value.size), key
        elif key.endswith(("running_var", "bn1.weight", "bn2.weight", "downsample.1.weight")):
            assert (value == 1).all(), key
        elif not key.startswith("fc."):
            assert not value.any(), key
    bound = 1 / math.sqrt(512)
    assert 0.999 * bound < abs(state["fc.weight"]).max() <= bound
    assert abs(state["fc.bias"]).max() <= bound
    assert len({float(v.reshape(-1)[0]) for v in state.values() if v.ndim == 4}) == 36  # each its own numbers


def small(**options) -> models.ResNet:
    return models.ResNet((1, 1, 1, 1), **{"num_classes": 7, "device": "cpu", **options})


def test_the_seed_decides():
    a, b, c = (small(seed=s).state_dict() for s in (1, 1, 2))
    half = small(seed=1, precision="float16").state_dict()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])
        np.testing.assert_array_equal(a[key], half[key])
    assert (a["layer4.0.conv1.weight"] != c["layer4.0.conv1.weight"]).mean() > 0.99


@pytest.mark.parametrize(
    ("stem", "size", "channels"), [("imagenet", (33, 47), 3), ("small", (8, 9), 1), ("small", (1, 1), 2)]
)
def test_any_size_and_channels(rng, stem, size, channels):
    model = small(stem=stem, in_channels=channels)
    model.train(size != (1, 1))
    y = model(rng.standard_normal((2, channels, *size)).astype(np.float32))
    assert y.shape == (2, 7)
    assert np.isfinite(y.data).all()
    assert model.conv1.weight.shape == (64, channels, *((7, 7) if stem == "imagenet" else (3, 3)))
    assert not any(key.startswith("maxpool") for key in model.state_dict())


def test_a_step_in_float16_reaches_every_parameter(rng):
    model = small(stem="small", precision="float16")
    y = model(rng.standard_normal((4, 3, 9, 9)).astype(np.float32))
    F.cross_entropy(y, np.array([0, 1, 2, 3])).backward()
    assert {arena.dtype.name for arena in model.arenas} == {"float16", "float32"}
    for name, p in model.named_parameters():
        assert p.grad is p.buffer, name
        assert np.isfinite(p.grad.astype(np.float32)).all(), name


def test_a_bottleneck_network_trains_in_any_size(rng):
    model = models.ResNet((1, 1, 1, 1), 7, stem="small", block=models.BottleneckBlock, device="cpu", precision="tf32")
    y = model(rng.standard_normal((2, 3, 9, 13)).astype(np.float32))
    assert y.shape == (2, 7)
    F.cross_entropy(y, np.array([0, 5])).backward()
    for name, p in model.named_parameters():
        assert np.abs(p.grad).max() > 0, name


def test_a_fused_bottleneck_is_the_plain_one(rng):
    x = rng.standard_normal((3, 8, 9, 7))
    for channels, stride in ((2, 1), (4, 2)):
        results = []
        for fused in (True, False):
            options = {"precision": "float64", "device": "cpu"}
            block = models.BottleneckBlock(8, channels, stride, options, nn.Draws(1), fused=fused)
            assert (block.downsample is None) == (channels == 2)
            y = block(x)
            F.scale(y, 1.0).backward(np.cos(np.arange(y.data.size)).reshape(y.shape))
            block.eval()
            gradients = {name: p.grad for name, p in block.named_parameters()}
            results.append({"y": y.data, "evaluated": block(x).data, **gradients, **block.state_dict()})
        for key, value in results[1].items():
            np.testing.assert_allclose(results[0][key], value, rtol=1e-12, atol=1e-12, err_msg=key)


def test_bad_arguments():
    with pytest.raises(ValueError, match="stem: 'cifar'"):
        models.resnet18(stem="cifar", device="cpu")
    with pytest.raises(ValueError, match="num_classes: 0"):
        models.resnet18(0, device="cpu")
    with pytest.raises(ValueError, match="in_channels: -3"):
        models.resnet18(in_channels=-3, device="cpu")
    with pytest.raises(ValueError, match="precision: 'half'"):
        models.resnet18(precision="half", device="cpu")
