"""Host microseconds of a layer's call: what the lookup of its plan takes, nn.Conv2D, and PyTorch's conv2d beside it.

The convolution is so small that the GPU keeps up, so what is timed is the host. Each form is timed in rounds of many
calls; the GPU is waited for between rounds only; the rounds of all forms are interleaved in a random order. Printed are
the median over the rounds and the quartiles.

"Lookup" is everything but the allocation of the output and the launch, for which something stands that does nothing.
Without a GPU only that is measured, with arrays of memory that is not there. PyTorch is measured when it is installed,
with cuDNN's benchmark mode on and on tensors of the same shapes, dtypes and layouts; "with grad" is the forward pass of
what will be differentiated by x and w.

Run: python bench/bench_layer_host.py [--rounds 100] [--calls 200] [--json]
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

# What is found here must not become anybody's stored choice.
os.environ["FLCUDA_CHOICES"] = tempfile.mkdtemp(prefix="flcuda-bench-")

import cupy
import numpy as np
from host_rounds import Round, parser, show

import flcuda
from flcuda import device as devices
from flcuda import nn
from flcuda.autograd import Tensor, no_grad
from flcuda.finder import sources
from flcuda.finder.policy import current_policy
from flcuda.finder.problem import ConvolutionProblem
from flcuda.ops import convolution as op

SHAPE = (1, 8, 8, 8)
FILTER = (8, 8, 3, 3)
# of the lookups alone, whose plans do nothing: no layer may find them
LOOKED_UP = (1, 8, 6, 6)
PRECISIONS = ("float16", "tf32", "float32")
CUDA = devices.Device("cuda", 0)


def repeated(call: Callable[[], Any], within: Callable[[], Any] = contextlib.nullcontext) -> Round:
    def calls_of(calls: int) -> None:
        with within():
            for _ in range(calls):
                call()

    return calls_of


# --- the lookup -------------------------------------------------------------------------------------------------------


class Nothing:
    """Stands for a plan."""

    def run(self, *operands: Any) -> None:
        pass

    def run_at(self, addresses: tuple[int, ...], operands: tuple[Any, ...]) -> None:
        pass


def array(shape: tuple[int, ...]) -> Any:
    """A CuPy array, float16 and channels last, of memory that is not there."""
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0x7F0000000000, 1 << 20, None, 0), 0)
    return cupy.ndarray(shape, np.float16, memory, [2 * step for step in devices.contiguous_strides(shape, "nhwc")])


def lookups() -> dict[str, Round]:
    if not devices.cuda_available():
        cupy.cuda.runtime.getDevice = lambda: 0
    mine = op._remembered.mine
    geometry = op.convolution(padding=1, groups=1, math="tensor_op")
    x, w, y = array(LOOKED_UP), array(FILTER), array(LOOKED_UP)
    for direction, first, second, out, out_shape, result in (
        ("forward", x, w, None, None, y),
        ("forward", x, w, y, None, y),
        ("backward_data", y, w, None, LOOKED_UP, x),
        ("backward_filter", x, y, w, FILTER, w),
    ):
        arrays = [op._NO_ARRAY if each is None else op._raw(each) for each in (first, second, out)]
        key = (direction, geometry, out_shape, False, None, current_policy(), *arrays)
        layer = (direction, geometry, FILTER)
        mine.keep(key, op._Call(layer, Nothing(), False, False, result.shape, lambda result=result: result, CUDA))
    calls = {
        "lookup: forward": lambda: geometry.forward(x, w),
        "lookup: backward_data": lambda: geometry.backward_data(y, w, LOOKED_UP),
        "lookup: backward_filter": lambda: geometry.backward_filter(x, y, FILTER, out=w),
        "lookup: forward, the long key (with out=)": lambda: geometry.forward(x, w, out=y),
    }
    layer = nn.Conv2D(8, 8, 3, padding=1, bias=False, precision="float16", device="cpu")
    layer.weight.data = w
    plain, with_grad = Tensor(x), Tensor(x, requires_grad=True)
    key = (("forward", geometry, None, False, "nhwc", current_policy()), (x, w))
    mine.keep(
        (*key[0], *[op._raw(each) for each in key[1]], op._NO_ARRAY),
        op._Call(("forward", geometry, FILTER), Nothing(), False, False, LOOKED_UP, lambda: y, CUDA),
    )
    return {
        **{name: repeated(call) for name, call in calls.items()},
        "lookup: nn.Conv2D, no_grad": repeated(lambda: layer(plain), no_grad),
        "lookup: nn.Conv2D, with grad": repeated(lambda: layer(with_grad)),
    }


# --- on the GPU -------------------------------------------------------------------------------------------------------


def ours(precision: str, notes: list[str]) -> dict[str, Round]:
    forms: dict[str, Round] = {}
    word = nn.precision_of(precision)
    x = devices.empty(SHAPE, word.dtype, device="cuda", layout=word.layout)
    x[...] = 1
    plain, with_grad = Tensor(x), Tensor(x, requires_grad=True)
    for bias in (False, True):
        for time_word in ("device", "both"):
            layer = nn.Conv2D(8, 8, 3, padding=1, bias=bias, precision=precision, device="cuda", seed=0)

            def within(time_word: str = time_word) -> Any:
                return flcuda.policy(time=time_word)

            with within():
                layer(with_grad)
                problem = ConvolutionProblem.from_arrays(
                    "forward", x=x, w=layer.weight.data, padding=1, math=word.math, layout=word.layout
                )
                choice = flcuda.plan(problem, device="cuda").choice
            name = f"{precision}{', bias' if bias else ''}, ranked by {time_word} time"
            notes.append(f"nn.Conv2D, {name}: {choice.id}, workspace {choice.workspace} bytes")
            forms[f"nn.Conv2D, {name}, no_grad"] = repeated(
                lambda layer=layer: layer(plain), lambda within=within: both(within(), no_grad())
            )
            forms[f"nn.Conv2D, {name}, with grad"] = repeated(lambda layer=layer: layer(with_grad), within)
            if not bias and time_word == "device":
                forms.update(of_the_store(problem, precision))
    return forms


@contextlib.contextmanager
def both(first: Any, second: Any) -> Any:
    with first, second:
        yield


def of_the_store(problem: Any, precision: str) -> dict[str, Round]:
    """What a thread does for its first call of a kind that another thread had before, without building the plan."""
    place = devices.Device("cuda", 0)
    names = tuple(source.name for source in sources.sources_for(place, problem))
    policy = current_policy()
    store = flcuda.finder.default_store()
    key = flcuda.finder.Key.of(problem, policy, place, names)
    return {
        f"store's memory, {precision}": repeated(lambda: store.get(key)),
        f"store's memory and making the key, {precision}": repeated(
            lambda: store.get(flcuda.finder.Key.of(problem, policy, place, names))
        ),
    }


def parts() -> dict[str, Round]:
    shape, dtype = SHAPE, np.dtype(np.float16)
    strides = tuple(2 * step for step in devices.contiguous_strides(shape, "nhwc"))
    alloc, kind = cupy.cuda.alloc, cupy.ndarray
    return {
        "part: cupy.empty": repeated(lambda: cupy.empty(shape, dtype)),
        "part: a new output": repeated(lambda: kind(shape, dtype, alloc(1024), strides)),
    }


def torchs(precision: str, notes: list[str]) -> dict[str, Round]:
    try:
        import torch
    except ImportError:
        notes.append("PyTorch is not measured: it is not installed")
        return {}

    def flags() -> Any:
        return torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=precision == "tf32")

    def flags_no_grad() -> Any:
        return both(flags(), torch.no_grad())

    dtype = torch.float16 if precision == "float16" else torch.float32
    order = torch.contiguous_format if precision == "float32" else torch.channels_last

    def made(shape: tuple[int, ...]) -> Any:
        return torch.ones(shape, dtype=dtype, device="cuda").to(memory_format=order)

    x, w, b = made(SHAPE), made(FILTER), torch.ones(8, dtype=dtype, device="cuda")
    with_grad = [each.clone().requires_grad_() for each in (x, w, b)]
    conv2d = torch.nn.functional.conv2d
    notes.append(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {precision}")
    forms: dict[str, Round] = {}
    for bias in (False, True):
        name = f"{precision}{', bias' if bias else ''}"

        def plain(bias: bool = bias) -> None:
            conv2d(x, w, b if bias else None, padding=1)

        def recorded(bias: bool = bias) -> None:
            conv2d(with_grad[0], with_grad[1], with_grad[2] if bias else None, padding=1)

        module = torch.nn.Conv2d(8, 8, 3, padding=1, bias=bias, dtype=dtype, device="cuda").to(memory_format=order)
        forms[f"torch conv2d, {name}, no_grad"] = repeated(plain, flags_no_grad)
        forms[f"torch conv2d, {name}, with grad"] = repeated(recorded, flags)
        forms[f"torch.nn.Conv2d, {name}, no_grad"] = repeated(lambda module=module: module(x), flags_no_grad)
        forms[f"torch.nn.Conv2d, {name}, with grad"] = repeated(lambda module=module: module(with_grad[0]), flags)
    return forms


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    args = parser(__doc__).parse_args()
    notes: list[str] = []
    reason = devices.cuda_missing_reason()
    forms = lookups()
    if reason is None:
        forms.update(parts())
        for precision in PRECISIONS:
            forms.update(ours(precision, notes))
        for precision in PRECISIONS:
            forms.update(torchs(precision, notes))
    else:
        notes.append(f"the lookups only: {reason}")
    about = {"x": SHAPE, "w": FILTER, "notes": notes}
    show(forms, args, lambda: None if reason else cupy.cuda.Device().synchronize(), about, 75)


if __name__ == "__main__":
    main()
