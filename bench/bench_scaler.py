"""The check of the gradients and the optimizer's step over a network's parameters, beside the memory's own time.

For each precision, over ResNet-34's 21.8 M parameters in flcuda's arenas:

    floors    reading the gradients' bytes once, and moving the bytes of check and update once: by a copy on the device
              of half as many bytes (it reads them and writes them), and by a kernel that reads, or reads and writes,
              as much as is needed and does nothing else (`kernels/scaler.cu`; the best of several launch shapes)
    flcuda    the check alone; check, then unscale and SGD with momentum and weight decay in one pass; the whole of
              DynamicScaler.step on a loss whose backward only points at the gradients (with batch norm's statistics and
              the scaler's rule); the same step by step, which returns False to the host
    torch     its foreach check that unscales; SGD plain, foreach and fused, on the tensors and on one flat tensor an
              arena; both together, GradScaler itself, and torch.compile of both over the flat tensors; a loop over the
              tensors with a read by the host each, and without
    cupy      such loops; isfinite over the flat arena; one ReductionKernel over it, alone and before an
              ElementwiseKernel that unscales, skips and updates

Everybody works in the same process on the same memory with the same random gradients: PyTorch's tensors are views of
the arenas, of the arenas' dtype. So in 16 bits its optimizers keep neither float32 masters nor float32 momentum, and
move fewer bytes than ours; what is compiled does what ours does. PyTorch's check is asked with an inverse scale of 1,
with which it still writes what it has read.

Times are medians of device events by flcuda.timing; all works take turns sample by sample, and several sets of arenas
take turns too, so that none lies in the second-level cache. A work is queued before the GPU begins, unless the host
waits within it (`queued` false): then its time is the host's as well. GB/s count the bytes that a work must move once,
whatever it moves; `ratio` is its time over theirs at the rate of the smaller floor. `waits` is how often the host waits
for the device: 0 is proved by a capture, which a wait makes fail, and which counts the `kernels`. `host us` is what a
call keeps the host.

Then the questions of flashlight's reviewers, in one table: uint8 or int32 flags (kernels that differ in nothing else),
a key of width and batch or the full one (nanoseconds of the host, and what the choices of the small one cost), what
returning False costs (with and without the read by the host), and the regret of a one-time find, which
`bench_finder.py regret` measured before.

Run: python bench/bench_scaler.py [--precision float32 ...] [--json]
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from networks import NETWORKS, network
from record import RESULTS, machine, machine_line

import flcuda
from flcuda import device as devices
from flcuda import kernel_loader, timing
from flcuda.amp import DynamicScaler
from flcuda.autograd import Function, Tensor
from flcuda.device import Device
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder import Policy
from flcuda.finder.measure import kernel_names
from flcuda.finder.policy import current_policy
from flcuda.finder.problem import ConvolutionProblem
from flcuda.ops import convolution as convolution_op
from flcuda.ops.finite import find_invalid, new_ticket
from flcuda.ops.flags import join_flags
from flcuda.ops.optimizer import sgd_update
from flcuda.optim import SGD
from flcuda.parameters import Arena

KERNELS = Path(__file__).parent / "kernels"

PRECISIONS = ("float32", "float16", "bfloat16")

LR = 1e-6
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
SCALE = 65536.0

BARS = {"check": 1.25, "step": 1.2}
"""At most so many times the memory's time may check, and check with update, take."""

PEERS = ("torch", "cupy", "numpy")

BLOCK = 256
BLOCKS_PER_PROCESSOR: tuple[int | None, ...] = (4, 8, 16, 32, None)
"""Launch shapes of the floors' kernels that are tried; None: as many blocks as leave each thread one turn."""
VECTORS_A_TURN = {"read": 4, "move": 1}

EXPONENT = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""The bits that are all set in NaN and infinity alone."""

FLAGS = ("uint8", "int32", "int32_first")
"""Kernels of `kernels/scaler.cu`; the last keeps the index of the first invalid array as well."""

Answer = dict[str, Any]
Run = Callable[[], object]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Work:
    """What is measured.

    Attributes:
        name: tells it from all others.
        side: "floor", "flcuda", or one of PEERS.
        runs: the same on each set.
        of: the floor that it is compared with, "check" or "step".
        nbytes: that it must move, each once.
        waits: how often the host waits in a run, as it is written; 0 is to be proved.
    """

    name: str
    side: str
    runs: Sequence[Run]
    of: str
    nbytes: int
    waits: int = 0


# --- flcuda's side ----------------------------------------------------------------------------------------------------


class Gradients(Function):
    """A loss whose backward gives each parameter the gradient that already lies in its arena."""

    def forward(self, loss: Any, *parameters: Any) -> Any:  # noqa: ARG002
        return loss

    def backward(self, grad: Any) -> tuple[Any, ...]:  # noqa: ARG002
        return (None, *[None if target is None else target.array for target in self.targets[1:]])


class Set:
    """One network's arenas with gradients, and all that a step needs.

    Args:
        name: of NETWORKS.
        precision: of the network.
        device: where.
        values: float32, at least as many as the largest arena has elements: the gradients.
    """

    def __init__(self, name: str, precision: str, device: Device, values: Any) -> None:
        xp = device.xp
        self.device = device
        self.model = network(name, precision=precision, device=device)
        self.optimizer = SGD(self.model, LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        self.arenas: tuple[Arena, ...] = self.optimizer.arenas
        for arena in self.arenas:
            for segment in arena.segments:
                part = slice(segment.offset, segment.offset + segment.size)
                arena.grad[part] = xp.asarray(values[part].astype(arena.dtype))
        self.velocity = [devices.zeros((a.size,), a.master.dtype, device=device) for a in self.arenas]
        self.decay = [xp.ones(len(a.segments), np.float32) for a in self.arenas]
        self.lr = xp.full(1, LR, np.float64)
        self.inv_scale = xp.full(1, 1 / SCALE, np.float64)
        # Invalid gradients are searched for again and again; at a scale below 1 the check would have more to do.
        self.scaler = DynamicScaler(init_scale=SCALE, min_scale=1.0, max_consecutive_skips=1 << 30)
        self.parameters = [parameter for arena in self.arenas for parameter in arena.parameters]
        self.value = Tensor(xp.zeros(1, np.float32))
        self.parts = [xp.zeros(2 + len(a.segments), np.int32) for a in self.arenas]
        joined = xp.zeros(2 + sum(len(a.segments) for a in self.arenas), np.int32)
        self.flags = self.parts[0] if len(self.parts) == 1 else joined
        self.ticket = new_ticket(device)

    @property
    def check_bytes(self) -> int:
        return sum(int(arena.grad.nbytes) for arena in self.arenas)

    @property
    def step_bytes(self) -> int:
        """Gradients twice; masters and velocities read and written; 16-bit copies written."""
        update = 0
        for arena in self.arenas:
            update += arena.grad.nbytes + 4 * arena.master.nbytes
            if arena.data is not arena.master:
                update += arena.data.nbytes
        return self.check_bytes + int(update)

    def gradients(self) -> list[Any]:
        """Gives each parameter's gradient, flat."""
        return [a.grad[s.offset : s.offset + s.size] for a in self.arenas for s in a.segments]

    def search(self) -> None:
        for arena, part in zip(self.arenas, self.parts, strict=True):
            find_invalid(arena.grad, arena.offsets, part, ticket=self.ticket)

    def check(self) -> None:
        self.search()
        if len(self.parts) > 1:
            join_flags(self.parts, self.flags)

    def update(self) -> None:
        for arena, velocity, decay in zip(self.arenas, self.velocity, self.decay, strict=True):
            sgd_update(
                arena.master,
                arena.data,
                arena.grad,
                velocity,
                arena.offsets,
                decay,
                self.lr,
                momentum=MOMENTUM,
                weight_decay=WEIGHT_DECAY,
                inv_scale=self.inv_scale,
                flags=self.flags,
            )

    def check_and_update(self) -> None:
        self.check()
        self.update()

    def loss(self) -> Tensor:
        return Gradients.apply(self.value, *self.parameters)

    def whole(self) -> None:
        """Does all of a step after the forward."""
        self.scaler.step(self.optimizer, self.loss())

    def stepwise(self) -> bool:
        """Does the same; the host learns whether the gradients were valid."""
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale(self.optimizer)
        valid = self.scaler.adjust_scale_factor()
        if valid:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return valid


