"""The check of the gradients and the optimizer's step over a network's parameters, beside the memory's own time.

For each precision, over ResNet-34's 21.8 M parameters in flcuda's arenas:

    floors    reading the gradients' bytes once, and moving the bytes of check and update once: by a copy on the device
              of half as many bytes (it reads them and writes them), and by a kernel that reads, or reads and writes,
              as much as is needed and does nothing else (`kernels/scaler.cu`; the best of several launch shapes)
    flcuda    the check alone; check, then unscale and SGD with momentum and weight decay in one pass; the same through
              optim.SGD with batch norm's statistics and the scaler's rule
    torch     its foreach check that unscales; SGD plain, foreach and fused; both together as GradScaler calls them; a
              loop over the tensors with a read by the host each, and without
    cupy      such loops

PyTorch runs in the same process, on the same memory: its tensors are views of the arenas, of the arenas' dtype. So in
16 bits its SGD keeps neither float32 masters nor float32 momentum, and moves fewer bytes than ours. Its check is asked
with an inverse scale of 1, with which it still writes what it has read.

Times are medians of device events by flcuda.timing; all works take turns sample by sample, and several sets of arenas
take turns too, so that none lies in the second-level cache. A work is queued before the GPU begins, unless the host
waits within it (`queued` false): then its time is the host's as well. `host_us` is what a call keeps the host. `ratio`
is the median over the smaller floor.

Then the questions of flashlight's reviewers, in one table: uint8 or int32 flags (kernels that differ in nothing else),
a key of width and batch or the full one (nanoseconds of the host), what returning False costs (with and without the
read by the host), and the regret of a one-time find, which `bench_finder.py regret` measured before.

Run: python bench/bench_scaler.py [--precision float32 ...] [--json]
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from networks import NETWORKS, network
from record import RESULTS, machine, machine_line

import flcuda
from flcuda import device as devices
from flcuda import kernel_loader, timing
from flcuda.device import Device
from flcuda.finder.policy import current_policy
from flcuda.finder.problem import ConvolutionProblem
from flcuda.ops import convolution as convolution_op
from flcuda.ops.finite import find_invalid, new_ticket
from flcuda.ops.flags import join_flags
from flcuda.ops.optimizer import scaler_update, sgd_update
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
BLOCKS_PER_PROCESSOR = (4, 8, 16, 32)
"""Launch shapes of the floors' kernels that are tried."""

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
        nbytes: that it must move; 0 where nobody counted.
    """

    name: str
    side: str
    runs: Sequence[Run]
    of: str
    nbytes: int = 0


# --- flcuda's side ----------------------------------------------------------------------------------------------------


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
            for parameter, segment in zip(arena.parameters, arena.segments, strict=True):
                part = slice(segment.offset, segment.offset + segment.size)
                arena.grad[part] = xp.asarray(values[part].astype(arena.dtype))
                parameter.grad = parameter.buffer
        self.velocity = [devices.zeros((a.size,), a.master.dtype, device=device) for a in self.arenas]
        self.decay = [xp.ones(len(a.segments), np.float32) for a in self.arenas]
        self.lr = xp.full(1, LR, np.float64)
        self.scale = xp.full(1, SCALE, np.float64)
        self.inv_scale = xp.full(1, 1 / SCALE, np.float64)
        self.counters = xp.zeros(3, np.int64)
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

    def whole(self) -> None:
        """Does what a scaler does after the backward."""
        self.check()
        self.optimizer.inv_scale = self.inv_scale
        self.optimizer.step(flags=self.flags)
        scaler_update(self.scale, self.inv_scale, self.counters, self.flags, max_scale=SCALE)


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
        Work("the same by optim.SGD, statistics, rule", "flcuda", [each.whole for each in sets], "step", step),
    ]


def cupys(sets: Sequence[Set], device: Device) -> list[Work]:
    """The loops over the tensors: CuPy's, or NumPy's on the CPU."""
    xp = device.xp
    gradients = [each.gradients() for each in sets]

    def reading(tensors: list[Any]) -> bool:
        return all([bool(xp.isfinite(tensor).all()) for tensor in tensors])  # noqa: C419 - reads every one

    def launching(tensors: list[Any]) -> None:
        for tensor in tensors:
            xp.isfinite(tensor).all()

    return [
        Work(f"isfinite: a loop {how}", xp.__name__, [functools.partial(call, each) for each in gradients], "check")
        for how, call in (("with a read each", reading), ("without reads", launching))
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

    def reading(memory: Any, blocks: int) -> None:
        read((blocks,), (BLOCK,), (memory, vectors, np.uint32(0x9E3779B9), sink))

    def moving(memory: Any, blocks: int) -> None:
        reading(memory, blocks)
        a, b, out = (memory[check * begin :] for begin in (1, 1 + ratio, 1 + 2 * ratio))
        move((blocks,), (BLOCK,), (memory, a, b, out if copies_out else np.uint64(0), vectors, np.uint32(0)))

    for per_processor in BLOCKS_PER_PROCESSOR:
        blocks = per_processor * int(devices.device_model(device)["sm_count"])
        for name, call, of, nbytes in (
            ("read only", reading, "check", check),
            ("read only, then read and write", moving, "step", step),
        ):
            runs = [functools.partial(call, each, blocks) for each in scratch]
            works.append(Work(f"{name}, {per_processor} blocks a processor", "floor", runs, of, nbytes))
    return works


# --- PyTorch's side ---------------------------------------------------------------------------------------------------


class TorchSet:
    """The same arenas as PyTorch's tensors, one a parameter."""

    def __init__(self, torch: Any, one: Set) -> None:
        self.torch = torch
        self.gradients: list[list[Any]] = []
        self.parameters: list[Any] = []
        for arena in one.arenas:
            grad, data = (flat_tensor(torch, flat) for flat in (arena.grad, arena.data))
            parts = [slice(s.offset, s.offset + s.size) for s in arena.segments]
            self.gradients.append([grad[part] for part in parts])
            for part, tensor in zip(parts, self.gradients[-1], strict=True):
                parameter = data[part].detach().requires_grad_()
                parameter.grad = tensor
                self.parameters.append(parameter)
        where = self.parameters[0].device
        self.found = torch.zeros(1, device=where)
        self.one = torch.ones(1, device=where)
        how = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
        self.plain = torch.optim.SGD(self.parameters, **how, foreach=False, fused=False)
        self.foreach = torch.optim.SGD(self.parameters, **how, foreach=True)
        self.fused = torch.optim.SGD(self.parameters, **how, fused=True)
        self.fused_amp = torch.optim.SGD(self.parameters, **how, fused=True)
        # as GradScaler.step gives them to an optimizer that is fused
        self.fused_amp.grad_scale = self.one
        self.fused_amp.found_inf = self.found

    def check(self) -> None:
        self.found.zero_()
        for tensors in self.gradients:
            self.torch._amp_foreach_non_finite_check_and_unscale_(tensors, self.found, self.one)

    def check_and_fused(self) -> None:
        self.check()
        self.fused_amp.step()

    def check_read_and_foreach(self) -> None:
        self.check()
        if not self.found.item():
            self.foreach.step()

    def reading(self) -> bool:
        return all([bool(self.torch.isfinite(each).all()) for part in self.gradients for each in part])  # noqa: C419

    def launching(self) -> None:
        for part in self.gradients:
            for each in part:
                self.torch.isfinite(each).all()


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


