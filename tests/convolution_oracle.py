"""What the convolutions of a GPU are compared with: the same in float64 on the CPU, and how far off each may be."""

import numpy as np

from flcuda import device as devices
from flcuda.finder.problem import ConvolutionProblem
from flcuda.finder.sources.reference import Columns

# Of the largest sum of magnitudes.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "tf32": 1.5e-3, "float16": 3e-3, "bfloat16": 1.6e-2}
BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(array):
    return array.view(BITS[array.dtype.itemsize])


def host(array):
    """The numbers in float64; moved as bits, so that no conversion on the device is trusted."""
    return devices.cupy().asnumpy(bits(array)).view(array.dtype).astype(np.float64)


def exact(problem, arrays):
    """The result and the sum of the magnitudes in float64."""
    wide = ConvolutionProblem.create(
        problem.direction,
        problem.x_shape,
        problem.w_shape,
        dtype="float64",
        padding=tuple(zip(problem.padding_before, problem.padding_after, strict=True)),
        stride=problem.stride,
        dilation=problem.dilation,
        groups=problem.groups,
    )
    algo = "col2im" if problem.direction == "backward_data" else "im2col"
    results = []
    for of in (np.asarray, np.abs):
        out = np.empty(wide.shape_of(wide.operands[2]))
        Columns(wide, algo, 8 << 20)(*(of(host(arrays[name])) for name in problem.operands[:2]), out)
        results.append(out)
    return results