def normal_values(size: int) -> Any:
    return np.random.default_rng(0).standard_normal(size, np.float32)


def sets_of(name: str, precision: str, device: Device) -> list[Set]:
    """Makes as many sets as the cache asks for."""
    trial = network(name, precision=precision, device="cpu")
    values = normal_values(max(arena.size for arena in trial.arenas))
    first = Set(name, precision, device, values)
    count = timing.buffer_sets(first.check_bytes, timing.l2_bytes(device))
    return [first, *(Set(name, precision, device, values) for _ in range(count - 1))]


def ours(sets: Sequence[Set]) -> list[Work]:
    check, step = sets[0].check_bytes, sets[0].step_bytes
    several = len(sets[0].arenas) > 1
    apart = (
        [Work("check, flags not joined", "flcuda", [each.search for each in sets], "check", check)] if several else []
    )
    return [
        *apart,
        Work("check", "flcuda", [each.check for each in sets], "check", check),
        Work("check, unscale, SGD momentum", "flcuda", [each.check_and_update for each in sets], "step", step),
        Work("DynamicScaler.step", "flcuda", [each.whole for each in sets], "step", step),
        Work("DynamicScaler step by step", "flcuda", [each.stepwise for each in sets], "step", step, waits=1),
    ]


# --- CuPy's side, or NumPy's on the CPU -------------------------------------------------------------------------------


class CupySet:
    """The same arenas for CuPy's own ways."""

    def __init__(self, one: Set, device: Device) -> None:
        self.xp = device.xp
        self.arenas = one.arenas
        self.gradients = one.gradients()
        self.bits = [a.grad.view(f"uint{8 * a.dtype.itemsize}") for a in self.arenas]
        self.velocity = [devices.zeros((a.size,), np.float32, device=device) for a in self.arenas]
        self.inv_scale = one.inv_scale
        self.found = self.xp.zeros(len(self.arenas), np.int32)
        self.places = [self.found[i : i + 1].reshape(()) for i in range(len(self.arenas))]

    def reading(self) -> bool:
        return all([bool(self.xp.isfinite(each).all()) for each in self.gradients])  # noqa: C419 - reads every one

    def launching(self) -> None:
        for each in self.gradients:
            self.xp.isfinite(each).all()

    def flat_reading(self) -> bool:
        return all([bool(self.xp.isfinite(a.grad).all()) for a in self.arenas])  # noqa: C419

    def flat_launching(self) -> None:
        for a in self.arenas:
            self.xp.isfinite(a.grad).all()

    def reduce(self) -> None:
        for arena, bits, place in zip(self.arenas, self.bits, self.places, strict=True):
            cupy_check(arena.dtype.name)(bits, place)

    def update(self) -> None:
        for a, velocity in zip(self.arenas, self.velocity, strict=True):
            copies = () if a.data is a.master else (a.data,)
            kernel = cupy_update(len(self.arenas), bool(copies))
            kernel(a.grad, self.found, self.inv_scale, LR, MOMENTUM, WEIGHT_DECAY, a.master, velocity, *copies)

    def reduce_and_update(self) -> None:
        self.reduce()
        self.update()

    def reduce_read_and_update(self) -> None:
        self.reduce()
        if not int(self.found.max()):
            self.update()


@functools.cache
def cupy_check(dtype: str) -> Any:
    mask = f"{EXPONENT[dtype]:#x}u"
    test = f"(bits & {mask}) == {mask}"
    return devices.cupy().ReductionKernel("T bits", "int32 any_", test, "a | b", "any_ = a", "0", f"any_{dtype}")


@functools.cache
def cupy_update(arenas: int, copies: bool) -> Any:
    """Makes the kernel that unscales and updates unless an arena was found invalid, as `sgd_update` does."""
    valid = " && ".join(f"found[{i}] == 0" for i in range(arenas))
    body = f"""
        if ({valid}) {{
          float gradient = (float)grad * (float)inv_scale[0] + decay * master;
          velocity = momentum * velocity + gradient;
          master -= rate * velocity;
          {"data = (T)master;" if copies else ""}
        }}"""
    takes = "T grad, raw int32 found, raw float64 inv_scale, float32 rate, float32 momentum, float32 decay"
    gives = "float32 master, float32 velocity" + (", T data" if copies else "")
    return devices.cupy().ElementwiseKernel(takes, gives, body, f"unscale_sgd_{arenas}_{int(copies)}")


def cupy_mistakes(device: Device) -> list[str]:
    """Says where CuPy's kernels do something else than ours; they are compared on a small network."""
    if device.kind == "cpu":
        return []
    found = []
    for precision in PRECISIONS:
        for poison in (None, math.nan):
            own, other = (Set("tiny", precision, device, normal_values(1 << 12)) for _ in range(2))
            if poison is not None:
                for each in (own, other):
                    each.arenas[-1].grad[0] = poison
            try:
                for _ in range(2):
                    own.check_and_update()
                theirs = CupySet(other, device)
                for _ in range(2):
                    theirs.reduce_and_update()
                # The velocities, which a small rate does not hide.
                pairs = zip(own.velocity, theirs.velocity, strict=True)
                same = all(np.allclose(mine.get(), yours.get(), rtol=1e-5, atol=1e-9) for mine, yours in pairs)
            except Exception as error:
                found.append(f"CuPy's kernels, {precision}: {type(error).__name__}")
                continue
            if not same or bool(int(theirs.found.max())) != bool(int(own.flags[0])):
                found.append(f"NOT VALID: CuPy's kernels, {precision}, {poison}: not what ours do")
    return found


