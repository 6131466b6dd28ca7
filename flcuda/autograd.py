"""Reverse-mode differentiation: Tensor, Function, no_grad.

A Function works on NumPy or CuPy arrays and keeps on itself what its backward needs. The graph holds Functions only: an
edge leads to the Function that made an input, or to a leaf Tensor, never to an intermediate Tensor, so an activation
lives no longer than somebody needs its array.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from flcuda import device as devices
from flcuda.device import DTYPES, Array, Device
from flcuda.errors import FlcudaError
from flcuda.ops import elementwise

_recording: ContextVar[bool] = ContextVar("flcuda_recording", default=True)


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Records nothing for backward inside a ``with``, in this thread or task only."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


class GradTarget(NamedTuple):
    """Where a backward may write a parameter's gradient itself: ``=`` or, with accumulate, ``+=``."""

    array: Array
    accumulate: bool


class Tensor:
    """An array that gradients can flow through.

    Args:
        data: a NumPy or CuPy array, or another array with ``__dlpack__``; shared, not copied.
        requires_grad: a leaf that receives a gradient in ``grad``.

    Raises:
        TypeError: data is no array, or requires_grad is asked for a dtype that is not floating.
    """

    __slots__ = ("__weakref__", "_node", "data", "grad", "requires_grad")

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        self.data: Array = data if isinstance(data, np.generic) else devices.asarray(data, "data")
        if requires_grad and self.data.dtype.name not in DTYPES:
            raise TypeError(
                f"requires_grad: a Tensor of {self.data.dtype.name} has no gradient; one of {list(DTYPES)} has"
            )
        self.requires_grad = requires_grad
        self.grad: Array | None = None
        self._node: Function | None = None
        if requires_grad and devices.recordings:
            devices.made(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype; bfloat16 is ml_dtypes.bfloat16."""
        dtype: np.dtype[Any] = self.data.dtype
        return dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return int(self.data.ndim)

    @property
    def device(self) -> Device:
        """Where the data is."""
        return devices.device_of(self.data)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Gives the data in host memory; waits for the device, and is the array itself for the CPU."""
        return self.data.get() if devices.is_cuda(self.data) else np.asarray(self.data)

    def item(self) -> float | int:
        """Gives the one element as a Python number; waits for the device."""
        return self.data.item()  # type: ignore[no-any-return]

    def __float__(self) -> float:
        return float(self.data.item())

    def __repr__(self) -> str:
        made_by = f", made by {type(self._node).__name__}" if self._node is not None else ""
        leaf = ", requires_grad=True" if self.requires_grad and self._node is None else ""
        return f"{type(self).__name__}(shape={self.shape}, {self.dtype.name}, {self.device}{leaf}{made_by})"

    if TYPE_CHECKING:  # attached by flcuda.functional, which has the Functions
        __add__: ClassVar[Any]
        __sub__: ClassVar[Any]
        __mul__: ClassVar[Any]
        __rmul__: ClassVar[Any]
        __truediv__: ClassVar[Any]
        __neg__: ClassVar[Any]

    def target(self) -> GradTarget | None:
        """Gives the array into which a backward may write this leaf's gradient; a plain Tensor has none."""
        return None

    def receive(self, grad: Array) -> None:
        """Takes a gradient: the first is copied, later ones are added.

        Args:
            grad: like data; borrowed. Another leaf may be given the same array, so ``grad`` is always one of our own.
        """
        devices.touch(self)
        self.grad = elementwise.cast(grad, grad.dtype) if self.grad is None else elementwise.add(self.grad, grad)

    def host_state(self) -> tuple[Any, ...]:
        """Gives whether there is a gradient, and which; see Note [host state] in flcuda.device."""
        return (self.grad,)

    def set_host_state(self, state: tuple[Any, ...]) -> None:
        """Sets the gradient."""
        (self.grad,) = state

    def backward(self, grad: Array | None = None) -> None:
        """Adds to the ``grad`` of every leaf that requires one, and frees the graph on the way.

        Args:
            grad: the gradient with respect to this tensor, like data; None is 1 for a tensor of one element.

        Raises:
            ValueError: grad is missing for more than one element, or has another shape.
            TypeError: grad has another dtype, or its kind of array is another.
            FlcudaError: nothing here requires a gradient, or the graph was freed by an earlier backward.
        """
        if not self.requires_grad:
            raise FlcudaError(
                "backward: this tensor does not depend on anything with requires_grad (or came from no_grad)"
            )
        if grad is None:
            if self.data.size != 1:
                raise ValueError(f"grad: is needed, because this tensor has shape {self.shape} and not one element")
            grad = devices.array_module(self.data).ones(self.shape, self.dtype)
        if tuple(grad.shape) != self.shape:
            raise ValueError(f"grad: shape {tuple(grad.shape)} is not the tensor's {self.shape}")
        if grad.dtype != self.dtype:
            raise TypeError(f"grad: {grad.dtype.name} is not the tensor's {self.dtype.name}")
        devices.array_module(self.data, grad)
        if self._node is None:
            self.receive(grad)
        else:
            # Overflow is no accident here: a loss scaler looks for it. CUDA says nothing either.
            with np.errstate(over="ignore", invalid="ignore"):
                _walk(self._node, grad)


class Function:
    """One operation with its derivative; a subclass has forward and backward over arrays.

    Attributes:
        needs_grad: for each input, whether backward is asked for its gradient.
        targets: for each input, a place where backward may write that gradient. A backward that does so returns
            ``target.array`` itself; one that returns another array has it copied or added by the engine. Set for
            backward only.
        parents: for each input, the Function that made it, the leaf, or None; None altogether when the graph was freed.
        several_gradients: backward takes all gradients of the result that came in, one or more, and adds them itself;
            else the engine adds them before.
    """

    several_gradients: ClassVar[bool] = False
    needs_grad: tuple[bool, ...] = ()
    targets: tuple[GradTarget | None, ...] = ()
    parents: "tuple[Function | Tensor | None, ...] | None" = None

    @classmethod
    def apply(cls, *tensors: Tensor | None, **options: Any) -> Tensor:
        """Runs forward and records the operation if a gradient will be wanted.

        Args:
            *tensors: the inputs; None stays None.
            **options: passed to forward.

        Returns:
            The result.
        """
        node = cls()
        recording = _recording.get()
        node.needs_grad = tuple([recording and t is not None and t.requires_grad for t in tensors])
        return result(node.forward(*[None if t is None else t.data for t in tensors], **options), node, *tensors)

    def forward(self, *args: Any, **kwargs: Any) -> Array:
        """Computes the result; what backward needs is kept on self."""
        raise NotImplementedError

    def backward(self, *grads: Array) -> tuple[Array | None, ...]:
        """Computes one gradient an input; None where needs_grad is false.

        Args:
            *grads: the gradient of the result; with several_gradients one or more, whose sum is meant.
        """
        raise NotImplementedError


def is_recording() -> bool:
    """Says whether operations are recorded for backward here: not inside ``no_grad``."""
    return _recording.get()


def result(data: Array, node: Function, *tensors: Tensor | None) -> Tensor:
    """Makes the Tensor of a result, and records the operation if a gradient will be wanted.

    Args:
        data: the array, of ours.
        node: the operation, with its ``needs_grad``.
        *tensors: its inputs.

    Returns:
        The Tensor.
    """
    # Not by __init__, which checks what comes from outside.
    out = Tensor.__new__(Tensor)
    out.data = data
    out.grad = None
    needs_grad = node.needs_grad
    if True in needs_grad:
        parents: list[Function | Tensor | None] = []
        for t, needed in zip(tensors, needs_grad):  # noqa: B905 -- to say so takes a quarter of the time
            parents.append((t._node or t) if needed and t is not None else None)
        node.parents = tuple(parents)
        out._node = node
        out.requires_grad = True
    else:
        out._node = None
        out.requires_grad = False
    return out


def _walk(root: Function, grad: Array) -> None:
    order = _inputs_first(root)
    grads: dict[Function, list[Array]] = {root: [grad]}
    del grad
    while order:
        node = order.pop()
        parents = node.parents
        assert parents is not None
        node.targets = _targets(parents)
        results = node.backward(*grads.pop(node)) if node in grads else (None,) * len(parents)
        # The saved arrays and the edges go at once; what is left says that this graph was used.
        node.__dict__.clear()
        _hand_on(parents, results, grads)
        # Nothing of this Function may live on while the next one works.
        del node, parents, results


def _hand_on(
    parents: "tuple[Function | Tensor | None, ...]",
    results: tuple[Array | None, ...],
    grads: dict[Function, list[Array]],
) -> None:
    for parent, result in zip(parents, results, strict=True):
        if parent is None or result is None:
            continue
        if isinstance(parent, Tensor):
            parent.receive(result)
        elif parent not in grads:
            grads[parent] = [result]
        elif parent.several_gradients:
            grads[parent].append(result)
        else:
            grads[parent] = [elementwise.add(grads[parent][0], result)]


def _targets(parents: "tuple[Function | Tensor | None, ...]") -> tuple[GradTarget | None, ...]:
    """Offers each leaf's target once: the second use of one leaf by one Function is added by the engine."""
    return tuple(
        parent.target() if isinstance(parent, Tensor) and not any(parent is other for other in parents[:i]) else None
        for i, parent in enumerate(parents)
    )


def _inputs_first(root: Function) -> list[Function]:
    """Orders the graph so that each Function comes after those that made its inputs; without recursion."""
    order: list[Function] = []
    seen: set[Function] = set()
    stack: list[tuple[Function, bool]] = [(root, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        if node.parents is None:
            raise FlcudaError(
                f"backward: the graph behind {type(node).__name__} was freed by an earlier backward; run forward again"
            )
        stack.append((node, True))
        stack.extend((parent, False) for parent in node.parents if isinstance(parent, Function))
    return order
