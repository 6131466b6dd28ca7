"""Random depthwise convolutions, and what must come out of them."""

import numpy as np

from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem

PRECISIONS = ("float32", "tf32", "float16", "bfloat16", "float16 out:float32", "bfloat16 out:float32")
LARGE = [
    "n256 c1152 7x7 k1152 5x5 p2 g1152",
    "n128 c240 28x28 k240 5x5 p2 g240",
    "n128 c72 56x56 k72 5x5 p2 s2 g72",
    "n16 c96 56x56 k96 7x7 p3 g96",
    "n128 c384 14x14 k384 7x7 p3 g384",
    "n32 c96 112x112 k96 3x3 p1 s2 g96",
]


def random_depthwise(rng: np.random.Generator, *, square: bool, words: tuple[str, ...]) -> ConvolutionProblem:
    """A small problem of groups = channels: with a filter that has kernels of its own, or of any geometry.

    Args:
        rng: of the choice.
        square: one 3x3, 5x5 or 7x7 filter a channel, stride 1 or 2, no dilation.
        words: precisions to choose from.
    """

    def number(low, high):
        return int(rng.integers(low, high + 1))

    while True:
        rank = 2 if square or rng.random() < 0.8 else 1
        channels, batch = number(1, 40) if square else number(1, 5), number(1, 4)
        each = 1 if square else number(1, 3)
        wide = rng.random() < 0.4
        size = tuple(number(1, 6) * 4 if wide else number(1, 33) for _ in range(rank))
        if square:
            kernel = (int(rng.choice([3, 5, 7])),) * 2
            stride, dilation = (number(1, 2),) * 2, (1, 1)
        else:
            kernel, stride, dilation = (tuple(number(1, most) for _ in range(rank)) for most in (6, 3, 3))
        # also more padding than the filter reaches
        before = tuple(min(number(0, 4), 2 * r) for r in kernel)
        after = before if rng.random() < 0.5 else tuple(number(0, 4) for _ in kernel)
        line = f"{rng.choice(DIRECTIONS)} n{batch} c{channels} {_times(size)} k{channels * each} {_times(kernel)} "
        line += f"p{_times(f'{b}:{a}' for b, a in zip(before, after, strict=True))} s{_times(stride)} "
        line += f"d{_times(dilation)} g{channels} {rng.choice(words)} nchw"
        if rng.random() < 0.4:
            line += " acc"
        if rng.random() < 0.2:
            line += " align:4"
        try:
            return ConvolutionProblem.parse(line)
        except ValueError:
            # a filter that is larger than the padded image
            continue


def _times(numbers):
    return "x".join(map(str, numbers))


def exact(problem: ConvolutionProblem, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The result in float64, from float64 inputs."""
    if len(problem.stride) == 1:
        raised = ConvolutionProblem.create(
            problem.direction,
            (*problem.x_shape[:2], 1, problem.x_shape[2]),
            (*problem.w_shape[:2], 1, problem.w_shape[2]),
            padding=((0, 0), (problem.padding_before[0], problem.padding_after[0])),
            stride=(1, *problem.stride),
            dilation=(1, *problem.dilation),
            groups=problem.groups,
        )
        return exact(raised, first[:, :, None], second[:, :, None])[:, :, 0]
    (height, width), (before, left) = problem.x_shape[2:], problem.padding_before
    (step, across), (far, wide), (rows, columns) = problem.stride, problem.dilation, problem.y_shape[2:]
    kernel = problem.w_shape[2:]
    each = problem.w_shape[0] // problem.x_shape[1]
    tall = max(before + height, (rows - 1) * step + (kernel[0] - 1) * far + 1)
    broad = max(left + width, (columns - 1) * across + (kernel[1] - 1) * wide + 1)
    padded = np.zeros((problem.x_shape[0], problem.w_shape[0], tall, broad))
    inside = (slice(None), slice(None), slice(before, before + height), slice(left, left + width))
    filters = np.zeros(problem.w_shape)
    y = np.zeros(problem.y_shape)
    if problem.direction != "backward_data":
        padded[inside] = np.repeat(first, each, axis=1)
    for r in range(kernel[0]):
        for s in range(kernel[1]):
            window = (
                slice(None),
                slice(None),
                slice(r * far, r * far + (rows - 1) * step + 1, step),
                slice(s * wide, s * wide + (columns - 1) * across + 1, across),
            )
            if problem.direction == "forward":
                y += padded[window] * second[None, :, 0, r, s, None, None]
            elif problem.direction == "backward_data":
                padded[window] += first * second[None, :, 0, r, s, None, None]
            else:
                filters[:, 0, r, s] = (padded[window] * second).sum((0, 2, 3))
    if problem.direction == "forward":
        return y
    if problem.direction == "backward_filter":
        return filters
    return padded[inside].reshape(problem.x_shape[0], problem.x_shape[1], each, height, width).sum(2)