def cupys(sets: Sequence[Set], device: Device) -> list[Work]:
    side = device.xp.__name__
    made = [CupySet(each, device) for each in sets]
    check, step = sets[0].check_bytes, sets[0].step_bytes
    arenas, tensors = len(made[0].arenas), len(made[0].gradients)
    loops = [
        Work("isfinite: a loop with a read each", side, [each.reading for each in made], "check", check, tensors),
        Work("isfinite: a loop without reads", side, [each.launching for each in made], "check", check),
        Work("isfinite of the flat arena, a read", side, [each.flat_reading for each in made], "check", check, arenas),
        Work("isfinite of the flat arena", side, [each.flat_launching for each in made], "check", check),
    ]
    if device.kind == "cpu":
        return loops
    both = [each.reduce_and_update for each in made]
    read = [each.reduce_read_and_update for each in made]
    return [
        *loops,
        Work("ReductionKernel", side, [each.reduce for each in made], "check", check),
        Work("ReductionKernel, ElementwiseKernel", side, both, "step", step),
        Work("ReductionKernel, a read, ElementwiseKernel", side, read, "step", step, 1),
    ]


# --- the memory's own time --------------------------------------------------------------------------------------------


def bench_kernel(name: str) -> Any:
    """Gives a kernel of `kernels/scaler.cu`, compiled as flcuda's own are."""
    return _module(devices.cupy().cuda.runtime.getDevice()).get_function(name)


@functools.cache
def _module(index: int) -> Any:  # noqa: ARG001 - of that device
    return kernel_loader.new_module("scaler", kernel_loader.source("scaler", KERNELS), kernel_loader.options())


def copying(out: Any, source: Any) -> Run:
    """Gives the device's own copy between two flat arrays of bytes."""
    if isinstance(out, np.ndarray):
        return functools.partial(np.copyto, out, source)
    return functools.partial(out.data.copy_from_device_async, source.data, out.nbytes)


