"""torchvision's ResNet-18, ResNet-34 and ResNet-50 in plain torch, with its keys, for machines without torchvision."""

import torch
from torch import nn


class BasicBlock(nn.Module):
    expansion = 1

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


class BottleneckBlock(nn.Module):
    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.downsample = None
        if stride != 1 or in_channels != 4 * channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, 4 * channels, 1, stride, bias=False), nn.BatchNorm2d(4 * channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + shortcut)


class ResNet(nn.Module):
    def __init__(
        self,
        blocks: tuple[int, ...],
        num_classes: int,
        in_channels: int,
        stem: str,
        block: type[BasicBlock] | type[BottleneckBlock] = BasicBlock,
    ) -> None:
        super().__init__()
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = nn.Conv2d(in_channels, 64, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        channels = 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            parts = [block(channels, width, 1 if stage == 0 else 2)]
            channels = block.expansion * width
            parts += [block(channels, width, 1) for _ in range(count - 1)]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*parts))
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


def resnet18(num_classes: int = 1000, in_channels: int = 3, stem: str = "imagenet") -> ResNet:
    return ResNet((2, 2, 2, 2), num_classes, in_channels, stem)


def resnet34(num_classes: int = 1000, in_channels: int = 3, stem: str = "imagenet") -> ResNet:
    return ResNet((3, 4, 6, 3), num_classes, in_channels, stem)


def resnet50(num_classes: int = 1000, in_channels: int = 3, stem: str = "imagenet") -> ResNet:
    return ResNet((3, 4, 6, 3), num_classes, in_channels, stem, BottleneckBlock)


def load(model: nn.Module, state: dict[str, object]) -> nn.Module:
    """Gives a model the arrays of a flcuda state dict; every key must fit."""
    model.load_state_dict({key: torch.as_tensor(value) for key, value in state.items()})
    return model