def torchs(torch: Any, sets: Sequence[Set], device: Device) -> list[Work]:
    if device.kind == "cuda" and torch.cuda.current_stream().cuda_stream != devices.current_stream():
        raise AssertionError("the current streams of PyTorch and CuPy are not the same")
    made = [TorchSet(torch, each) for each in sets]
    return [
        Work("foreach check and unscale", "torch", [each.check for each in made], "check"),
        Work("isfinite: a loop with a read each", "torch", [each.reading for each in made], "check"),
        Work("isfinite: a loop without reads", "torch", [each.launching for each in made], "check"),
        Work("plain SGD", "torch", [each.plain.step for each in made], "step"),
        Work("foreach SGD", "torch", [each.foreach.step for each in made], "step"),
        Work("fused SGD", "torch", [each.fused.step for each in made], "step"),
        Work("check, fused SGD that unscales", "torch", [each.check_and_fused for each in made], "step"),
        Work("check and unscale, a read, foreach SGD", "torch", [each.check_read_and_foreach for each in made], "step"),
    ]


def torch_or_none(notes: list[str]) -> Any:
    try:
        import torch
    except ImportError:
        notes.append("PyTorch is not measured: it is not installed")
        return None
    notes.append(f"torch {torch.__version__}")
    return torch


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(works: Sequence[Work], device: Device, *, repeats: int, budget_s: float) -> list[Answer]:
    """Times works, which take turns; one of a peer that raises has the reason in place of times."""
    reasons: dict[str, str] = {}
    for work in works:
        try:
            # Twice on each set: the first step makes a peer's momentum, and its pool holds the memory from then on.
            for _ in range(2):
                for run in work.runs:
                    run()
            devices.synchronize(device)
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            if work.side not in PEERS:
                raise
            reasons[work.name + work.side] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    able = [work for work in works if work.name + work.side not in reasons]
    times = timing.in_turn([work.runs for work in able], device, repeats=repeats, budget_s=budget_s)
    found = dict(zip([work.name + work.side for work in able], times, strict=True))
    rows: list[Answer] = []
    for work in works:
        row: Answer = {"name": work.name, "side": work.side, "of": work.of}
        got = found.get(work.name + work.side)
        if got is None:
            row["error"] = reasons[work.name + work.side]
        else:
            row.update({name: getattr(got, name) for name in ("median_ms", "low_ms", "high_ms", "samples", "host_us")})
            row["queued"] = got.queued
            if work.nbytes:
                row["nbytes"] = work.nbytes
                row["gb_per_s"] = work.nbytes / got.median_ms / 1e6
        rows.append(row)
    return rows