def floors(sets: Sequence[Set], device: Device) -> list[Work]:
    """The works that only move bytes, on memory of their own; several of one kernel differ in the launch shape."""
    xp = device.xp
    check, step = sets[0].check_bytes, sets[0].step_bytes
    masters = sum(int(arena.master.nbytes) for arena in sets[0].arenas)
    pattern = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    scratch = [xp.asarray(np.resize(pattern, step)) for _ in sets]

    def copied(nbytes: int) -> list[Run]:
        half = nbytes // 2
        return [copying(each[half : 2 * half], each[:half]) for each in scratch]

    works = [
        Work("copy of half the bytes", "floor", copied(check), "check", check),
        Work("copy of half the bytes, step", "floor", copied(step), "step", step),
    ]
    if device.kind == "cpu":
        words = [each[: check // 8 * 8].view(np.uint64) for each in scratch]
        runs: list[Run] = [functools.partial(np.bitwise_xor.reduce, each) for each in words]
        return [*works, Work("read only", "floor", runs, "check", check)]
    read = bench_kernel("read_bytes")
    move = bench_kernel("move_bytes_1" if masters == check else "move_bytes_2")
    copies_out = any(arena.data is not arena.master for arena in sets[0].arenas)
    # of two arenas the smaller one, batch norm's, is float32 in any precision: taken as if of the other's dtype
    ratio = 1 if masters == check else 2
    vectors = np.int64(check // 16)
    sink = xp.zeros(1, np.uint32)

    def reading(memory: Any, blocks: Mapping[str, int]) -> None:
        read((blocks["read"],), (BLOCK,), (memory, vectors, np.uint32(0x9E3779B9), sink))

    def moving(memory: Any, blocks: Mapping[str, int]) -> None:
        reading(memory, blocks)
        a, b, out = (memory[check * begin :] for begin in (1, 1 + ratio, 1 + 2 * ratio))
        given = (memory, a, b, out if copies_out else np.uint64(0), vectors, np.uint32(0))
        move((blocks["move"],), (BLOCK,), given)

    processors = int(devices.device_model(device)["sm_count"])
    for each in BLOCKS_PER_PROCESSOR:
        shape = "one turn a thread" if each is None else f"{each} blocks a processor"
        blocks = {
            kernel: -(-int(vectors) // (BLOCK * turn)) if each is None else each * processors
            for kernel, turn in VECTORS_A_TURN.items()
        }
        for name, call, of, nbytes in (
            ("read only", reading, "check", check),
            ("read only, then read and write", moving, "step", step),
        ):
            runs = [functools.partial(call, memory, blocks) for memory in scratch]
            works.append(Work(f"{name}, {shape}", "floor", runs, of, nbytes))
    return works


# --- PyTorch's side ---------------------------------------------------------------------------------------------------


class TorchSet:
    """The same arenas as PyTorch's tensors: one a parameter, and flat ones.

    Args:
        torch: the module.
        one: whose memory it is.
        compiled: what `compiled_ways` gave, or None.
    """

    def __init__(self, torch: Any, one: Set, compiled: dict[str, Any] | None = None) -> None:
        self.torch = torch
        self.compiled = compiled
        self.gradients: list[list[Any]] = []
        self.parameters: list[Any] = []
        self.flat_gradients: list[list[Any]] = []
        self.flat_parameters: list[Any] = []
        self.masters: list[tuple[Any, ...]] = []
        for arena in one.arenas:
            grad, data, master = (flat_tensor(torch, flat) for flat in (arena.grad, arena.data, arena.master))
            parts = [slice(s.offset, s.offset + s.size) for s in arena.segments]
            self.gradients.append([grad[part] for part in parts])
            self.flat_gradients.append([grad])
            self.parameters += [self._parameter(data[part], grad[part]) for part in parts]
            self.flat_parameters.append(self._parameter(data, grad))
            copy = () if arena.data is arena.master else (data,)
            self.masters.append((grad, master, torch.zeros_like(master), *copy))
        where = self.parameters[0].device
        self.found = torch.zeros(1, device=where)
        self.one = torch.ones(1, device=where)
        self.plain = self._sgd(foreach=False, fused=False)
        self.foreach = self._sgd(foreach=True)
        self.fused = self._sgd(fused=True)
        self.flat_fused = self._sgd(flat=True, fused=True)
        self.fused_amp = self._sgd(fused=True)
        self.flat_fused_amp = self._sgd(flat=True, fused=True)
        for optimizer in (self.fused_amp, self.flat_fused_amp):
            # as GradScaler.step gives them to an optimizer that is fused
            optimizer.grad_scale = self.one
            optimizer.found_inf = self.found
        # A scale of 1: GradScaler unscales in place, and here the same gradients come again and again.
        self.scaled = {
            "fused": (self._scaler(), self._sgd(fused=True)),
            "foreach": (self._scaler(), self._sgd(foreach=True)),
        }

    @staticmethod
    def _parameter(data: Any, grad: Any) -> Any:
        parameter = data.detach().requires_grad_()
        parameter.grad = grad
        return parameter

    def _sgd(self, *, flat: bool = False, **how: bool) -> Any:
        given = self.flat_parameters if flat else self.parameters
        return self.torch.optim.SGD(given, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, **how)

    def _scaler(self) -> Any:
        scaler = self.torch.amp.GradScaler(self.one.device.type, init_scale=1.0, growth_interval=1 << 30)
        scaler.scale(self.one)  # makes its state
        return scaler

    def _look_at(self, parts: list[list[Any]]) -> None:
        self.found.zero_()
        for tensors in parts:
            self.torch._amp_foreach_non_finite_check_and_unscale_(tensors, self.found, self.one)

    def check(self) -> None:
        self._look_at(self.gradients)

    def flat_check(self) -> None:
        self._look_at(self.flat_gradients)

    def check_and_fused(self) -> None:
        self.check()
        self.fused_amp.step()

    def flat_check_and_fused(self) -> None:
        self.flat_check()
        self.flat_fused_amp.step()

    def grad_scaler(self, how: str) -> None:
        scaler, optimizer = self.scaled[how]
        scaler.step(optimizer)
        scaler.update()

    def flat_isfinite(self) -> None:
        for (grad,) in self.flat_gradients:
            self.torch.isfinite(grad).all()

    def compiled_check(self) -> None:
        assert self.compiled is not None
        self.compiled["check"]([grad for grad, *_ in self.masters])

    def compiled_step(self) -> None:
        assert self.compiled is not None
        self.compiled["step"](self.one, self.masters)

    def reading(self) -> bool:
        return all([bool(self.torch.isfinite(each).all()) for part in self.gradients for each in part])  # noqa: C419

    def launching(self) -> None:
        for part in self.gradients:
            for each in part:
                self.torch.isfinite(each).all()


def compiled_ways(torch: Any) -> dict[str, Any]:
    """Gives the check, and check with update by the formulas of `sgd_update`, as torch.compile makes them."""

    def check(gradients: list[Any]) -> Any:
        found = ~torch.isfinite(gradients[0]).all()
        for grad in gradients[1:]:
            found = found | ~torch.isfinite(grad).all()
        return found

    def step(inv_scale: Any, arenas: list[tuple[Any, ...]]) -> None:
        found = check([grad for grad, *_ in arenas])
        for grad, master, velocity, *copy in arenas:
            moved = MOMENTUM * velocity + (grad.float() * inv_scale + WEIGHT_DECAY * master)
            new = master - LR * moved
            velocity.copy_(torch.where(found, velocity, moved))
            master.copy_(torch.where(found, master, new))
            if copy:
                copy[0].copy_(torch.where(found, copy[0], new.to(copy[0].dtype)))

    return {"check": torch.compile(check, dynamic=False), "step": torch.compile(step, dynamic=False)}


def flat_tensor(torch: Any, flat: Any) -> Any:
    """Gives a flat array to PyTorch: the same memory."""
    if flat.dtype.itemsize == 2:  # NumPy gives no bfloat16
        tensor = torch.from_dlpack(flat.view(np.int16)).view(getattr(torch, flat.dtype.name))
    else:
        tensor = torch.from_dlpack(flat)
    address = flat.ctypes.data if isinstance(flat, np.ndarray) else flat.data.ptr
    if tensor.data_ptr() != address:
        raise AssertionError("PyTorch copied an arena")
    return tensor


def torchs(torch: Any, sets: Sequence[Set], device: Device, compiled: dict[str, Any] | None = None) -> list[Work]:
    if device.kind == "cuda" and torch.cuda.current_stream().cuda_stream != devices.current_stream():
        raise AssertionError("the current streams of PyTorch and CuPy are not the same")
    made = [TorchSet(torch, each, compiled) for each in sets]
    check, step = sets[0].check_bytes, sets[0].step_bytes
    # Gradients read; parameters and momentum, of the gradients' dtype, read and written.
    update, both = 5 * check, 6 * check
    tensors = len(made[0].parameters)

    def scaling(how: str) -> list[Run]:
        return [functools.partial(each.grad_scaler, how) for each in made]

    works = [
        Work("foreach check and unscale", "torch", [each.check for each in made], "check", check),
        Work("foreach check of a flat tensor", "torch", [each.flat_check for each in made], "check", check),
        Work("isfinite of a flat tensor", "torch", [each.flat_isfinite for each in made], "check", check),
        Work("isfinite: a loop with a read each", "torch", [each.reading for each in made], "check", check, tensors),
        Work("isfinite: a loop without reads", "torch", [each.launching for each in made], "check", check),
        Work("plain SGD", "torch", [each.plain.step for each in made], "step", update),
        Work("foreach SGD", "torch", [each.foreach.step for each in made], "step", update),
        Work("fused SGD", "torch", [each.fused.step for each in made], "step", update),
        Work("fused SGD of a flat tensor", "torch", [each.flat_fused.step for each in made], "step", update),
        Work("check, fused SGD that unscales", "torch", [each.check_and_fused for each in made], "step", both),
        Work("check, fused SGD of a flat tensor", "torch", [each.flat_check_and_fused for each in made], "step", both),
        Work("GradScaler, fused SGD", "torch", scaling("fused"), "step", both),
        Work("GradScaler, foreach SGD, a read", "torch", scaling("foreach"), "step", both, waits=1),
    ]
    if compiled is not None:
        works += [
            Work("compiled check", "torch", [each.compiled_check for each in made], "check", check),
            Work("compiled check, unscale, SGD", "torch", [each.compiled_step for each in made], "step", step),
        ]
    return works


def torch_or_none(notes: list[str]) -> Any:
    # Compiling is to end in this process: nothing may be left running beside the measurement.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    try:
        import torch
    except ImportError:
        notes.append("PyTorch is not measured: it is not installed")
        return None
    notes.append(f"torch {torch.__version__}")
    return torch


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(
    works: Sequence[Work], device: Device, *, repeats: int, budget_s: float, torch: Any = None
) -> list[Answer]:
    """Times works, which take turns; one of a peer that raises has the reason in place of times."""
    reasons: dict[str, str] = {}
    for work in works:
        try:
            # Twice on each set: the first step makes a peer's momentum, and its pool holds the memory from then on.
            for _ in range(2):
                for run in work.runs:
                    run()
            devices.synchronize(device)
        except Exception as error:
            if work.side not in PEERS:
                raise
            reasons[work.name + work.side] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    able = [work for work in works if work.name + work.side not in reasons]
    times = timing.in_turn([work.runs for work in able], device, repeats=repeats, budget_s=budget_s)
    found = dict(zip([work.name + work.side for work in able], times, strict=True))
    rows: list[Answer] = []
    for work in works:
        row: Answer = {"name": work.name, "side": work.side, "of": work.of, "nbytes": work.nbytes}
        got = found.get(work.name + work.side)
        if got is None:
            row["error"] = reasons[work.name + work.side]
        else:
            row.update({name: getattr(got, name) for name in ("median_ms", "low_ms", "high_ms", "samples", "host_us")})
            row["queued"] = got.queued
            row["gb_per_s"] = work.nbytes / got.median_ms / 1e6
            names = None if work.waits else captured(work, device, torch)
            row["kernels"] = None if names is None else len(names)
            row["waits"] = work.waits if work.waits or names is not None else None
        rows.append(row)
    return rows


def captured(work: Work, device: Device, torch: Any) -> tuple[str, ...] | None:
    """Gives the names of the kernels of one run; None where it cannot be captured, as when the host waits in it."""

    def on_the_same_stream() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(devices.current_stream())):
            work.runs[0]()

    return kernel_names(on_the_same_stream if work.side == "torch" else work.runs[0], device)


def with_floors(rows: Sequence[Answer]) -> tuple[dict[str, Answer], list[Answer]]:
    """Finds the floors and puts beside every row how many times longer it takes than its bytes.

    Returns:
        The floor of "check" and of "step", each with the best copy's time, the best kernel's, the smaller of them,
        "ms", and the bytes that they move; and the rows, of the floors' kernels only the best each.
    """
    found: dict[str, Answer] = {}
    kept: list[Answer] = []
    for of in ("check", "step"):
        mine = [row for row in rows if row["side"] == "floor" and row["of"] == of and "median_ms" in row]
        kinds = {
            "copy_ms": [row for row in mine if row["name"].startswith("copy")],
            "kernel_ms": [row for row in mine if not row["name"].startswith("copy")],
        }
        floor: Answer = {}
        for kind, candidates in kinds.items():
            best = min(candidates, key=lambda row: row["median_ms"], default=None)
            floor[kind] = None if best is None else best["median_ms"]
            if best is not None:
                kept.append(best)
        floor["ms"] = min((ms for ms in floor.values() if ms is not None), default=None)
        floor["nbytes"] = next((row["nbytes"] for row in mine), None)
        found[of] = floor
    kept += [row for row in rows if row["side"] != "floor"]
    for row in kept:
        floor = found[row["of"]]
        if "median_ms" in row and floor["ms"]:
            row["ratio"] = row["median_ms"] / (floor["ms"] * row["nbytes"] / floor["nbytes"])
    return found, kept


def bars_of(floors_found: dict[str, Answer], rows: Sequence[Answer]) -> list[Answer]:
    """Says for check and step which bar holds, against both forms of the floor."""
    names = {"check": "check", "step": "check, unscale, SGD momentum"}
    said = []
    for of, most in BARS.items():
        row = next((r for r in rows if r["side"] == "flcuda" and r["name"] == names[of]), {})
        ms = row.get("median_ms")
        floor = floors_found[of]

        def ratio(kind: str, ms: float | None = ms, floor: Answer = floor) -> float | None:
            return ms / floor[kind] if ms is not None and floor[kind] else None

        smaller = ratio("ms")
        said.append(
            {
                "of": of,
                "at_most": most,
                "to_the_copy": ratio("copy_ms"),
                "to_the_kernel": ratio("kernel_ms"),
                "met": None if smaller is None else smaller <= most,
            }
        )
    return said


def table(
    name: str,
    precision: str,
    device: Device,
    torch: Any,
    *,
    repeats: int,
    budget_s: float,
    compiled: dict[str, Any] | None = None,
) -> Answer:
    """Measures one precision."""
    sets = sets_of(name, precision, device)
    works = [*floors(sets, device), *ours(sets), *cupys(sets, device)]
    if torch is not None:
        works += torchs(torch, sets, device, compiled)
    floors_found, rows = with_floors(measured(works, device, repeats=repeats, budget_s=budget_s, torch=torch))
    now = timing.clocks(device)
    return {
        "precision": precision,
        "parameters": sum(segment.size for arena in sets[0].arenas for segment in arena.segments),
        "tensors": sum(len(arena.segments) for arena in sets[0].arenas),
        "arenas": [{"dtype": a.dtype.name, "size": a.size, "tensors": len(a.segments)} for a in sets[0].arenas],
        "sets": len(sets),
        "bytes": {"check": sets[0].check_bytes, "step": sets[0].step_bytes},
        "floors": floors_found,
        "rows": rows,
        "bars": bars_of(floors_found, rows) if device.kind == "cuda" else [],
        "any_invalid": bool(int(sets[0].flags[0])) or bool(sets[0].scaler.state_dict()["skipped_steps"]),
        "clocks": None if now is None else dataclasses.asdict(now),
    }


def give_back(device: Device, torch: Any) -> None:
    """Gives back what the pools hold, so that the next precision finds the memory free."""
    if device.kind == "cuda":
        devices.cupy().get_default_memory_pool().free_all_blocks()
        if torch is not None:
            torch.cuda.empty_cache()


# --- the reviewers' questions -----------------------------------------------------------------------------------------


def poisons(offsets: Sequence[int]) -> dict[str, list[slice]]:
    """Says where infinity is put into the gradients, by how many tensors then are invalid."""
    last = len(offsets) - 2
    return {
        "none": [],
        "one element of the last tensor": [slice(offsets[last], offsets[last] + 1)],
        "one element of each tensor": [slice(offsets[i], offsets[i] + 1) for i in range(last + 1)],
        "every element": [slice(offsets[0], offsets[-1])],
    }


def expected_flags(kind: str, poisoned: Sequence[slice], offsets: Sequence[int]) -> list[int]:
    """Gives the flags that a search must leave; 0 in place of the first one's index where that is not kept."""
    segments = len(offsets) - 1
    pairs = itertools.pairwise(offsets)
    each = [int(any(max(p.start, start) < min(p.stop, stop) for p in poisoned)) for start, stop in pairs]
    first = each.index(1) if any(each) else segments
    return [int(any(each)), first if kind in ("int32_first", "flcuda") else 0, *each]


def flag_types(sets: Sequence[Set], device: Device, *, repeats: int, budget_s: float) -> Answer:
    """Measures the search with flags of each type, with more and more tensors invalid."""
    if device.kind == "cpu":
        return {"reason": "the kernels need a GPU"}
    xp = device.xp
    arena = sets[0].arenas[0]
    offsets = [int(offset) for offset in arena.offsets.tolist()]
    segments = len(offsets) - 1
    vectors = np.int64(arena.grad.nbytes // 16)
    blocks = min(-(-int(vectors) // BLOCK), 4096)
    rows = []
    for poison, places in poisons(offsets).items():
        gradients = [each.arenas[0].grad.copy() for each in sets]
        for grad in gradients:
            for place in places:
                grad[place] = math.inf
        works = []
        flags_of = {}
        for kind in FLAGS:
            flags = xp.zeros(2 + segments, np.uint8 if kind == "uint8" else np.int32)
            flags_of[kind] = flags
            reset, find = bench_kernel(f"reset_{kind}"), bench_kernel(f"find_{kind}")

            def search(grad: Any, flags: Any = flags, reset: Any = reset, find: Any = find) -> None:
                reset((1,), (BLOCK,), (flags, np.int32(segments)))
                find((blocks,), (BLOCK,), (flags, grad, arena.offsets, np.int32(segments), vectors))

            runs = [functools.partial(search, grad) for grad in gradients]
            works.append(Work(kind, "flags", runs, "check", int(arena.grad.nbytes)))
        flags_of["flcuda"] = sets[0].parts[0]
        search_own = functools.partial(find_invalid, offsets=arena.offsets, flags=flags_of["flcuda"])
        own: list[Run] = [functools.partial(search_own, grad, ticket=sets[0].ticket) for grad in gradients]
        works.append(Work("flcuda", "flags", own, "check", int(arena.grad.nbytes)))
        found = measured(works, device, repeats=repeats, budget_s=budget_s)
        for kind, flags in flags_of.items():
            expected = expected_flags(kind, places, offsets)
            if flags.tolist() != expected:
                raise AssertionError(f"the flags of {kind} with {poison} invalid are {flags.tolist()}")
        rows.append({"invalid": poison, "ms": {row["name"]: row.get("median_ms") for row in found}})
    return {"bytes": {"uint8": 2 + segments, "int32": 4 * (2 + segments)}, "rows": rows}


def forward_calls(problems: Sequence[ConvolutionProblem], device: Device) -> list[tuple[Any, Any, Any]]:
    """Gives the geometry and the arrays of each call, in memory that is not there: nobody may read or write it."""
    xp = device.xp
    one = xp.zeros(1, devices.DTYPES[problems[0].x_dtype])
    calls = []
    for problem in problems:
        padding = (problem.padding_before, problem.padding_after)
        geometry = convolution_op.Convolution(padding, problem.stride, problem.dilation, problem.groups, problem.math)
        arrays = [
            xp.lib.stride_tricks.as_strided(
                one, problem.shape_of(name), tuple(one.itemsize * step for step in problem.strides_of(name))
            )
            for name in ("x", "w")
        ]
        calls.append((geometry, *arrays))
    return calls


def small_key(x: Any) -> tuple[Any, ...]:
    """The original's key: the width, the batch, and whether it is of 16 bits."""
    return (x.shape[3], x.shape[0], x.dtype == np.float16)


def full_key(geometry: Any, x: Any, w: Any) -> tuple[Any, ...]:
    """Ours, as a call of a layer makes it."""
    raw = convolution_op._raw
    return ("forward", geometry, None, False, None, current_policy(), raw(x), raw(w), convolution_op._NO_ARRAY)


def keys(
    problems: Sequence[ConvolutionProblem],
    device: Device,
    *,
    lookups: int,
    step_ms: float | None,
    rounds: int = 200,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Answer:
    """Times keys on the host: made and looked up, and looked up only.

    "kept" is what is looked up first in a call with the filter of the last one: a layer's filter and the input's shape;
    the rest is compared then, which `bench_layer_host.py` measures.

    Args:
        problems: the forward convolutions of a network, as often as each occurs.
        device: of the arrays.
        lookups: how many a step makes.
        step_ms: what such a step takes; None where that is not known.
        rounds: how often all are looked up for one sample each.
        clock: nanoseconds.
    """
    calls = forward_calls(problems, device)
    small = {small_key(x): None for _, x, _ in calls}
    full = {full_key(*call): None for call in calls}
    kept = {(id(w), x.shape): None for _, x, w in calls}
    tables = {"small": small, "full": full, "kept": kept}

    def made_small() -> None:
        for _, x, _ in calls:
            small[small_key(x)]

    def made_full() -> None:
        for geometry, x, w in calls:
            full[full_key(geometry, x, w)]

    def made_kept() -> None:
        for _, x, w in calls:
            kept[id(w), x.shape]

    def looked_up(name: str, ready: list[Any]) -> Callable[[], None]:
        table = tables[name]

        def run() -> None:
            for key in ready:
                table[key]

        return run

    forms = {
        "small": (made_small, looked_up("small", [small_key(x) for _, x, _ in calls])),
        "full": (made_full, looked_up("full", [full_key(*call) for call in calls])),
        "kept": (made_kept, looked_up("kept", [(id(w), x.shape) for _, x, w in calls])),
    }
    result: Answer = {"problems": len(calls), "lookups_a_step": lookups, "step_ms": step_ms}
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, pair in forms.items():
            for what, run in zip(("made_ns", "lookup_ns"), pair, strict=True):
                start = clock()
                run()
                samples.setdefault((name, what), []).append((clock() - start) / len(calls))
    for name in forms:
        entry: Answer = {what: statistics.median(samples[name, what]) for what in ("made_ns", "lookup_ns")}
        entry["distinct"] = len(tables[name])
        entry["share_of_a_step"] = None if step_ms is None else lookups * entry["made_ns"] / (1e6 * step_ms)
        result[name] = entry
    return result


def lower(problem: ConvolutionProblem) -> ConvolutionProblem:
    """Gives the same convolution of images of half the height."""
    *shape, height, width = problem.x_shape
    return ConvolutionProblem.create(
        problem.direction,
        (*shape, max(1, height // 2), width),
        problem.w_shape,
        dtype=problem.x_dtype,
        padding=list(zip(problem.padding_before, problem.padding_after, strict=True)),
        stride=problem.stride,
        dilation=problem.dilation,
        groups=problem.groups,
        math=problem.math,
    )


def legacy_times(
    problems: Iterable[ConvolutionProblem],
    device: Device,
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[ConvolutionProblem, dict[Hashable, float]]:
    """Times the algorithms among which the original chose, until the time is up; those that work, in milliseconds."""
    begin = clock()
    found: dict[ConvolutionProblem, dict[Hashable, float]] = {}
    for problem in problems:
        if clock() - begin > seconds:
            break
        try:
            report = flcuda.find(
                problem, policy=Policy(), device=device, sources=("legacy",), verify=False, store=False, details=False
            )
        except (CudnnNotSupportedError, ValueError):
            continue
        times = {row.choice.identity: row.timing.median_ms for row in report.usable if row.timing is not None}
        if times:
            found[problem] = times
    return found


def taken_for_one(
    asked: Iterable[tuple[Hashable, ConvolutionProblem, int]],
    times: Mapping[ConvolutionProblem, Mapping[Hashable, float]],
) -> Answer:
    """Says what it costs when problems of one key all get the algorithm that was found for the first.

    Args:
        asked: key, problem and how often it counts, in the order in which they come.
        times: of each problem, milliseconds by algorithm; problems that it lacks are left out.

    Returns:
        The number of problems, of keys, of problems that get another algorithm than their best ("other") and of those
        that cannot run it ("refused"); of what runs the total with the best and with the given algorithms, and the
        largest ratio of the two.
    """
    first: dict[Hashable, Hashable] = {}
    answer: Answer = {"problems": 0, "keys": 0, "other": 0, "refused": 0, "best_ms": 0.0, "ms": 0.0, "worst": 1.0}
    for key, problem, count in asked:
        if problem not in times:
            continue
        own = times[problem]
        best = min(own, key=own.__getitem__)
        given = first.setdefault(key, best)
        answer["problems"] += 1
        if given not in own:
            answer["refused"] += 1
            continue
        answer["other"] += given != best
        answer["best_ms"] += count * own[best]
        answer["ms"] += count * own[given]
        answer["worst"] = max(answer["worst"], own[given] / own[best])
    answer["keys"] = len(first)
    return answer


def wrong_choices(problems: Sequence[ConvolutionProblem], device: Device, *, seconds: float) -> Answer:
    """Measures what the small key costs.

    In "shared" all layers have one cache a direction; in "a layer", as in the original, each layer has its own, and
    meets images of half the height after the full ones. In both every key but the small one finds the best.

    Args:
        problems: of a network, as often as each occurs.
        device: where.
        seconds: for all searches together.
    """
    if device.kind == "cpu":
        return {"reason": "cuDNN's algorithms need a GPU"}
    counts = Counter(problems)
    halves = {problem: lower(problem) for problem in counts}
    times = legacy_times([*counts, *halves.values()], device, seconds=seconds)

    def key(problem: ConvolutionProblem) -> Hashable:
        return (problem.direction, problem.x_shape[3], problem.x_shape[0])

    pairs = [(p, each, n) for p, n in counts.items() if p in times for each in (p, halves[p])]
    return {
        "asked": 2 * len(counts),
        "timed": len(times),
        "shared": taken_for_one([(key(p), p, n) for p, n in counts.items()], times),
        "a layer": taken_for_one(pairs, times),
    }


def returning(one: Set, wait: Run, *, count: int, repeats: int, clock: Callable[[], float]) -> list[Answer]:
    """Times steps on the host's clock, with the read that returning False needs and without.

    Once of the kernels alone, once of DynamicScaler, whose call that returns False also makes a step of several calls.
    """
    rows = []
    place = one.arenas[-1].segments[-1].offset
    kept = one.arenas[-1].grad[place : place + 1].copy()

    def reading() -> bool:
        one.check_and_update()
        return int(one.flags[0]) == 0

    ways = {"check, update": (one.check_and_update, reading), "DynamicScaler": (one.whole, one.stepwise)}
    for gradients in ("valid", "invalid"):
        if gradients == "invalid":
            one.arenas[-1].grad[place] = math.inf
        samples: dict[tuple[str, bool], list[float]] = {}
        for _ in range(repeats):
            for what, pair in ways.items():
                for read, run in zip((False, True), pair, strict=True):
                    run()
                    wait()
                    start = clock()
                    for _ in range(count):
                        run()
                    wait()
                    samples.setdefault((what, read), []).append((clock() - start) / count)
        rows += [
            {"what": what, "gradients": gradients, "read": read, "wall_us": 1e6 * statistics.median(taken)}
            for (what, read), taken in samples.items()
        ]
    one.arenas[-1].grad[place : place + 1] = kept
    return rows


def recorded(folder: Path, pattern: str) -> list[tuple[str, Answer]]:
    """Reads the results of other benchmarks."""
    return [(path.name, json.loads(path.read_text())["result"]) for path in sorted(folder.glob(pattern))]


def regrets(folder: Path) -> list[Answer]:
    """Sums up what `bench_finder.py regret` found."""
    rows = []
    for name, result in recorded(folder, "finder_regret_*.json"):
        repetition = result["repetition"]
        fields = ("times", "changes", "chances", "mean_regret", "largest_regret", "largest_total_regret")
        rows.append(
            {"file": name, "precision": result["precision"], **{field: repetition.get(field) for field in fields}}
        )
    return rows


def ablation_step_ms(folder: Path) -> float | None:
    """Gives the milliseconds of a step that `bench_flashlight_ablation.py` found for (c)."""
    for _, result in recorded(folder, "flashlight_ablation*.json"):
        for row in result["rows"]:
            if row["variant"] == "c":
                return float(row["step_ms"])
    return None


def of_ablation(folder: Path) -> Answer | None:
    """Gives what returning False costs in a whole step, which `bench_flashlight_ablation.py` measures."""
    for name, result in recorded(folder, "flashlight_ablation*.json"):
        return {"file": name, **result["cost_of_returning_false"]}
    return None


def questions(args: argparse.Namespace, device: Device) -> Answer:
    sets = sets_of(args.network, "float32", device)
    named = args.network if args.network in ("resnet18", "resnet34") else "resnet18"
    problems = flcuda.problems(named, batch=args.batch, distinct=False)
    forward = [problem for problem in problems if problem.direction == "forward"]
    repeats = max(5, args.repeats // 5)
    return {
        "flags": flag_types(sets, device, repeats=args.repeats, budget_s=args.seconds),
        "key": {
            "network": named,
            **keys(forward, device, lookups=len(problems), step_ms=ablation_step_ms(args.results)),
        },
        "wrong_choices": wrong_choices(problems, device, seconds=args.find_seconds),
        "returning_false": {
            "alone": returning(
                sets[0],
                lambda: devices.synchronize(device),
                count=args.calls,
                repeats=repeats,
                clock=time.perf_counter,
            ),
            "whole_step": of_ablation(args.results),
        },
        "regret": regrets(args.results),
    }


# --- the command ------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> Answer:
    device = devices.resolve(args.device)
    notes: list[str] = []
    torch = torch_or_none(notes)
    compiled = compiled_ways(torch) if torch is not None and args.compile and device.kind == "cuda" else None
    tables = []
    with device.use():
        for precision in args.precision or PRECISIONS:
            note(f"{args.network}, {precision}")
            found = table(
                args.network,
                precision,
                device,
                torch,
                repeats=args.repeats,
                budget_s=args.seconds,
                compiled=compiled,
            )
            tables.append(found)
            give_back(device, torch)
        notes += cupy_mistakes(device)
        note("questions")
        asked = questions(args, device)
    return {
        "network": args.network,
        "repeats": args.repeats,
        "l2_bytes": timing.l2_bytes(device),
        "tables": tables,
        "questions": asked,
        "notes": notes,
        "machine_line": machine_line(machine()),
    }


def number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def show_table(found: Answer) -> None:
    print(
        f"\n{found['precision']}: {found['parameters']:,} parameters in {found['tensors']} tensors, "
        f"{len(found['arenas'])} arenas, {found['sets']} sets; bytes: check {found['bytes']['check']:,}, "
        f"step {found['bytes']['step']:,}"
    )
    print(f"  {'':<57} {'us':>9} {'10-90 %':>19} {'GB/s':>7} {'ratio':>8} {'waits':>5} {'kernels':>7} {'host us':>9}")
    for of in ("check", "step"):
        for row in (row for row in found["rows"] if row["of"] == of):
            name = f"{of:<6}{row['side']:<7} {row['name']}"
            if "error" in row:
                print(f"  {name:<57} {row['error']}")
                continue
            low, high = 1e3 * row["low_ms"], 1e3 * row["high_ms"]
            waits, kernels = ("?" if row[field] is None else row[field] for field in ("waits", "kernels"))
            print(
                f"  {name:<57} {1e3 * row['median_ms']:9.1f} {low:9.1f}-{high:9.1f} {row['gb_per_s']:7.0f} "
                f"{number(row.get('ratio'), 2):>8} {waits:>5} {kernels:>7} {row['host_us']:9.1f}"
                f"{'' if row['queued'] else '  (the host waits within)'}"
            )
    for bar in found["bars"]:
        verdict = {None: "not known", True: "met", False: "NOT MET"}[bar["met"]]
        print(
            f"  {bar['of']}: {number(bar['to_the_copy'], 3)} times the copy, {number(bar['to_the_kernel'], 3)} times "
            f"the kernel; at most {bar['at_most']}: {verdict}"
        )
    if found["any_invalid"]:
        print("  NOT VALID: the gradients were found invalid")


def question_rows(found: Answer) -> list[tuple[str, str, str]]:
    """Lists the answers: the question, what was tried, and what was found."""
    rows: list[tuple[str, str, str]] = []
    question = "flags as bool or int"
    flags = found["flags"]
    if "reason" in flags:
        rows.append((question, "uint8, int32", f"not measured: {flags['reason']}"))
    for entry in flags.get("rows", ()):
        times = ", ".join(f"{kind} {number(None if ms is None else 1e3 * ms, 1)}" for kind, ms in entry["ms"].items())
        rows.append((question, f"us, invalid: {entry['invalid']}", times))
    if "bytes" in flags:
        size = flags["bytes"]
        rows.append((question, "bytes that the host would read", f"uint8 {size['uint8']}, int32 {size['int32']}"))
    question = "key of all dimensions"
    key = found["key"]
    for kind, words in (
        ("small", "width, batch, 16 bits"),
        ("full", "everything"),
        ("kept", "a call's filter and shape"),
    ):
        entry = key[kind]
        share = "" if entry["share_of_a_step"] is None else f", {entry['share_of_a_step']:.4%} of a step"
        times = f"{entry['made_ns']:.0f} ns made and looked up, {entry['lookup_ns']:.0f} ns looked up{share}"
        rows.append((question, words, f"{times}; tells {entry['distinct']} of {key['problems']} calls apart"))
    rows.append((question, "under graph replay", "none is looked up"))
    wrong = found["wrong_choices"]
    if "reason" in wrong:
        rows.append((question, "what the small one costs", f"not measured: {wrong['reason']}"))
    for name, words in (("shared", "small, one cache"), ("a layer", "small, one a layer, two heights")):
        if name in wrong:
            rows.append((question, words, cost_of_key(wrong[name])))
    question = "returning False"
    for row in found["returning_false"]["alone"]:
        how = f"{row['what']}, {row['gradients']}, {'a read' if row['read'] else 'no read'}"
        rows.append((question, how, f"{row['wall_us']:.1f} us by wall clock"))
    whole = found["returning_false"]["whole_step"]
    text = "bench_flashlight_ablation.py has not been recorded"
    if whole is not None:
        text = f"{whole['images_per_s']:.1f} images/s, {whole['step_ms']:.3f} ms ({whole['file']})"
    rows.append((question, "in training", text))
    question = "trusting a one-time find"
    for row in found["regret"]:
        changes = f"changed in {row['changes']} of {row['chances']} repeats"
        regret = f"regret of the whole network at most {number(row['largest_total_regret'])} ({row['file']})"
        rows.append((question, row["precision"], f"{changes}, {regret}"))
    if not found["regret"]:
        rows.append((question, "", "bench_finder.py regret has not been recorded"))
    return rows


def cost_of_key(cost: Answer) -> str:
    extra = cost["ms"] / cost["best_ms"] - 1 if cost["best_ms"] else 0.0
    return (
        f"{cost['keys']} keys for {cost['problems']} problems: {cost['other']} get another algorithm than their best "
        f"({cost['best_ms']:.2f} ms become {cost['ms']:.2f}, {extra:+.1%}; one {cost['worst']:.2f} times), "
        f"{cost['refused']} one that cannot run"
    )


def show_questions(found: Answer) -> None:
    rows = question_rows(found)
    print("\nThe reviewers' questions")
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    last = ""
    for question, tried, answer in rows:
        print(f"  {'' if question == last else question:<{widths[0]}}  {tried:<{widths[1]}}  {answer}")
        last = question


def show(result: Answer) -> None:
    print(result["machine_line"])
    print(f"{result['network']}; second-level cache {result['l2_bytes'] / 2**20:.0f} MiB")
    for found in result["tables"]:
        show_table(found)
    show_questions(result["questions"])
    for line in result["notes"]:
        print(line)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--network", choices=NETWORKS, default="resnet34")
    made.add_argument("--precision", choices=PRECISIONS, action="append", help="by default all")
    made.add_argument("--batch", type=int, default=128, help="of the keys")
    made.add_argument("--repeats", type=int, default=50)
    made.add_argument("--seconds", type=float, default=2.0, help="for the samples of each work")
    made.add_argument("--calls", type=int, default=100, help="between two waits for the device, of returning False")
    made.add_argument("--find-seconds", type=float, default=20.0, help="for what the choices of the small key cost")
    made.add_argument("--no-compile", dest="compile", action="store_false", help="leave out what torch.compile makes")
    made.add_argument("--results", type=Path, default=RESULTS, help="of the benchmarks that are pointed to")
    made.add_argument("--device", default="cuda")
    made.add_argument("--json", action="store_true")
    return made


def main(words: Sequence[str] | None = None) -> None:
    args = parser().parse_args(words)
    result = run(args)
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        show(result)


if __name__ == "__main__":
    main()
