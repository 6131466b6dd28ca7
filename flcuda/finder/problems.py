"""Named lists of Problems: the convolutions of known networks, DeepBench's, and a suite of 300; and files of Problems.

The networks are as their papers and torchvision have them; what they have in common with each other they share here.

Note [transposed convolutions]: the forward pass of a transposed convolution is the data gradient of the convolution
that it transposes, and its data gradient is that convolution's forward pass. So it stands here as that convolution, and
its three directions are the same three Problems.
"""

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem, Problem

DEFAULT_BATCH = 128


@dataclass(frozen=True, slots=True)
class _Layer:
    """One convolution of a network."""

    channels: int
    size: tuple[int, ...]
    filters: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int


@dataclass(slots=True)
class _Network:
    """A network while it is put together: its convolutions so far, and the channels and size of what the last gives."""

    channels: int
    size: tuple[int, ...]
    layers: list[_Layer] = field(default_factory=list)

    def conv(
        self,
        filters: int,
        kernel: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | None = None,
        groups: int = 1,
    ) -> None:
        """Adds a convolution; by default its padding is half the kernel, which keeps the size at a stride of 1."""
        rank = len(self.size)
        kernels = (kernel,) * rank if isinstance(kernel, int) else kernel
        strides = (stride,) * rank if isinstance(stride, int) else stride
        if padding is None:
            padding = tuple(entry // 2 for entry in kernels)
        paddings = (padding,) * rank if isinstance(padding, int) else padding
        self.layers.append(_Layer(self.channels, self.size, filters, kernels, strides, paddings, groups))
        self.channels = filters
        self.size = tuple(
            (size + 2 * padded - kernel) // step + 1
            for size, padded, kernel, step in zip(self.size, paddings, kernels, strides, strict=True)
        )

    def up(self, filters: int) -> None:
        """Adds a transposed convolution that doubles the size. See Note [transposed convolutions]."""
        rank = len(self.size)
        double = tuple(2 * size for size in self.size)
        self.layers.append(_Layer(filters, double, self.channels, (2,) * rank, (2,) * rank, (0,) * rank, 1))
        self.channels = filters
        self.size = double

    def pool(self) -> None:
        """Halves the size, as every pooling of these networks does."""
        self.size = tuple((size + 1) // 2 for size in self.size)

    def shortcut(self, channels: int, size: tuple[int, ...], stride: int) -> None:
        """Adds the projection from what a residual block got to what it gives, where these differ."""
        if channels != self.channels or stride != 1:
            given = (self.channels, self.size)
            self.channels, self.size = channels, size
            self.conv(given[0], 1, stride)


def _resnet(blocks: Sequence[int], *, bottleneck: bool = False, groups: int = 1, width: int = 64) -> _Network:
    """He et al. 2015, "Deep residual learning for image recognition", table 1, with torchvision's stride at the 3x3.

    `groups` and `width` (channels of the 3x3 for each 64 of the stage) are those of Xie et al. 2016, "Aggregated
    residual transformations for deep neural networks".
    """
    net = _Network(3, (224, 224))
    net.conv(64, 7, 2)
    net.pool()
    for stage, count in enumerate(blocks):
        filters = 64 << stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            channels, size = net.channels, net.size
            if bottleneck:
                inner = filters * width // 64
                net.conv(inner, 1)
                net.conv(inner, 3, stride, groups=groups)
                net.conv(4 * filters, 1)
            else:
                net.conv(filters, 3, stride)
                net.conv(filters, 3)
            net.shortcut(channels, size, stride)
    return net


def _r3d18() -> _Network:
    """Tran et al. 2018, "A closer look at spatiotemporal convolutions": R3D-18 on clips of 16 x 112 x 112."""
    net = _Network(3, (16, 112, 112))
    net.conv(64, (3, 7, 7), (1, 2, 2))
    for stage in range(4):
        for block in range(2):
            stride = 2 if stage > 0 and block == 0 else 1
            channels, size = net.channels, net.size
            net.conv(64 << stage, 3, stride)
            net.conv(64 << stage, 3)
            net.shortcut(channels, size, stride)
    return net


def _vgg16() -> _Network:
    """Simonyan and Zisserman 2014, "Very deep convolutional networks", configuration D."""
    net = _Network(3, (224, 224))
    for filters, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            net.conv(filters, 3)
        net.pool()
    return net


def _mobilenet_v2() -> _Network:
    """Sandler et al. 2018, "MobileNetV2: inverted residuals and linear bottlenecks", table 2."""
    net = _Network(3, (224, 224))
    net.conv(32, 3, 2)
    for factor, filters, count, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(count):
            inner = net.channels * factor
            if factor > 1:
                net.conv(inner, 1)
            net.conv(inner, 3, stride if block == 0 else 1, groups=inner)
            net.conv(filters, 1)
    net.conv(1280, 1)
    return net


def _densenet121() -> _Network:
    """Huang et al. 2016, "Densely connected convolutional networks", table 1, with a growth of 32."""
    net = _Network(3, (224, 224))
    net.conv(64, 7, 2)
    net.pool()
    for stage, count in enumerate((6, 12, 24, 16)):
        if stage > 0:
            net.conv(net.channels // 2, 1)
            net.pool()
        for _ in range(count):
            channels = net.channels
            net.conv(128, 1)
            net.conv(32, 3)
            net.channels = channels + 32
    return net


def _unet() -> _Network:
    """Ronneberger et al. 2015, "U-Net", figure 1, one channel in and two classes out.

    In the padded form that is commonly trained: the 3x3 convolutions keep the size, here of 256 x 256, where the
    paper's crop 572 x 572 to 388 x 388.
    """
    net = _Network(1, (256, 256))
    for level in range(4):
        net.conv(64 << level, 3)
        net.conv(64 << level, 3)
        net.pool()
    net.conv(1024, 3)
    net.conv(1024, 3)
    for level in reversed(range(4)):
        net.up(64 << level)
        net.channels *= 2
        net.conv(64 << level, 3)
        net.conv(64 << level, 3)
    net.conv(2, 1)
    return net


def _wav2letter() -> _Network:
    """Collobert et al. 2016, "Wav2Letter", figure 2: on the wave itself, with torchaudio's padding and its 40 classes.

    On 10 seconds at 16 kHz.
    """
    net = _Network(1, (160_000,))
    net.conv(250, 250, 160, 45)
    net.conv(250, 48, 2, 23)
    for _ in range(7):
        net.conv(250, 7)
    net.conv(2000, 32)
    net.conv(2000, 1)
    net.conv(40, 1)
    return net


_NETWORKS: dict[str, Callable[[], _Network]] = {
    "resnet18": lambda: _resnet((2, 2, 2, 2)),
    "resnet34": lambda: _resnet((3, 4, 6, 3)),
    "resnet50": lambda: _resnet((3, 4, 6, 3), bottleneck=True),
    "vgg16": _vgg16,
    "mobilenet-v2": _mobilenet_v2,
    "resnext50": lambda: _resnet((3, 4, 6, 3), bottleneck=True, groups=32, width=128),
    "densenet121": _densenet121,
    "unet": _unet,
    "wav2letter": _wav2letter,
    "r3d-18": _r3d18,
}

# The convolutions of the training set of DeepBench (Baidu Research, code/kernels/conv_problems.h): 94, some of them
# twice, here each behind the batch sizes with which it occurs.
_DEEPBENCH = """
n4,8,16,32 c1 161x700 k32 5x20 s2
n4,8,16,32 c32 79x341 k32 5x10 s2
n16 c1 48x480 k16 3x3 p1
n16 c16 24x240 k32 3x3 p1
n16 c32 12x120 k64 3x3 p1
n16 c64 6x60 k128 3x3 p1
n8 c3 108x108 k64 3x3 p1 s2
n8 c64 54x54 k64 3x3 p1
n8 c128 27x27 k128 3x3 p1
n8 c128 14x14 k256 3x3 p1
n8 c256 7x7 k512 3x3 p1
n8,16 c3 224x224 k64 3x3 p1
n8,16 c64 112x112 k128 3x3 p1
n8,16 c128 56x56 k256 3x3 p1
n8,16 c256 28x28 k512 3x3 p1
n8,16 c512 14x14 k512 3x3 p1
n8,8,16,16 c512 7x7 k512 3x3 p1
n16 c3 224x224 k64 7x7 p3 s2
n16 c192 28x28 k32 5x5 p2
n16 c192 28x28 k64 1x1
n16 c512 14x14 k48 5x5 p2
n16 c512 14x14 k192 1x1
n16 c832 7x7 k256 1x1
n16 c832 7x7 k128 5x5 p2
n8,16 c64 56x56 k64 3x3 p1
n8,16 c64 56x56 k256 1x1 s2
n8,16 c128 28x28 k128 3x3 p1
n8,16 c128 28x28 k512 1x1 s2
n8,16 c256 14x14 k256 1x1
n8,16 c256 14x14 k256 3x3 p1
n8,16 c256 14x14 k1024 1x1 s2
n8,16 c512 7x7 k512 1x1
n8,16 c2048 7x7 k512 1x1 p3 s2
n16 c1 161x700 k64 5x5 p1 s2
n16 c64 80x350 k64 3x3 p1
n16 c64 80x350 k128 5x5 p1 s2
n16 c128 40x175 k128 3x3 p1
n16 c128 40x175 k256 5x5 p1 s2
n16 c256 20x84 k256 3x3 p1
n16 c256 20x84 k512 5x5 p1 s2
n16 c512 10x42 k512 3x3 p1
n8,16 c64 112x112 k64 1x1
n8,16 c64 56x56 k256 1x1
n8,16 c256 56x56 k64 1x1
n8,16 c256 56x56 k128 1x1 s2
n8,16 c128 28x28 k512 1x1
n8,16 c512 28x28 k128 1x1
n8,16 c512 28x28 k256 1x1 s2
n8,8,16,16 c256 14x14 k1024 1x1
n8,16 c512 28x28 k1024 1x1 s2
n8,16 c1024 14x14 k256 1x1
n8,16 c1024 14x14 k512 1x1 s2
n8,16 c512 7x7 k2048 1x1
n8,16 c1024 14x14 k2048 1x1 s2
n8,16 c2048 7x7 k512 1x1
"""

# Sizes and batches such that in strict float32 the operands of each stay under 300 MB, and that an H200 takes some
# 0.03 to 1 ms at 45 TFLOP/s or 3.5 TB/s (depthwise and grouped ones at a part of that); with tensor cores less, with
# algorithms that do not suit them more.
_SUITE = """
# stems
n8 c3 224x224 k64 7x7 p3 s2
n128 c3 224x224 k32 3x3 p1 s2
n64 c3 299x299 k32 3x3 s2
n16 c3 224x224 k64 3x3 p1
n32 c3 227x227 k96 11x11 s4
n16 c1 256x256 k64 3x3 p1
n64 c3 224x224 k96 4x4 s4
n32 c3 224x224 k768 16x16 s16
n64 c3 320x320 k32 6x6 p2 s2
# 3x3
n256 c16 32x32 k16 3x3 p1
n256 c32 16x16 k32 3x3 p1
n256 c64 8x8 k64 3x3 p1
n8 c160 32x32 k160 3x3 p1
n64 c32 112x112 k32 3x3 p1
n128 c48 64x64 k48 3x3 p1
n16 c64 56x56 k64 3x3 p1
n8 c64 112x112 k128 3x3 p1
n128 c128 28x28 k128 3x3 p1
n2 c128 56x56 k256 3x3 p1
n64 c256 14x14 k256 3x3 p1
n16 c256 28x28 k512 3x3 p1
n16 c512 7x7 k512 3x3 p1
n16 c512 14x14 k512 3x3 p1
n128 c192 13x13 k384 3x3 p1
n2 c320 32x32 k320 3x3 p1
n8 c640 16x16 k640 3x3 p1
# 1x1
n128 c24 56x56 k144 1x1
n128 c144 56x56 k24 1x1
n64 c64 56x56 k256 1x1
n64 c256 56x56 k64 1x1
n64 c128 28x28 k512 1x1
n128 c512 28x28 k128 1x1
n256 c256 14x14 k1024 1x1
n64 c1024 14x14 k256 1x1
n128 c512 7x7 k2048 1x1
n256 c2048 7x7 k512 1x1
n256 c96 14x14 k576 1x1
n256 c320 7x7 k1280 1x1
n256 c480 14x14 k16 1x1
n256 c832 7x7 k128 1x1
n256 c992 14x14 k128 1x1
# strided
n128 c64 56x56 k128 3x3 p1 s2
n32 c128 28x28 k256 3x3 p1 s2
n128 c256 14x14 k512 3x3 p1 s2
n128 c128 56x56 k128 3x3 p1 s2
n16 c256 28x28 k256 3x3 p1 s2
n128 c64 56x56 k128 1x1 s2
n32 c256 56x56 k512 1x1 s2
n32 c512 28x28 k1024 1x1 s2
n64 c1024 14x14 k2048 1x1 s2
n128 c96 56x56 k192 2x2 s2
n32 c192 28x28 k384 2x2 s2
n64 c64 64x64 k128 4x4 p1 s2
n64 c288 35x35 k384 3x3 s2
n2 c320 64x64 k320 3x3 p0:1 s2
# depthwise
n64 c32 112x112 k32 3x3 p1 g32
n32 c96 112x112 k96 3x3 p1 s2 g96
n64 c144 56x56 k144 3x3 p1 g144
n128 c144 56x56 k144 3x3 p1 s2 g144
n128 c192 28x28 k192 3x3 p1 g192
n256 c384 14x14 k384 3x3 p1 g384
n256 c576 14x14 k576 3x3 p1 s2 g576
n256 c960 7x7 k960 3x3 p1 g960
n128 c72 56x56 k72 5x5 p2 s2 g72
n128 c240 28x28 k240 5x5 p2 g240
n256 c1152 7x7 k1152 5x5 p2 g1152
n16 c96 56x56 k96 7x7 p3 g96
n128 c384 14x14 k384 7x7 p3 g384
# grouped
n64 c128 56x56 k128 3x3 p1 g32
n64 c256 56x56 k256 3x3 p1 s2 g32
n128 c256 28x28 k256 3x3 p1 g32
n128 c512 28x28 k512 3x3 p1 s2 g32
n16 c1024 14x14 k1024 3x3 p1 g32
n16 c96 27x27 k256 5x5 p2 g2
n32 c224 28x28 k224 3x3 p1 g2
n64 c240 28x28 k240 1x1 g3
# odd
n253 c17 57x41 k19 5x5 p2
n253 c33 71x71 k47 3x3 p1 s2
n61 c63 31x33 k65 3x3 p1
n253 c129 28x28 k127 1x1
n125 c48 35x35 k64 5x5 p2
n4 c80 73x73 k192 3x3
n125 c100 50x50 k200 3x3 s3
n253 c128 17x17 k192 1x7 p0x3
n29 c192 17x17 k192 7x1 p3x0
n61 c448 8x8 k384 3x3 p1
n61 c32 79x341 k32 5x10 s2
# dilated
n16 c64 64x64 k64 3x3 p4 d4
n8 c128 65x65 k128 3x3 p2 d2
n128 c256 14x14 k256 3x3 p2 d2
n1 c512 28x28 k512 3x3 p2 d2
n1 c2048 33x33 k256 3x3 p6 d6
n4 c2048 33x33 k256 3x3 p12 d12
# 1-D
n2 c250 1000 k250 48 p23 s2
n32 c250 500 k250 7 p3
n32 c80 3000 k384 3 p1
n4 c384 3000 k384 3 p1 s2
n64 c128 2000 k128 3 p1
# 3-D
n16 c32 32x32x32 k32 3x3x3 p1
n1 c64 8x56x56 k144 1x3x3 p0x1x1
n8 c64 8x28x28 k64 3x3x3 p1
n128 c64 8x28x28 k128 3x3x3 p1 s2
n2 c256 4x14x14 k256 3x3x3 p1
"""

_LISTS = ("deepbench", "suite")

NAMES = (*_NETWORKS, *_LISTS)
"""What `problems` knows."""


def problems(
    name: str,
    batch: int | None = None,
    *,
    dtype: str = "float32",
    layout: str = "nchw",
    distinct: bool = True,
) -> tuple[ConvolutionProblem, ...]:
    """Returns the convolutions of a network, or of a known list, in all three directions.

    A first layer's data gradient is left out: training never needs it.

    Args:
        name: a network: "resnet18", "resnet34", "resnet50", "vgg16", "mobilenet-v2", "resnext50" (32x4d) or
            "densenet121", for images of 224 x 224 and with their ImageNet stems; "unet" in its padded form, for images
            of 256 x 256; "wav2letter", of one dimension, on 10 seconds of sound; "r3d-18", of three, for 16 frames of
            112 x 112. Or a list: "deepbench", the training set of Baidu's DeepBench, in all three directions as there;
            "suite", 300 Problems that mix stems, 3x3, 1x1, strided, depthwise, grouped, odd, dilated, one- and
            three-dimensional ones.
        batch: images; by default 128 for a network, and for "deepbench" its own. The "suite" has batches of its own
            only.
        dtype: as in `ConvolutionProblem.create`; "tf32" too.
        layout: "nchw" or "nhwc".
        distinct: each Problem once; False: as often as the network has it, so that times add up to the network's.

    Returns:
        The Problems, in the order of the network or the list.

    Raises:
        ValueError: the name is unknown, or another argument invalid.
        TypeError: the batch is no integer.
    """
    if name not in NAMES:
        raise ValueError(f"name {name!r} must be one of {', '.join(NAMES)}")
    if batch is not None:
        if name == "suite":
            raise ValueError(f"batch {batch!r}: the problems of 'suite' have batches of their own; leave it out")
        try:
            batch = operator.index(batch)
        except TypeError:
            raise TypeError(f"batch must be an integer, not {batch!r}") from None
        if batch < 1:
            raise ValueError(f"batch {batch} must be 1 or more")
    if name == "deepbench":
        found = list(_deepbench(batch, dtype, layout))
    elif name == "suite":
        found = list(_suite(dtype, layout))
    else:
        found = list(_network(_NETWORKS[name](), DEFAULT_BATCH if batch is None else batch, dtype, layout))
    return tuple(dict.fromkeys(found)) if distinct else tuple(found)


def _network(net: _Network, batch: int, dtype: str, layout: str) -> Iterator[ConvolutionProblem]:
    for index, layer in enumerate(net.layers):
        for direction in DIRECTIONS:
            if index > 0 or direction != "backward_data":
                yield ConvolutionProblem.create(
                    direction,
                    (batch, layer.channels, *layer.size),
                    (layer.filters, layer.channels // layer.groups, *layer.kernel),
                    dtype=dtype,
                    layout=layout,
                    padding=layer.padding,
                    stride=layer.stride,
                    groups=layer.groups,
                )


def _deepbench(batch: int | None, dtype: str, layout: str) -> Iterator[ConvolutionProblem]:
    for line in _DEEPBENCH.strip().split("\n"):
        batches, words = line.split(maxsplit=1)
        for own in batches[1:].split(","):
            for direction in DIRECTIONS:
                yield _parsed(f"{direction} n{own if batch is None else batch} {words}", dtype, layout)


def _suite(dtype: str, layout: str) -> Iterator[ConvolutionProblem]:
    for line in _SUITE.strip().split("\n"):
        if line.startswith("#"):
            stems = line == "# stems"
            continue
        for direction in DIRECTIONS:
            if not (stems and direction == "backward_data"):
                yield _parsed(f"{direction} {line}", dtype, layout)


def _parsed(words: str, dtype: str, layout: str) -> ConvolutionProblem:
    """Reads the words of a Problem of given dtype and layout; what is wrong with these is said as `create` says it."""
    found = ConvolutionProblem.parse(words)
    return ConvolutionProblem.create(
        found.direction,
        found.x_shape,
        found.w_shape,
        dtype=dtype,
        layout=layout,
        padding=tuple(zip(found.padding_before, found.padding_after, strict=True)),
        stride=found.stride,
        dilation=found.dilation,
        groups=found.groups,
    )


def parse_problems(line: str) -> tuple[Problem, ...]:
    """Reads a line of a Problem; of a convolution the direction may be `all`, for all three.

    Args:
        line: what `Problem.parse` understands, or such a line with `all` instead of the direction.

    Returns:
        One Problem, or the three in the order forward, backward data, backward filter.

    Raises:
        ValueError, TypeError: the line is none; the message names what is wrong.
    """
    words = line.split()
    # in a graph, all may be the name of a tensor
    if ";" in line or "all" not in words:
        return (Problem.parse(line),)
    words.remove("all")
    return tuple(Problem.parse(" ".join([direction, *words])) for direction in DIRECTIONS)


def read_problems(path: str | os.PathLike[str]) -> tuple[Problem, ...]:
    """Reads a file of Problems.

    Args:
        path: of a text file in UTF-8, one Problem a line as `parse_problems` reads it. What follows a `#` is a comment,
            empty lines mean nothing; a line that stands twice counts twice where times are added up.

    Returns:
        The Problems, in the order of the file.

    Raises:
        ValueError: a line is no Problem, the message names file and line number; the file is not text, or has none.
        OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None
    found: list[Problem] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        try:
            found += parse_problems(words)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"{path} has no problem in it: write one a line, such as 'all n128 c64 56x56 k64 3x3 p1'")
    return tuple(found)