def with_floors(rows: Sequence[Answer]) -> tuple[dict[str, Answer], list[Answer]]:
    """Finds the floors and puts every row's ratio beside it.

    Returns:
        The floor of "check" and of "step", each with the best copy's time, the best kernel's and the smaller of them,
        "ms"; and the rows, of the floors' kernels only the best each.
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
        found[of] = floor
    kept += [row for row in rows if row["side"] != "floor"]
    for row in kept:
        ms = found[row["of"]]["ms"]
        if "median_ms" in row and ms:
            row["ratio"] = row["median_ms"] / ms
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


def table(name: str, precision: str, device: Device, torch: Any, *, repeats: int, budget_s: float) -> Answer:
    """Measures one precision."""
    sets = sets_of(name, precision, device)
    works = [*floors(sets, device), *ours(sets), *cupys(sets, device)]
    if torch is not None:
        works += torchs(torch, sets, device)
    floors_found, rows = with_floors(measured(works, device, repeats=repeats, budget_s=budget_s))
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
        "any_invalid": bool(int(sets[0].flags[0])),
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

            works.append(Work(kind, "flags", [functools.partial(search, grad) for grad in gradients], "check"))
        flags_of["flcuda"] = sets[0].parts[0]
        search_own = functools.partial(find_invalid, offsets=arena.offsets, flags=flags_of["flcuda"])
        own: list[Run] = [functools.partial(search_own, grad, ticket=sets[0].ticket) for grad in gradients]
        works.append(Work("flcuda", "flags", own, "check"))
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


def returning(one: Set, wait: Run, *, count: int, repeats: int, clock: Callable[[], float]) -> list[Answer]:
    """Times check and update on the host's clock, with the read that returning False needs and without."""
    rows = []
    place = one.arenas[-1].segments[-1].offset
    kept = one.arenas[-1].grad[place : place + 1].copy()
    for gradients in ("valid", "invalid"):
        if gradients == "invalid":
            one.arenas[-1].grad[place] = math.inf

        def ignoring() -> None:
            one.check_and_update()

        def reading() -> bool:
            one.check_and_update()
            return int(one.flags[0]) == 0

        samples: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(repeats):
            for read, run in ((False, ignoring), (True, reading)):
                run()
                wait()
                start = clock()
                for _ in range(count):
                    run()
                wait()
                samples[read].append((clock() - start) / count)
        rows += [
            {"gradients": gradients, "read": read, "wall_us": 1e6 * statistics.median(taken)}
            for read, taken in samples.items()
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
        "returning_false": {
            "check_and_update": returning(
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
    tables = []
    with device.use():
        for precision in args.precision or PRECISIONS:
            note(f"{args.network}, {precision}")
            tables.append(table(args.network, precision, device, torch, repeats=args.repeats, budget_s=args.seconds))
            give_back(device, torch)
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
    print(f"  {'':<61} {'ms':>9}  {'10-90 %':>17} {'ratio':>8} {'host us':>9}")
    for of in ("check", "step"):
        for row in (row for row in found["rows"] if row["of"] == of):
            name = f"{of:<6}{row['side']:<7} {row['name']}"
            if "error" in row:
                print(f"  {name:<61} {row['error']}")
                continue
            print(
                f"  {name:<61} {row['median_ms']:9.4f}  {row['low_ms']:8.4f}-{row['high_ms']:8.4f} "
                f"{number(row.get('ratio'), 2):>8} {row['host_us']:9.1f}"
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


def show_questions(found: Answer) -> None:
    print("\nThe reviewers' questions")
    flags = found["flags"]
    if "reason" in flags:
        print(f"  uint8 or int32 flags: not measured: {flags['reason']}")
    else:
        print(f"  uint8 ({flags['bytes']['uint8']} bytes) or int32 ({flags['bytes']['int32']} bytes) flags, ms:")
        for row in flags["rows"]:
            times = ", ".join(f"{kind} {number(ms)}" for kind, ms in row["ms"].items())
            print(f"    invalid: {row['invalid']:<34} {times}")
    key = found["key"]
    for kind, words in (
        ("small", "width, batch, 16 bits"),
        ("full", "everything"),
        ("kept", "the filter and a shape"),
    ):
        entry = key[kind]
        share = "" if entry["share_of_a_step"] is None else f", {entry['share_of_a_step']:.4%} of a step"
        print(
            f"  key of {words}: {entry['made_ns']:.0f} ns made and looked up, {entry['lookup_ns']:.0f} ns looked up; "
            f"tells {entry['distinct']} of {key['problems']} calls apart{share}"
        )
    print("  under graph replay no key is looked up")
    for row in found["returning_false"]["check_and_update"]:
        read = "with the read" if row["read"] else "without a read"
        print(f"  check and update, {row['gradients']} gradients, {read}: {row['wall_us']:.1f} us by wall clock")
    whole = found["returning_false"]["whole_step"]
    if whole is None:
        print("  in a whole step: bench_flashlight_ablation.py has not been recorded")
    else:
        print(f"  in a whole step: {whole['images_per_s']:.1f} images/s, {whole['step_ms']:.3f} ms ({whole['file']})")
    for row in found["regret"]:
        changes = f"changed in {row['changes']} of {row['chances']} repeats"
        print(
            f"  one-time find, {row['precision']}: {changes}, regret of the whole network at most "
            f"{number(row['largest_total_regret'])} ({row['file']})"
        )
    if not found["regret"]:
        print("  one-time find: bench_finder.py regret has not been recorded")


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
