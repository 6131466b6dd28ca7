"""Residual networks with torchvision's structure, keys and initial values.

Source: He, Zhang, Ren and Sun 2015, "Deep residual learning for image recognition", table 1 (18, 34 and 50 layers),
the last with the stride at its 3x3 convolutions, as torchvision and others have it ("v1.5"), not at the 1x1 before.
"""

from typing import Any, ClassVar, Literal

from flcuda import device as devices
from flcuda import functional as F
from flcuda import nn
from flcuda.autograd import Tensor
from flcuda.device import Device
from flcuda.ops.preparation import prepare_step

Stem = Literal["imagenet", "small"]


def _norm_relu(layer: nn.BatchNorm2D, x: Tensor) -> Tensor:
    """Batch norm and ReLU in one pass."""
    return F.batch_norm(layer.precision.enter(x), layer.state(), training=layer.training, activation="relu")


def _norm_add_relu(layer: nn.BatchNorm2D, y: Tensor, x: Tensor, downsample: nn.Sequential | None) -> Tensor:
    """The end of a block in one pass: batch norm of y, the shortcut of x with its own batch norm, the sum, ReLU."""
    shortcut, shortcut_bn = x, None
    if downsample is not None:
        convolution, norm = downsample
        # Of one that is frozen alone the statistics are others.
        if isinstance(norm, nn.BatchNorm2D) and norm.training == layer.training:
            shortcut, shortcut_bn = norm.precision.enter(convolution(x)), norm.state()
        else:
            shortcut = downsample(x)
    return F.batch_norm(
        layer.precision.enter(y),
        layer.state(),
        training=layer.training,
        residual=shortcut,
        residual_bn=shortcut_bn,
        activation="relu",
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut around them.

    Args:
        in_channels: C of the input.
        out_channels: C of the output.
        stride: of the first convolution and the shortcut; the shortcut is a 1x1 convolution where the shape changes.
        options: precision and device, for every layer.
        draws: the initial values.
        fused: compute each batch norm and what follows it in one pass, not one after the other.
    """

    expansion: ClassVar[int] = 1

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        options: dict[str, Any],
        draws: nn.Draws,
        fused: bool = True,
    ) -> None:
        self.fused = fused
        convolution: dict[str, Any] = {"bias": False, "seed": draws, "init": nn.fan_out_normal, **options}
        self.conv1 = nn.Conv2D(in_channels, out_channels, 3, stride, 1, **convolution)
        self.bn1 = nn.BatchNorm2D(out_channels, **options)
        self.conv2 = nn.Conv2D(out_channels, out_channels, 3, 1, 1, **convolution)
        self.bn2 = nn.BatchNorm2D(out_channels, **options)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2D(in_channels, out_channels, 1, stride, **convolution), nn.BatchNorm2D(out_channels, **options)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Computes (N, out_channels, H / stride, W / stride), rounded up."""
        if self.fused:
            y = self.conv2(_norm_relu(self.bn1, self.conv1(x)))
            return _norm_add_relu(self.bn2, y, x, self.downsample)
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(F.add(y, shortcut))


class BottleneckBlock(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution with batch norm, the 3x3 of fewer channels, and a shortcut around them.

    Args:
        in_channels: C of the input.
        channels: of the first two convolutions; the last has four times as many.
        stride: of the 3x3 convolution and the shortcut; the shortcut is a 1x1 convolution where the shape changes.
        options: precision and device, for every layer.
        draws: the initial values.
        fused: compute each batch norm and what follows it in one pass, not one after the other.
    """

    expansion: ClassVar[int] = 4

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        options: dict[str, Any],
        draws: nn.Draws,
        fused: bool = True,
    ) -> None:
        self.fused = fused
        convolution: dict[str, Any] = {"bias": False, "seed": draws, "init": nn.fan_out_normal, **options}
        out_channels = self.expansion * channels
        self.conv1 = nn.Conv2D(in_channels, channels, 1, **convolution)
        self.bn1 = nn.BatchNorm2D(channels, **options)
        self.conv2 = nn.Conv2D(channels, channels, 3, stride, 1, **convolution)
        self.bn2 = nn.BatchNorm2D(channels, **options)
        self.conv3 = nn.Conv2D(channels, out_channels, 1, **convolution)
        self.bn3 = nn.BatchNorm2D(out_channels, **options)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2D(in_channels, out_channels, 1, stride, **convolution), nn.BatchNorm2D(out_channels, **options)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Computes (N, 4 * channels, H / stride, W / stride), rounded up."""
        if self.fused:
            y = self.conv2(_norm_relu(self.bn1, self.conv1(x)))
            y = self.conv3(_norm_relu(self.bn2, y))
            return _norm_add_relu(self.bn3, y, x, self.downsample)
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(F.add(self.bn3(self.conv3(y)), shortcut))


class ResNet(nn.Module):
    """A residual network.

    On CUDA threads begin to compile what a training step launches, unless CuPy's cache has it.

    Args:
        blocks: how many in each of the four stages.
        num_classes: of the last layer.
        in_channels: of the images.
        stem: "imagenet" is a 7x7 convolution of stride 2 and a max pool; "small" a 3x3 one of stride 1, for images of
            some 32 pixels.
        block: what it is made of.
        fused: compute each batch norm and what follows it in one pass, not one after the other: the same, but for the
            roundings between.
        precision: see Note [precision] in flcuda.nn.
        device: where it is; None is CUDA when available.
        seed: of the initial values; None for one from the operating system.

    Raises:
        ValueError: an argument is out of range; names it and its value.
        TypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        num_classes: int = 1000,
        in_channels: int = 3,
        stem: Stem = "imagenet",
        *,
        block: type[BasicBlock] | type[BottleneckBlock] = BasicBlock,
        fused: bool = True,
        precision: str = "float32",
        device: str | Device | None = None,
        seed: int | None = 0,
    ) -> None:
        if stem not in ("imagenet", "small"):
            raise ValueError(f'stem: {stem!r} is neither "imagenet" nor "small"')
        F.count("num_classes", num_classes)
        options: dict[str, Any] = {"precision": precision, "device": device}
        draws = nn.Draws(seed)
        self.fused = fused
        if fused:
            words = nn.precision_of(precision)
            prepare_step(words.dtype, words.layout, devices.resolve(device), pooled=stem == "imagenet")
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = nn.Conv2D(
            in_channels, 64, kernel, stride, kernel // 2, bias=False, seed=draws, init=nn.fan_out_normal, **options
        )
        self.bn1 = nn.BatchNorm2D(64, **options)
        self.maxpool = nn.MaxPool2D(3, 2, 1) if stem == "imagenet" else None
        stages = []
        channels = 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            first = block(channels, width, 1 if stage == 0 else 2, options, draws, fused)
            channels = block.expansion * width
            rest = [block(channels, width, 1, options, draws, fused) for _ in range(count - 1)]
            stages.append(nn.Sequential(first, *rest))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, num_classes, seed=draws, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the logits.

        Args:
            x: (N, in_channels, H, W), floating, of any size and layout.

        Returns:
            (N, num_classes), in the model's precision.
        """
        x = self.conv1(x)
        if not self.fused:
            x = F.relu(self.bn1(x))
            x = x if self.maxpool is None else self.maxpool(x)
        elif self.maxpool is None:
            x = _norm_relu(self.bn1, x)
        else:
            x = F.batch_norm_relu_max_pool2d(
                self.bn1.precision.enter(x), self.bn1.state(), **self.maxpool.window, training=self.bn1.training
            )
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.global_avg_pool2d(x))


def resnet18(
    num_classes: int = 1000,
    in_channels: int = 3,
    stem: Stem = "imagenet",
    precision: str = "float32",
    device: str | Device | None = None,
    seed: int | None = 0,
) -> ResNet:
    """Makes a ResNet-18; see ResNet for the arguments.

    Returns:
        The model, in training mode.
    """
    return ResNet((2, 2, 2, 2), num_classes, in_channels, stem, precision=precision, device=device, seed=seed)


def resnet34(
    num_classes: int = 1000,
    in_channels: int = 3,
    stem: Stem = "imagenet",
    precision: str = "float32",
    device: str | Device | None = None,
    seed: int | None = 0,
) -> ResNet:
    """Makes a ResNet-34: 21,797,672 parameters in 110 tensors at 1000 classes; see ResNet for the arguments.

    Returns:
        The model, in training mode.
    """
    return ResNet((3, 4, 6, 3), num_classes, in_channels, stem, precision=precision, device=device, seed=seed)


def resnet50(
    num_classes: int = 1000,
    in_channels: int = 3,
    stem: Stem = "imagenet",
    precision: str = "float32",
    device: str | Device | None = None,
    seed: int | None = 0,
) -> ResNet:
    """Makes a ResNet-50: 25,557,032 parameters in 161 tensors at 1000 classes; see ResNet for the arguments.

    Returns:
        The model, in training mode.
    """
    return ResNet(
        (3, 4, 6, 3),
        num_classes,
        in_channels,
        stem,
        block=BottleneckBlock,
        precision=precision,
        device=device,
        seed=seed,
    )
