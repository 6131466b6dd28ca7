"""torchvision's ResNet-18 and ResNet-34 in plain torch, with its keys, for machines without torchvision."""

import torch
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + shortcut)


class ResNet(nn.Module):
    def __init__(self, blocks: tuple[int, ...], num_classes: int, in_channels: int, stem: str) -> None:
        super().__init__()
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = nn.Conv2d(in_channels, 64, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        channels = 64
        for stage, count in enumerate(blocks):
            out_channels = 64 << stage
            parts = [BasicBlock(channels, out_channels, 1 if stage == 0 else 2)]
            parts += [BasicBlock(out_channels, out_channels, 1) for _ in range(count - 1)]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*parts))
            channels = out_channels
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


def resnet18(num_classes: int = 1000, in_channels: int = 3, stem: str = "imagenet") -> ResNet:
    return ResNet((2, 2, 2, 2), num_classes, in_channels, stem)


def resnet34(num_classes: int = 1000, in_channels: int = 3, stem: str = "imagenet") -> ResNet:
    return ResNet((3, 4, 6, 3), num_classes, in_channels, stem)


def load(model: nn.Module, state: dict[str, object]) -> nn.Module:
    """Gives a model the arrays of a flcuda state dict; every key must fit."""
    model.load_state_dict({key: torch.as_tensor(value) for key, value in state.items()})
    return model
