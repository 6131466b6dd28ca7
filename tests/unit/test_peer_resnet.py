"""The CPU device against PyTorch's CPU: a ResNet's logits, loss, every gradient, and three SGD steps, in float64."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch_resnet  # noqa: E402

from flcuda import finder, models, nn, optim  # noqa: E402
from flcuda import functional as F  # noqa: E402
from flcuda.autograd import Tensor  # noqa: E402

pytestmark = pytest.mark.peer

TOLERANCE = 1e-9


def error(ours: np.ndarray, theirs: "torch.Tensor") -> float:
    """The relative error in the norm of the whole array."""
    oracle = theirs.detach().numpy()
    scale = np.linalg.norm(oracle)
    return float(np.linalg.norm(ours - oracle) / (scale if scale else 1.0))


def compare_training(ours, theirs, x, target, *, lr, momentum, nesterov, weight_decay, smoothing, ignore) -> None:
    optimizer = optim.SGD(ours, lr, momentum, nesterov, weight_decay)
    peer = torch.optim.SGD(theirs.parameters(), lr, momentum, nesterov=nesterov, weight_decay=weight_decay)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, ignore_index=ignore)
    for step in range(3):
        optimizer.zero_grad()
        peer.zero_grad()
        logits = ours(x)
        loss = F.cross_entropy(logits, target, label_smoothing=smoothing, ignore_index=ignore)
        loss.backward()
        their_logits = theirs(torch.from_numpy(x))
        their_loss = criterion(their_logits, torch.from_numpy(target))
        their_loss.backward()
        assert error(logits.data, their_logits) < TOLERANCE, step
        assert error(loss.data, their_loss) < TOLERANCE, step
        gradients = dict(theirs.named_parameters())
        assert list(gradients) == [name for name, _ in ours.named_parameters()]
        for name, p in ours.named_parameters():
            assert error(p.grad, gradients[name].grad) < TOLERANCE, (step, name)
        optimizer.step()
        peer.step()
    states = ours.state_dict(), theirs.state_dict()
    assert list(states[0]) == list(states[1])
    for key, value in states[0].items():
        assert error(value, states[1][key]) < TOLERANCE, key
    ours.eval()
    theirs.eval()
    with torch.no_grad():
        assert error(ours(x).data, theirs(torch.from_numpy(x))) < TOLERANCE


@pytest.mark.parametrize("block", ["BasicBlock", "BottleneckBlock"])
@pytest.mark.parametrize(("stem", "size"), [("small", (11, 8)), ("imagenet", (40, 33))])
def test_a_small_resnet(rng, stem, size, block):
    with finder.policy(mode="heuristic"):
        options = {"block": getattr(models, block), "precision": "float64", "device": "cpu", "seed": 3}
        ours = models.ResNet((1, 1, 1, 1), 10, 3, stem, **options)
        theirs = torch_resnet.ResNet((1, 1, 1, 1), 10, 3, stem, getattr(torch_resnet, block)).double()
        torch_resnet.load(theirs, ours.state_dict())
        target = rng.integers(0, 10, 4)
        target[1] = 255
        options = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3, "smoothing": 0.1, "ignore": 255}
        compare_training(ours, theirs, rng.standard_normal((4, 3, *size)), target, **options)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # torch's, about its speed
def test_other_layers(rng):
    """Groups, dilation, transposed convolution with output padding, pools, cumulative statistics."""
    options = {"precision": "float64", "device": "cpu"}
    draws = nn.Draws(1)
    ours = nn.Sequential(
        nn.Conv2D(4, 6, (3, 2), (2, 1), (1, 2), groups=2, bias=False, seed=draws, **options),
        nn.BatchNorm2D(6, 1e-3, None, **options),
        nn.ReLU(),
        nn.ConvTranspose2D(6, 4, 3, (3, 2), 1, (2, 1), groups=2, dilation=(1, 2), seed=draws, **options),
        nn.MaxPool2D(3, 2, 1),
        nn.AvgPool2D((3, 2), 1, 1),
        nn.Conv2D(4, 4, 2, padding="same", dilation=3, seed=draws, **options),
        nn.Flatten(),
    )
    x = rng.standard_normal((3, 4, 7, 6))
    features = ours(x).shape[1]
    ours.discard_statistics()
    ours.fc = nn.Linear(features, 5, seed=draws, **options)
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), groups=2, bias=False),
        torch.nn.BatchNorm2d(6, 1e-3, None),
        torch.nn.ReLU(),
        torch.nn.ConvTranspose2d(6, 4, 3, (3, 2), 1, (2, 1), groups=2, dilation=(1, 2)),
        torch.nn.MaxPool2d(3, 2, 1),
        torch.nn.AvgPool2d((3, 2), 1, 1),
        torch.nn.Conv2d(4, 4, 2, padding="same", dilation=3),
        torch.nn.Flatten(),
    )
    theirs.add_module("fc", torch.nn.Linear(features, 5))
    torch_resnet.load(theirs.double(), ours.state_dict())
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": False, "weight_decay": 0.01, "smoothing": 0.0, "ignore": -100}
    compare_training(ours, theirs, x, rng.integers(0, 5, 3), **options)


def test_default_initial_values_have_pytorchs_bounds():
    for ours, theirs in (
        (nn.Conv2D(8, 12, (3, 5), groups=4, device="cpu", seed=0), torch.nn.Conv2d(8, 12, (3, 5), groups=4)),
        (nn.ConvTranspose2D(8, 12, 3, groups=4, device="cpu", seed=0), torch.nn.ConvTranspose2d(8, 12, 3, groups=4)),
        (nn.Linear(30, 40, device="cpu", seed=0), torch.nn.Linear(30, 40)),
    ):
        fan_in, _ = torch.nn.init._calculate_fan_in_and_fan_out(theirs.weight)
        assert ours.weight.shape == tuple(theirs.weight.shape)
        assert 0.9 / math.sqrt(fan_in) < abs(ours.weight.data).max() <= 1 / math.sqrt(fan_in)
        assert abs(ours.bias.data).max() <= 1 / math.sqrt(fan_in)
        assert abs(theirs.weight).max() <= 1 / math.sqrt(fan_in) + 1e-7


def test_torch_tensors_come_in(rng):
    """Images, labels, state dicts and losses' gradients of torch go straight in through DLPack."""
    theirs = torch_resnet.ResNet((1, 1, 1, 1), 10, 3, "small")
    with finder.policy(mode="heuristic"):
        ours = models.ResNet((1, 1, 1, 1), 10, 3, "small", device="cpu")
        assert ours.load_state_dict(theirs.state_dict()) == ((), ())
        x, target = torch.randn(2, 3, 6, 6), torch.tensor([1, 2])
        loss = F.cross_entropy(ours(x), target)
    np.testing.assert_allclose(
        float(loss), float(torch.nn.functional.cross_entropy(theirs(x), target).detach()), rtol=1e-4
    )
    assert isinstance(F.relu(Tensor(x)).data, np.ndarray)
