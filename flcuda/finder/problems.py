"""Named sets of Problems: the convolutions of known networks."""

from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem

# channels, size, filters, kernel, stride, padding of each distinct convolution, for images of 224 x 224, in the order
# of the network. ResNet-18 and ResNet-34 differ in how often these occur, not in which there are (He et al. 2015,
# table 1).
_RESNET = (
    (3, 224, 64, 7, 2, 3),
    (64, 56, 64, 3, 1, 1),
    (64, 56, 128, 3, 2, 1),
    (128, 28, 128, 3, 1, 1),
    (64, 56, 128, 1, 2, 0),
    (128, 28, 256, 3, 2, 1),
    (256, 14, 256, 3, 1, 1),
    (128, 28, 256, 1, 2, 0),
    (256, 14, 512, 3, 2, 1),
    (512, 7, 512, 3, 1, 1),
    (256, 14, 512, 1, 2, 0),
)
_NETWORKS = {"resnet18": _RESNET, "resnet34": _RESNET}


def problems(
    name: str, batch: int = 128, *, dtype: str = "float32", layout: str = "nchw"
) -> tuple[ConvolutionProblem, ...]:
    """Returns the distinct convolutions of a network in all three directions.

    The first layer's data gradient is left out: training never needs it.

    Args:
        name: "resnet18" or "resnet34", with the ImageNet stem, for images of 224 x 224.
        batch: images.
        dtype: as in `ConvolutionProblem.create`; "tf32" too.
        layout: "nchw" or "nhwc".

    Returns:
        The Problems, in the order of the network.

    Raises:
        ValueError: the name is unknown, or another argument invalid.
    """
    if name not in _NETWORKS:
        raise ValueError(f"name {name!r} must be one of {', '.join(_NETWORKS)}")
    return tuple(
        ConvolutionProblem.create(
            direction,
            (batch, channels, size, size),
            (filters, channels, kernel, kernel),
            dtype=dtype,
            layout=layout,
            padding=padding,
            stride=stride,
        )
        for index, (channels, size, filters, kernel, stride, padding) in enumerate(_NETWORKS[name])
        for direction in DIRECTIONS
        if index > 0 or direction != "backward_data"
    )
