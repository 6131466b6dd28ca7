"""The networks that benchmarks of a training step take."""

from collections.abc import Callable
from typing import Any

from flcuda import functional as F
from flcuda import nn
from flcuda.autograd import Tensor
from flcuda.models import BasicBlock, resnet18, resnet34


class Tiny(nn.Module):
    """A network of every kind of layer that a ResNet has, for trials on the CPU."""

    def __init__(self, num_classes: int, *, precision: str, device: Any, seed: int = 0) -> None:
        options = {"precision": precision, "device": device}
        draws = nn.Draws(seed)
        self.conv1 = nn.Conv2D(3, 4, 3, 1, 1, bias=False, seed=draws, init=nn.fan_out_normal, **options)
        self.bn1 = nn.BatchNorm2D(4, **options)
        self.maxpool = nn.MaxPool2D(3, 2, 1)
        self.block = BasicBlock(4, 8, 2, options, draws)
        self.fc = nn.Linear(8, num_classes, seed=draws, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        return self.fc(F.global_avg_pool2d(self.block(x)))


NETWORKS: dict[str, Callable[..., nn.Module]] = {"resnet34": resnet34, "resnet18": resnet18, "tiny": Tiny}
CLASSES = {"resnet34": 1000, "resnet18": 1000, "tiny": 10}


def network(name: str, *, precision: str, device: Any) -> nn.Module:
    """Makes a network of NETWORKS, in training mode."""
    return NETWORKS[name](num_classes=CLASSES[name], precision=precision, device=device, seed=0)
