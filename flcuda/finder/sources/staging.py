"""Copies of operands that cuDNN cannot take as they are, made at each run: the two CUDA sources share them.

A copy is packed and may have a border of zeros. That is how padding is done that differs before and after: x gets the
difference as a border, dx is computed with it and then cropped.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda.finder.problem import ConvolutionProblem, same_strides

ALIGNMENT = 16
"""Bytes to which a copy is aligned, at least; what is aligned to fewer is copied where kernels load such vectors."""

BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned dtypes by size in bytes: copying does not look at the values."""

Borders = tuple[tuple[int, int], ...]


def split_padding(problem: ConvolutionProblem) -> tuple[tuple[int, ...], Borders]:
    """Splits the padding of a Problem into what cuDNN does and what a copy of x or dx must have.

    Args:
        problem: any ConvolutionProblem.

    Returns:
        The padding that both sides have in common, one number a spatial dimension; and the rest, before and after each.
    """
    common = tuple(min(pair) for pair in zip(problem.padding_before, problem.padding_after, strict=True))
    borders = tuple(
        (before - both, after - both)
        for before, after, both in zip(problem.padding_before, problem.padding_after, common, strict=True)
    )
    return common, borders


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand as cuDNN gets it.

    Attributes:
        name: x, w, y or a gradient.
        shape: (N, C, height, width) or of another rank; padded where ``inside`` leaves a border.
        strides: in elements.
        dtype: its word.
        staged: it is a packed copy.
        inside: the part of the staged copy that holds the operand; the rest is zeros.
        raised: the Problem's operand is 1-D and has no height.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    staged: bool
    inside: tuple[slice, ...]
    raised: bool

    @classmethod
    def create(
        cls,
        problem: ConvolutionProblem,
        name: str,
        *,
        borders: Borders | None = None,
        layout: str,
        packed: bool = False,
        alignment: int = 1,
        raised: bool = False,
    ) -> "Operand":
        """Works out one operand. Nothing is allocated.

        Args:
            problem: the Problem.
            name: the operand's name.
            borders: zeros to put around it, before and after each spatial dimension; None for none.
            layout: in which it is packed if it is copied.
            packed: whether it must be packed in that layout.
            alignment: bytes; what is aligned to fewer is copied.
            raised: whether a height of 1 is put in.

        Returns:
            The operand; staged when it has a border, or is not packed or aligned as it must be.
        """
        shape, strides = problem.shape_of(name), problem.strides_of(name)
        borders = ((0, 0),) * (len(shape) - 2) if borders is None else borders
        inside = (
            slice(0, shape[0]),
            slice(0, shape[1]),
            *(slice(before, before + size) for (before, _), size in zip(borders, shape[2:], strict=True)),
        )
        staged = (
            any(before or after for before, after in borders)
            or problem.alignment_of(name) < alignment
            or (packed and not same_strides(shape, strides, devices.contiguous_strides(shape, layout)))
        )
        if staged:
            shape = (
                *shape[:2],
                *(before + size + after for (before, after), size in zip(borders, shape[2:], strict=True)),
            )
        if staged or packed:
            strides = devices.contiguous_strides(shape, layout)
        if raised:
            strides = (*strides[:2], shape[2] * strides[2], strides[2])
            shape = (*shape[:2], 1, shape[2])
            inside = (*inside[:2], slice(0, 1), inside[2])
        return cls(name, shape, strides, problem.dtype_of(name), staged, inside, raised)

    @property
    def bordered(self) -> bool:
        """Whether the copy holds more than the operand."""
        return any(part.stop - part.start != size for part, size in zip(self.inside, self.shape, strict=True))

    @property
    def extent(self) -> int:
        """How many elements of memory it spans."""
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the staged copy; 0 when there is none."""
        return math.prod(self.shape) * devices.DTYPES[self.dtype].itemsize if self.staged else 0

    def copy_in(self, array: Any, memory: Any = None) -> Any:
        """Makes the staged copy of an input, or of an output that is added to.

        Args:
            array: the operand.
            memory: as for `empty`.

        Returns:
            The copy, as unsigned integers.
        """
        copy = self.empty(memory)
        if self.bordered:
            copy[...] = 0
        copy[self.inside] = self._bits(array)
        return copy

    def copy_out(self, copy: Any, array: Any) -> None:
        """Writes a staged output back."""
        self._bits(array)[...] = copy[self.inside]

    def empty(self, memory: Any = None) -> Any:
        """Makes the staged copy without values.

        Args:
            memory: a uint8 array of at least `nbytes` that it is put into; by default it is allocated.

        Returns:
            It, as unsigned integers of the dtype's size.
        """
        bits = BITS[devices.DTYPES[self.dtype].itemsize]
        order = sorted(range(len(self.shape)), key=lambda dim: (-self.strides[dim], dim))
        shape = tuple(self.shape[dim] for dim in order)
        packed = (
            devices.cupy().empty(shape, bits) if memory is None else memory[: self.nbytes].view(bits).reshape(shape)
        )
        return packed.transpose(tuple(order.index(dim) for dim in range(len(order))))

    def _bits(self, array: Any) -> Any:
        raised = array[:, :, None] if self.raised else array
        return raised.view(BITS[array.dtype.itemsize])
