"""Where the time of a training step goes: by layer and kind, beside what the machine could do at best.

Note [watching]: what is launched between two marks of a timeline belongs to one part of the step. So that a step need
not be written for it, the marks are set from outside while a profile is taken, on its thread only: by the `forward` of
the classes of Functions, by the `backward` of each Function that was recorded (on the object itself), by the `forward`
of the model's modules, which tells the layer, and by the optimizer's `apply`. A convolution is handed a stand-in that
marks each direction. All of it is put back afterwards. What runs between two Functions is the engine's: in backward it
adds gradients, before and after the update the scaler looks at them.

Note [floors]: a part takes at least as long as its bytes at the speed of a copy, which is measured beside it, and as
its operations at the machine's peak. It may take less where arrays lie in a cache, or where an algorithm does without
operations of the direct method.

Note [in-step regret]: the finder measures a convolution alone. In a step its operands lie elsewhere, caches are in
another state and the clock is another. So the finder's best candidates are tried in its place within the step, in turns
of one step each; what the pick takes longer than the best of them there is its regret. Events between the parts let
each begin when the one before has ended; in a CUDA graph it begins as the last blocks of that one leave. So the step is
also captured with each candidate, and the whole of it is timed: some tens of replays of each graph a turn, a few at a
time, as the clock of a GPU at the limit of its power goes up and down within a second. Of ten convolutions each would
add the noise of a whole step: what counts is only what is faster in every turn.
"""

import functools
import importlib
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda import finder, nn, timing
from flcuda.autograd import Function
from flcuda.device import Array, Device
from flcuda.errors import CaptureError, CudnnError, FlcudaError
from flcuda.finder.peaks import Peaks, peaks
from flcuda.finder.problem import ConvolutionProblem, default_math
from flcuda.finder.report import Row, milliseconds, problem_text, shortened
from flcuda.finder.sources import sources_for
from flcuda.ops import bias as bias_ops
from flcuda.ops.convolution import Convolution
from flcuda.ops.cost import CONVOLUTION_KINDS, Cost, nbytes
from flcuda.optim import Optimizer
from flcuda.training.step_graph import CapturedStep

Step = Callable[[], object]

_COPY_BYTES = {"cuda": 1 << 28, "cpu": 1 << 26}
_WALL_SAMPLE_S = 0.3
_MOST_STEPS_A_SAMPLE = 20
_WALL_SAMPLES = 5
# The first two calls run, the third captures.
_WARM_REPLAYS = 5
_REPLAYS = 5
_BURSTS = 4

_SUMS, _CHECK, _OTHER = "gradient sums", "check", "other"
_NO_COST = Cost(_OTHER, 0)
_COLUMNS = {
    "forward": (CONVOLUTION_KINDS["forward"],),
    "data": (CONVOLUTION_KINDS["backward_data"],),
    "filter": (CONVOLUTION_KINDS["backward_filter"],),
    "norm": ("batch norm",),
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step, as often as it was timed.

    Attributes:
        layer: name of the layer, or of the module in which it is; empty outside of the model.
        name: the Function's class, or what else it is.
        direction: "forward", "backward", of convolutions the direction, "bias", or "update".
        cost: what it asks for at least.
        times_ms: of each step.
        problem: of a convolution.
        predicted_ms: what the finder measured for the choice that is used; None where that is not known.
    """

    layer: str
    name: str
    direction: str
    cost: Cost
    times_ms: tuple[float, ...]
    problem: ConvolutionProblem | None = None
    predicted_ms: float | None = None

    @property
    def kind(self) -> str:
        """What it is added up with."""
        return self.cost.kind

    @property
    def ms(self) -> float:
        """The median time."""
        return statistics.median(self.times_ms)

    @property
    def block(self) -> str:
        """The part of the model that it is in: the layer's name up to its last number, else its first word."""
        words = self.layer.split(".")
        numbers = [place for place, word in enumerate(words) if word.isdecimal()]
        # A Sequential within a block is no block of its own.
        while len(numbers) > 1 and numbers[-1] > 1:
            numbers.pop()
        return ".".join(words[: numbers[-1] + 1]) if numbers else words[0]


@dataclass(frozen=True, slots=True)
class Sum:
    """Several parts together.

    Attributes:
        name: what they have in common.
        parts: how many.
        ms: sum of their median times.
        floor_ms: sum of their least times.
        bytes_ms: sum of the least times of their bytes.
        operations_ms: sum of the least times of their operations; 0 where the machine's peak is not known.
    """

    name: str
    parts: int
    ms: float
    floor_ms: float
    bytes_ms: float
    operations_ms: float

    @property
    def times_floor(self) -> float | None:
        """How many times the floor it takes; None without a floor."""
        return self.ms / self.floor_ms if self.floor_ms > 0 else None


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a step goes.

    Attributes:
        device: where it ran.
        parts: in order; what the engine, the check and the host did between Functions is at the end.
        wall_ms: median time of a step that is not watched: many after one another, with one wait at the end.
        host_ms: median time for which such a step kept the host, with nothing queued before it.
        captured_ms: as wall_ms, of the captured step; None when there was none.
        bandwidth: bytes a second of a copy, read and written, in the same run.
        peaks: of the machine; None on the CPU and for a GPU that is not known.
        images: a step; 0 when it was not said.
        queued: whether the host was fast enough that all times are the device's alone.
    """

    device: Device
    parts: tuple[Part, ...]
    wall_ms: float
    host_ms: float
    captured_ms: float | None
    bandwidth: float
    peaks: Peaks | None = field(repr=False)
    images: int = 0
    queued: bool = True

    @property
    def ms(self) -> float:
        """The sum of all parts."""
        return sum(part.ms for part in self.parts)

    def floor_ms(self, part: Part) -> float:
        """Gives the least time of a part. See Note [floors]."""
        return part.cost.floor_ms(self.bandwidth, self._flops(part))

    def limit(self, part: Part) -> str:
        """Says what the least time of a part is of: "bytes", "operations", or nothing where it has none."""
        if self.floor_ms(part) == 0:
            return ""
        least = replace(part.cost, operations=0).floor_ms(self.bandwidth, None)
        return "operations" if self.floor_ms(part) > least else "bytes"

    def by(self, key: Callable[[Part], str]) -> list[Sum]:
        """Adds up parts.

        Args:
            key: the name of the sum that a part belongs to.

        Returns:
            The sums, in the order of their first parts.
        """
        groups: dict[str, list[Part]] = {}
        for part in self.parts:
            groups.setdefault(key(part), []).append(part)
        return [self._sum(name, parts) for name, parts in groups.items()]

    @property
    def kinds(self) -> list[Sum]:
        """The sums of each kind, the dearest first."""
        return sorted(self.by(lambda part: part.kind), key=lambda entry: -entry.ms)

    @property
    def convolutions(self) -> tuple[float, float | None]:
        """Milliseconds of all convolutions, and what the finder predicts for them; None when it measured not all."""
        parts = [part for part in self.parts if part.problem is not None]
        predicted = [part.predicted_ms for part in parts if part.predicted_ms is not None]
        return sum(part.ms for part in parts), sum(predicted) if len(predicted) == len(parts) else None

    def _flops(self, part: Part) -> float | None:
        return None if self.peaks is None else self.peaks.flops.get(part.cost.precision)

    def _sum(self, name: str, parts: Sequence[Part]) -> Sum:
        operations = 0.0
        for part in parts:
            flops = self._flops(part)
            operations += 1e3 * part.cost.operations / flops if flops else 0.0
        return Sum(
            name,
            len(parts),
            sum(part.ms for part in parts),
            sum(self.floor_ms(part) for part in parts),
            sum(1e3 * part.cost.bytes / self.bandwidth for part in parts),
            operations,
        )

    # --- views

    def __str__(self) -> str:
        return "\n".join(
            [self._kind_table(), "", self._block_table(), "", self._dearest_table(10), "", *self._summary()]
        )

    def table(self) -> str:
        """Returns a table of every part, in order."""
        return self._part_table(self.parts, "every part, ms")

    def _dearest_table(self, count: int) -> str:
        parts = sorted(self.parts, key=lambda part: -part.ms)[:count]
        return self._part_table(parts, f"the {len(parts)} dearest parts, ms")

    def _kind_table(self) -> str:
        rows = [
            (
                entry.name,
                str(entry.parts),
                _ms(entry.ms),
                f"{self._percent(entry.ms):.1f}",
                _ms(entry.floor_ms),
                _ms(entry.bytes_ms),
                _ms(entry.operations_ms),
                _times(entry.times_floor),
            )
            for entry in [*self.kinds, self._sum("all", self.parts)]
        ]
        headings = ("by kind, ms", "parts", "time", "%", "floor", "bytes", "oper.", "x floor")
        return _table(headings, rows)

    def _block_table(self) -> str:
        blocks: dict[str, list[Part]] = {}
        for part in sorted(self.parts, key=lambda part: not part.layer):
            blocks.setdefault(part.block, []).append(part)
        rows = []
        for name, parts in blocks.items():
            columns = [sum(part.ms for part in parts if part.kind in kinds) for kinds in _COLUMNS.values()]
            entry = self._sum(name, parts)
            cells = map(_ms, [*columns, max(0.0, entry.ms - sum(columns)), entry.ms, entry.floor_ms])
            rows.append((shortened(name, 12) or "(no layer)", *cells, _times(entry.times_floor)))
        return _table(("by layer, ms", *_COLUMNS, "rest", "time", "floor", "x floor"), rows)

    def _part_table(self, parts: Sequence[Part], title: str) -> str:
        rows = []
        for part in parts:
            floor = self.floor_ms(part)
            what = part.kind.replace("convolution", "conv.") if part.problem else f"{part.name} {part.direction}"
            rows.append(
                (
                    f"{shortened(part.layer, 20):20} {shortened(what, 24)}",
                    _ms(part.ms),
                    f"{self._percent(part.ms):.1f}",
                    _ms(floor),
                    _times(part.ms / floor if floor > 0 else None),
                    self.limit(part),
                )
            )
        return _table((title, "time", "%", "floor", "x floor", "of"), rows)

    def _percent(self, ms: float) -> float:
        return 100 * ms / self.ms if self.ms > 0 else 0.0

    def _summary(self) -> list[str]:
        lines = [f"a step: {_ms(self.wall_ms)} ms{self._rate(self.wall_ms)}"]
        if self.captured_ms is not None:
            lines[0] += f"; captured: {_ms(self.captured_ms)} ms{self._rate(self.captured_ms)}"
        lines.append(f"its parts: {_ms(self.ms)} ms; the host: {_ms(self.host_ms)} ms to launch it")
        took, predicted = self.convolutions
        if predicted:
            lines.append(
                f"its convolutions: {_ms(took)} ms; the finder measured them alone at "
                f"{_ms(predicted)} ms ({took / predicted:.3f})"
            )
        machine = f"a copy moves {self.bandwidth / 1e9:,.0f} GB/s"
        words = dict.fromkeys(part.cost.precision for part in self.parts if part.cost.operations)
        for word in words:
            if self.peaks is not None and word in self.peaks.flops:
                machine += f"; at most {self.peaks.flops[word] / 1e12:,.0f} TFLOP/s in {word}"
        lines.append(machine)
        if not self.queued:
            lines.append("the host was too slow for some parts: their times are the host's as well")
        return lines

    def _rate(self, ms: float) -> str:
        return f" ({1e3 * self.images / ms:,.0f} images/s)" if self.images and ms > 0 else ""

    def to_json(self) -> dict[str, Any]:
        """Returns everything as JSON values; times in milliseconds, sizes in bytes."""
        took, predicted = self.convolutions
        return {
            "device": str(self.device),
            "images": self.images,
            "wall_ms": self.wall_ms,
            "host_ms": self.host_ms,
            "captured_ms": self.captured_ms,
            "parts_ms": self.ms,
            "floor_ms": sum(map(self.floor_ms, self.parts)),
            "queued": self.queued,
            "convolutions_ms": took,
            "convolutions_predicted_ms": predicted,
            "copy_bytes_per_s": self.bandwidth,
            "peak_flops": None if self.peaks is None else dict(self.peaks.flops),
            "kinds": [
                {
                    "kind": entry.name,
                    "parts": entry.parts,
                    "ms": entry.ms,
                    "floor_ms": entry.floor_ms,
                    "bytes_ms": entry.bytes_ms,
                    "operations_ms": entry.operations_ms,
                }
                for entry in self.kinds
            ],
            "parts": [
                {
                    "layer": part.layer,
                    "name": part.name,
                    "direction": part.direction,
                    "kind": part.kind,
                    "ms": part.ms,
                    "times_ms": list(part.times_ms),
                    "bytes": part.cost.bytes,
                    "operations": part.cost.operations,
                    "precision": part.cost.precision,
                    "floor_ms": self.floor_ms(part),
                    "limit": self.limit(part),
                    "problem": None if part.problem is None else str(part.problem),
                    "predicted_ms": part.predicted_ms,
                }
                for part in self.parts
            ],
        }

    def plot(self, path: str | os.PathLike[str] | None = None, title: str = "") -> Any:
        """Draws the time of each kind beside its floor, and of each layer by kind.

        Args:
            path: of a file to write, its kind by its ending (png, svg, pdf); by default none.
            title: above both.

        Returns:
            The matplotlib Figure, which a notebook shows.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the ending is of no kind that matplotlib knows.
            OSError: the file cannot be written.
        """
        try:
            figures = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install 'flcuda[plot]'") from error
        kinds = self.kinds
        blocks = list(dict.fromkeys(part.block for part in self.parts))
        figure = figures.Figure(figsize=(12, 2 + 0.3 * max(len(kinds), len(blocks))), layout="constrained")
        left, right = figure.subplots(1, 2)
        names = [entry.name for entry in kinds]
        left.barh(names, [entry.ms for entry in kinds], color=[f"C{place % 10}" for place in range(len(kinds))])
        left.barh(names, [entry.floor_ms for entry in kinds], height=0.3, color="black", label="floor")
        left.set_title("by kind")
        left.legend()
        starts = dict.fromkeys(blocks, 0.0)
        for place, name in enumerate(names):
            times = [sum(part.ms for part in self.parts if (part.block, part.kind) == (b, name)) for b in blocks]
            labels = [block or "(no layer)" for block in blocks]
            right.barh(labels, times, left=list(starts.values()), color=f"C{place % 10}", label=name)
            starts = {block: starts[block] + took for block, took in zip(blocks, times, strict=True)}
        right.set_title("by layer")
        right.legend(fontsize=7)
        for axes in (left, right):
            axes.invert_yaxis()
            axes.set_xlabel("ms")
        figure.suptitle(title or f"a step of {_ms(self.wall_ms)} ms on {self.device}")
        if path is not None:
            figure.savefig(path)
        return figure


# --- taking one -------------------------------------------------------------------------------------------------------


def profile_step(
    step: Step,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    captured: Step | None = None,
    steps: int = 10,
    warmup: int = 3,
    images: int = 0,
) -> StepProfile:
    """Times the parts of a training step.

    The step is run some `2 * steps + warmup` times and more, and trains each time.

    Args:
        step: does one step, each time the same: forward, backward, update. It must not be captured, nor wait for the
            device.
        model: what it trains; its names become those of the layers.
        optimizer: what updates it.
        captured: the same step captured, for its time as a whole.
        steps: how many are watched, at least 1.
        warmup: steps before the first that is timed, at least 1.
        images: of one step, for rates.

    Returns:
        The profile.

    Raises:
        ValueError: a number is out of range, or the model has no parameters.
        FlcudaError: the step does not do the same each time, or a CUDA graph is being captured.
    """
    for name, value in (("steps", steps), ("warmup", warmup)):
        if value < 1:
            raise ValueError(f"{name}: {value} is less than 1")
    device = _device_of(model)
    with device.use():
        for _ in range(warmup):
            step()
        wall_ms, host_ms = _wall(step, device, min(steps, _WALL_SAMPLES))
        captured_ms = None
        if captured is not None:
            for _ in range(warmup + 1):
                captured()
            captured_ms, _ = _wall(captured, device, min(steps, _WALL_SAMPLES))
        watch = _Watch(model, optimizer, device)
        # The first finds out what the parts are, which takes time of the host.
        watch.record(step)
        records = [watch.record(step) for _ in range(steps)]
        problems = {found.problem for found in watch.found if found.problem is not None}
        predictions = {problem: _predicted(problem, device) for problem in problems}
        return StepProfile(
            device,
            tuple(_parts(watch.found, records, predictions)),
            wall_ms,
            host_ms,
            captured_ms,
            copy_bandwidth(device),
            peaks(device),
            images,
            watch.queued,
        )


def copy_bandwidth(device: Device) -> float:
    """Measures a copy that is far larger than the caches.

    Args:
        device: where; the current one.

    Returns:
        Bytes a second, read and written ones together.
    """
    size = _COPY_BYTES[device.kind]
    if device.kind == "cpu":
        source = np.ones(size, np.uint8)
        to = np.empty_like(source)
        took = timing.measure(lambda: np.copyto(to, source), device, repeats=10)
    else:
        cupy = devices.cupy()
        pair = cupy.zeros((2, size), cupy.uint8)
        took = timing.measure(lambda: pair[0].data.copy_from_device_async(pair[1].data, size), device, repeats=20)
    return 2e3 * size / took.median_ms


def _device_of(model: nn.Module) -> Device:
    for p in model.parameters():
        return p.device
    raise ValueError(f"model: {type(model).__name__} has no parameters")


def _wall(step: Step, device: Device, samples: int) -> tuple[float, float]:
    """Gives the median milliseconds of a step by the clock, and those for which it keeps the host."""

    def timed(count: int) -> tuple[float, float]:
        devices.synchronize(device)
        start = time.perf_counter()
        step()
        launched = time.perf_counter()
        for _ in range(count - 1):
            step()
        devices.synchronize(device)
        return 1e3 * (time.perf_counter() - start) / count, 1e3 * (launched - start)

    count = 1
    if device.kind == "cuda":
        took_ms, _ = timed(1)
        count = max(1, min(_MOST_STEPS_A_SAMPLE, math.ceil(1e3 * _WALL_SAMPLE_S / took_ms)))
    taken = [timed(count) for _ in range(samples)]
    return statistics.median(wall for wall, _ in taken), statistics.median(host for _, host in taken)


def _predicted(problem: ConvolutionProblem, device: Device) -> float | None:
    choice = _stored(problem, device)
    return None if choice is None else choice.median_ms


def _stored(problem: ConvolutionProblem, device: Device) -> finder.Choice | None:
    """Gives the choice by which the layers compute a Problem."""
    sources = tuple(source.name for source in sources_for(device, problem))
    return finder.default_store().get(finder.Key.of(problem, finder.current_policy(), device, sources))


@dataclass(slots=True)
class _Found:
    """A part of a step, as the first watched one showed it."""

    layer: str
    name: str
    direction: str
    cost: Cost = _NO_COST
    problem: ConvolutionProblem | None = None


class _Rest:
    """Time between Functions. What it was may turn out later."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


# Milliseconds of each part by its place, and of the times between them by kind.
_Record = tuple[list[float], dict[str, float]]


def _parts(
    found: Sequence[_Found],
    records: Sequence[_Record],
    predictions: Mapping[ConvolutionProblem, float | None],
) -> Iterator[Part]:
    for place, entry in enumerate(found):
        yield Part(
            entry.layer,
            entry.name,
            entry.direction,
            entry.cost,
            tuple(times[place] for times, _ in records),
            entry.problem,
            None if entry.problem is None else predictions.get(entry.problem),
        )
    for kind in dict.fromkeys(kind for _, rest in records for kind in rest):
        yield Part("", kind, "", Cost(kind, 0), tuple(rest.get(kind, 0.0) for _, rest in records))


class _Watch:
    """Records steps. See Note [watching].

    Attributes:
        found: the parts, in order; known after the first record.
        plans: what to run instead of the layer's own, by the place of a convolution in `found`.
        queued: as in `StepProfile`, for all records but the first.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, device: Device) -> None:
        self.found: list[_Found] = []
        self.plans: Mapping[int, finder.Plan] = {}
        self.queued = True
        self._model = model
        self._optimizer = optimizer
        # Here, since it waits for the device.
        self._update_cost = _NO_COST if optimizer is None else _update_cost(optimizer)
        self._device = device
        self._thread = threading.get_ident()
        self._known = False
        self._timeline: timing.Timeline | _Untimed | None = None
        self._next = 0
        self._open: list[int] = []
        self._modules: list[str] = []
        self._inside = False
        self._phase = _OTHER
        self._rest = _Rest(_OTHER)
        self._layers: dict[int, str] = {}

    def record(self, step: Step) -> _Record:
        """Runs a step and times its parts."""
        self._next, self._phase, self._inside = 0, _OTHER, False
        self._open.clear()
        self._modules.clear()
        devices.synchronize(self._device)
        timeline = self._timeline = timing.Timeline(self._device)
        self._mark_rest()
        try:
            with self._watching():
                step()
            spans = timeline.close()
        finally:
            timeline.release()
            self._timeline = None
        if not self.found:
            raise FlcudaError("step: runs no Function of flcuda, so there is nothing to profile")
        if self._known:
            self.queued = self.queued and timeline.queued
            if self._next != len(self.found):
                raise FlcudaError(f"step: ended after {self._next} parts, and had {len(self.found)} the time before")
        self._known = True
        times = [0.0] * len(self.found)
        rest: dict[str, float] = {}
        for label, ms in spans:
            if isinstance(label, _Rest):
                rest[label.kind] = rest.get(label.kind, 0.0) + ms
            elif isinstance(label, int):
                times[label] += ms
        return times, rest

    def substituted(self, step: Step, plans: Mapping[int, finder.Plan]) -> Step:
        """Returns a step that runs these plans in place of the layers' own, and times nothing; after a record."""

        def run() -> object:
            self._next, self._inside = 0, False
            self._open.clear()
            self._modules.clear()
            self.plans = plans
            self._timeline = _Untimed()
            try:
                with self._watching():
                    return step()
            finally:
                self._timeline = None

        return run

    # --- what is replaced

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._layers = {id(p.data): name.rpartition(".")[0] for name, p in self._model.named_parameters()}
        with ExitStack() as stack:
            for function in _subclasses(Function):
                if "forward" in vars(function):
                    _replace(stack, function, "forward", self._forward_of(vars(function)["forward"]))
            seen: set[int] = set()
            for name, module in list(self._model.named_modules()):
                if id(module) not in seen:
                    seen.add(id(module))
                    _replace(stack, module, "forward", self._within(name, module.forward))
            if self._optimizer is not None:
                _replace(stack, self._optimizer, "apply", self._update_by(self._optimizer))
            yield

    def _forward_of(self, original: Callable[..., Array]) -> Callable[..., Array]:
        @functools.wraps(original)
        def forward(node: Function, *args: Any, **kwargs: Any) -> Array:
            if self._inside or threading.get_ident() != self._thread:
                return original(node, *args, **kwargs)
            self._inside = True
            try:
                return self._forward(original, node, args, kwargs)
            finally:
                self._inside = False

        return forward

    def _forward(
        self, original: Callable[..., Array], node: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Array:
        layer = self._layer_of(args)
        name = type(node).__name__.lstrip("_")
        costs: dict[str, Cost] = {}
        start = len(self.found)

        def watched(value: Any) -> Any:
            return _WatchedConvolution(self, value, layer, name, costs) if isinstance(value, Convolution) else value

        given = tuple(map(watched, args))
        named = {word: watched(value) for word, value in kwargs.items()}
        convolves = any(isinstance(value, _WatchedConvolution) for value in (*given, *named.values()))
        if convolves:
            y = original(node, *given, **named)
        else:
            with self.part(layer, name, "forward"):
                y = original(node, *given, **named)
        if not self._known:
            costs.update(_costs(node, y, args, kwargs))
            for entry in self.found[start:]:
                entry.cost = costs.get(entry.direction, entry.cost)
        if True in node.needs_grad:
            marked = not convolves or (len(node.needs_grad) > 2 and node.needs_grad[2])
            direction = "bias" if convolves else "backward"
            backward = node.backward

            def timed_backward(*grads: Array) -> tuple[Array | None, ...]:
                return self._backward(backward, layer, name, direction if marked else None, costs, grads)

            node.__dict__["backward"] = timed_backward
        return y

    def _backward(
        self,
        original: Callable[..., tuple[Array | None, ...]],
        layer: str,
        name: str,
        direction: str | None,
        costs: Mapping[str, Cost],
        grads: tuple[Array, ...],
    ) -> tuple[Array | None, ...]:
        if self._timeline is None or threading.get_ident() != self._thread:
            return original(*grads)
        self._phase = _SUMS
        if direction is None:
            return original(*grads)
        with self.part(layer, name, direction) as place:
            if not self._known and direction in costs:
                cost = costs[direction]
                self.found[place].cost = replace(cost, bytes=cost.bytes + nbytes(*grads[1:]))
            return original(*grads)

    def _within(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._modules.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                self._modules.pop()

        return forward

    def _update_by(self, optimizer: Optimizer) -> Callable[..., None]:
        original = optimizer.apply

        def apply(*args: Any, **kwargs: Any) -> None:
            # What came after the last backward was no sum of gradients.
            self._rest.kind = self._phase = _CHECK
            with self.part("", type(optimizer).__name__, "update") as place:
                if not self._known:
                    self.found[place].cost = self._update_cost
                original(*args, **kwargs)

        return apply

    def _layer_of(self, args: Sequence[Any]) -> str:
        for value in args:
            layer = self._layers.get(id(value))
            if layer is not None:
                return layer
        return self._modules[-1] if self._modules else ""

    # --- marks

    @contextmanager
    def part(self, layer: str, name: str, direction: str) -> Iterator[int]:
        """Times what is launched inside as the next part; gives its place."""
        place = self._next
        self._next += 1
        if not self._known:
            self.found.append(_Found(layer, name, direction))
        elif place >= len(self.found) or (self.found[place].name, self.found[place].direction) != (name, direction):
            raise FlcudaError(f"step: does not do the same each time: part {place} is now {name} {direction}")
        timeline = self._timeline
        assert timeline is not None
        timeline.mark(place, may_hold=not self._open)
        self._open.append(place)
        try:
            yield place
        finally:
            self._open.pop()
            if self._open:
                timeline.mark(self._open[-1])
            else:
                self._mark_rest()

    def _mark_rest(self) -> None:
        assert self._timeline is not None
        self._rest = _Rest(self._phase)
        self._timeline.mark(self._rest)

    def convolve(
        self,
        stand_in: "_WatchedConvolution",
        direction: str,
        arrays: tuple[Array, Array],
        options: Mapping[str, Any],
        own: Callable[[], Array],
    ) -> Array:
        """Runs a direction of a convolution by its own plan, or by the one that is to be tried."""
        if self._timeline is None:
            return own()
        with self.part(stand_in.layer, stand_in.name, direction) as place:
            plan = self.plans.get(place)
            if plan is None:
                result = own()
            else:
                result = plan(*arrays, out=options.get("out"))
                if options.get("bias") is not None:
                    bias_ops.bias_forward(result, options["bias"])
            if not self._known:
                found = self.found[place]
                found.cost = stand_in.costs.get(direction, found.cost)
                found.problem = _problem(direction, stand_in.geometry, arrays, result, options, self._device)
            return result


class _Untimed:
    """Takes marks and does nothing."""

    def mark(self, label: object, *, may_hold: bool = False) -> None:
        """Does nothing."""


class _WatchedConvolution:
    """Stands in for a Convolution and marks what it does."""

    def __init__(self, watch: _Watch, geometry: Convolution, layer: str, name: str, costs: Mapping[str, Cost]) -> None:
        self.geometry = geometry
        self.layer = layer
        self.name = name
        self.costs = costs
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.geometry, name)

    def forward(self, x: Array, w: Array, **options: Any) -> Array:
        return self._watch.convolve(self, "forward", (x, w), options, lambda: self.geometry.forward(x, w, **options))

    def backward_data(self, dy: Array, w: Array, x_shape: Sequence[int], **options: Any) -> Array:
        own = functools.partial(self.geometry.backward_data, dy, w, x_shape, **options)
        return self._watch.convolve(self, "backward_data", (dy, w), options, own)

    def backward_filter(self, x: Array, dy: Array, w_shape: Sequence[int], **options: Any) -> Array:
        own = functools.partial(self.geometry.backward_filter, x, dy, w_shape, **options)
        return self._watch.convolve(self, "backward_filter", (x, dy), options, own)


def _problem(
    direction: str,
    geometry: Convolution,
    arrays: tuple[Array, Array],
    result: Array,
    options: Mapping[str, Any],
    device: Device,
) -> ConvolutionProblem:
    """Gives the Problem by which the layer found its plan."""
    names = {"forward": "xwy", "backward_data": "ywx", "backward_filter": "xyw"}[direction]
    problem = ConvolutionProblem.from_arrays(
        direction,
        **dict(zip(names, (*arrays, result), strict=True)),
        padding=tuple(zip(*geometry.padding, strict=True)),
        stride=geometry.stride,
        dilation=geometry.dilation,
        groups=geometry.groups,
        accumulate=bool(options.get("accumulate", False)),
        math=geometry.math or default_math(str(result.dtype)),
    )
    if device.kind == "cpu":
        return replace(problem, x_alignment=16, w_alignment=16, y_alignment=16)
    return problem


def _costs(node: Function, y: Array, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Cost]:
    """Asks a Function for its costs; one that has none moves its arrays once."""
    cost: Callable[..., dict[str, Cost]] | None = getattr(node, "cost", None)
    if cost is not None:
        return cost(y, *args, **kwargs)
    arrays = [value for value in args if hasattr(value, "nbytes")]
    moved = nbytes(y, *arrays)
    return {"forward": Cost(type(node).__name__, moved), "backward": Cost(type(node).__name__, moved + nbytes(*arrays))}


def _update_cost(optimizer: Optimizer) -> Cost:
    """Counts gradients, masters and states read, masters, states and 16-bit copies written."""
    moved = 0
    for arena in optimizer.arenas:
        moved += nbytes(arena.grad) + 2 * nbytes(arena.master)
        if arena.data is not arena.master:
            moved += nbytes(arena.data)
    for state in optimizer.state_dict().values():
        if isinstance(state, Mapping):
            moved += 2 * nbytes(*state.values())
    return Cost("optimizer", moved)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until the stack closes."""
    own = vars(owner).get(name)
    if own is None:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, own)
    setattr(owner, name, value)


# --- regret -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retried:
    """A convolution that was tried by several candidates within the step.

    Attributes:
        problem: what it is.
        count: how often the step has it.
        labels: of the candidates, the one that is used first.
        alone_ms: what the finder measured for each, once.
        in_step_ms: what each took within the step, all `count` together; NaN for one that failed there.
        captured_ms: what the whole step took as a CUDA graph with each, turn by turn; nothing of one that failed there.
            Empty where it was not captured.
    """

    problem: ConvolutionProblem
    count: int
    labels: tuple[str, ...]
    alone_ms: tuple[float, ...]
    in_step_ms: tuple[float, ...]
    captured_ms: tuple[tuple[float, ...], ...] = ()

    @property
    def regret_ms(self) -> float:
        """What the step takes longer by the candidate that is used than by the best: captured, where it was.

        See Note [in-step regret].
        """
        if self.captured_ms:
            gains = [gain for gain, always in map(self._gain, range(1, len(self.labels))) if always]
            return max(gains, default=0.0)
        return self.in_step_ms[0] - min(ms for ms in self.in_step_ms if not math.isnan(ms))

    def _gain(self, place: int) -> tuple[float, bool]:
        """What the captured step gains by a candidate, and whether it does in every turn; NaN for one that failed."""
        gains = [used - ms for used, ms in zip(self.captured_ms[0], self.captured_ms[place], strict=False)]
        return (statistics.median(gains), min(gains) > 0) if gains else (math.nan, False)


@dataclass(frozen=True, slots=True)
class Regret:
    """What the finder's picks cost in the step. See Note [in-step regret].

    Attributes:
        retried: the dearest convolutions, the dearest first.
        step_ms: the step with the picks: as a CUDA graph, where it was captured, else its parts together.
    """

    retried: tuple[Retried, ...]
    step_ms: float

    @property
    def ms(self) -> float:
        """What all of them together take longer than the best."""
        return sum(entry.regret_ms for entry in self.retried)

    @property
    def share(self) -> float:
        """The same as a share of the step."""
        return self.ms / self.step_ms if self.step_ms > 0 else 0.0

    def __str__(self) -> str:
        lines = ["the dearest convolutions, each by several candidates within the step"]
        for entry in self.retried:
            lines += ["", problem_text(f"{entry.count} x {entry.problem}")]
            for place, label in enumerate(entry.labels):
                in_step = entry.in_step_ms[place]
                found = "failed" if math.isnan(in_step) else f"{_ms(in_step)} ms"
                alone = _ms(entry.count * entry.alone_ms[place])
                used = "  (used)" if place == 0 else ""
                lines.append(f"  {shortened(label, 40):40} {found:>9}, alone {alone} ms{used}")
                if place and entry.captured_ms and entry.captured_ms[place]:
                    gain, always = entry._gain(place)
                    noise = "" if always or gain <= 0 else ", not in every turn"
                    lines.append(f"    the captured step takes {-1e3 * gain:+.1f} us{noise}")
        lines += ["", f"the picks cost {_ms(self.ms) or 0} ms of {_ms(self.step_ms)} ms: {self.share:.2%}"]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns everything as JSON values; times in milliseconds."""
        return {
            "regret_ms": self.ms,
            "share": self.share,
            "step_ms": self.step_ms,
            "convolutions": [
                {
                    "problem": str(entry.problem),
                    "count": entry.count,
                    "regret_ms": entry.regret_ms,
                    "candidates": [
                        {
                            "id": label,
                            "alone_ms": alone,
                            "in_step_ms": None if math.isnan(in_step) else in_step,
                            "captured_step_ms": list(captured),
                        }
                        for label, alone, in_step, captured in zip(
                            entry.labels,
                            entry.alone_ms,
                            entry.in_step_ms,
                            entry.captured_ms or ((),) * len(entry.labels),
                            strict=True,
                        )
                    ],
                }
                for entry in self.retried
            ],
        }


def step_regret(
    step: Step,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    dearest: int = 10,
    best: int = 3,
    rounds: int = 5,
    captured: bool = False,
) -> Regret:
    """Tries the finder's best candidates of the dearest convolutions within a step. See Note [in-step regret].

    Searches for these convolutions again, and stores nothing. A step that falls into none of them is not changed.

    Args:
        step: as for `profile_step`; it has been run before.
        model: likewise.
        optimizer: likewise.
        dearest: how many convolutions: Problems, all layers that share one together.
        best: candidates of each, the one that is used among them.
        rounds: steps with each candidate, and turns of replays.
        captured: also capture the step with each candidate, as `flcuda.capture` does, and compare the whole step; on
            CUDA. Of as many graphs as there are candidates of one convolution memory is held at a time.

    Returns:
        The regrets.

    Raises:
        ValueError: a number is less than 1, or the model has no parameters.
        CaptureError: the step cannot be captured.
        FlcudaError: the step does not do the same each time, or has no convolution.
    """
    for name, value in (("dearest", dearest), ("best", best), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{name}: {value} is less than 1")
    device = _device_of(model)
    with device.use():
        watch = _Watch(model, optimizer, device)
        for _ in range(2):
            times, _ = watch.record(step)
        places: dict[ConvolutionProblem, list[int]] = {}
        for place, found in enumerate(watch.found):
            if found.problem is not None:
                places.setdefault(found.problem, []).append(place)
        if not places:
            raise FlcudaError("step: has no convolution")
        cost = {problem: sum(times[place] for place in at) for problem, at in places.items()}
        problems = sorted(places, key=lambda problem: -cost[problem])[:dearest]
        rows = {problem: _best_rows(problem, device, best) for problem in problems}
        plans = {problem: [_working(row, device) for row in rows[problem]] for problem in problems}
        taken: list[list[_Record]] = [[] for _ in range(best)]
        # One more, since each plan's first run may load kernels.
        for turn in range(rounds + 1):
            for number in range(best):
                watch.plans = {
                    place: plan
                    for problem in problems
                    for plan in plans[problem][number : number + 1]
                    if plan is not None
                    for place in places[problem]
                }
                record = watch.record(step)
                if turn > 0:
                    taken[number].append(record)
        retried = []
        for problem in problems:
            in_step = tuple(
                math.nan
                if plan is None
                else statistics.median(sum(times[place] for place in places[problem]) for times, _ in taken[number])
                for number, plan in enumerate(plans[problem])
            )
            alone = tuple(row.timing.median_ms if row.timing else math.nan for row in rows[problem])
            labels = tuple(row.label for row in rows[problem])
            whole: tuple[tuple[float, ...], ...] = ()
            if captured and device.kind == "cuda":
                whole = _captured_ms(watch, step, places[problem], plans[problem], device, rounds)
            retried.append(Retried(problem, len(places[problem]), labels, alone, in_step, whole))
        whole_ms = [ms for entry in retried for used in entry.captured_ms[:1] for ms in used]
        if whole_ms:
            return Regret(tuple(retried), statistics.median(whole_ms))
        step_ms = statistics.median(sum(times) + sum(rest.values()) for times, rest in taken[0])
        return Regret(tuple(retried), step_ms)


def _captured_ms(
    watch: _Watch,
    step: Step,
    places: Sequence[int],
    plans: Sequence[finder.Plan | None],
    device: Device,
    rounds: int,
) -> tuple[tuple[float, ...], ...]:
    """Times the captured step with each of these plans at these places, in turns."""
    steps: dict[int, CapturedStep[[], object]] = {}
    try:
        for number, plan in enumerate(plans):
            if plan is None:
                continue
            captured = steps[number] = CapturedStep(watch.substituted(step, dict.fromkeys(places, plan)))
            try:
                for _ in range(_WARM_REPLAYS):
                    captured()
            except (CaptureError, CudnnError, MemoryError):
                # Where the one that is used cannot be captured, none can.
                if number == 0:
                    raise
                steps.pop(number).close()
        taken: list[list[float]] = [[] for _ in plans]
        for _ in range(rounds):
            spent = dict.fromkeys(steps, 0.0)
            for burst in range(_BURSTS):
                # Neither is always the first after a wait.
                for number in sorted(steps, reverse=burst % 2 == 1):
                    devices.synchronize(device)
                    start = time.perf_counter()
                    for _ in range(_REPLAYS):
                        steps[number]()
                    devices.synchronize(device)
                    spent[number] += time.perf_counter() - start
            for number, seconds in spent.items():
                taken[number].append(1e3 * seconds / (_BURSTS * _REPLAYS))
    finally:
        for each in steps.values():
            each.close()
    return tuple(map(tuple, taken))


def _best_rows(problem: ConvolutionProblem, device: Device, count: int) -> list[Row]:
    """Searches, and gives the candidate that is used and the best others."""
    policy = finder.current_policy()
    if policy.mode != "find":
        policy = replace(policy, mode="find")
    rows = finder.find(problem, policy=policy, device=device, store=False, details=False).usable
    used = _stored(problem, device)
    first = [row for row in rows if used is not None and row.choice.identity == used.identity]
    return (first[:1] + [row for row in rows if row not in first[:1]])[:count]


def _working(row: Row, device: Device) -> finder.Plan | None:
    """Makes the Plan of a candidate; None where it no longer runs."""
    problem = row.choice.problem
    try:
        plan = row.plan()
        arrays = problem.random_arrays(seed=0, device=device)
        out = arrays.get(problem.outputs[0]) if problem.accumulate else None
        plan(*(arrays[name] for name in problem.inputs), out=out)
    except (CudnnError, MemoryError):
        return None
    return plan


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Sets a table, its first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for cells in (headings, ["-" * width for width in widths], *rows):
        first, *others = zip(cells, widths, strict=True)
        line = " ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])
        lines.append(line.rstrip())
    return "\n".join(lines)


def _ms(value: float) -> str:
    """Returns a time in six characters; nothing for one that is 0, since there is no such part or nobody knows."""
    if value <= 0:
        return ""
    return milliseconds(value)


def _times(factor: float | None) -> str:
    if factor is None:
        return ""
    return f"{factor:.2f}" if factor < 100 else f"{factor:,.0f}" if factor < 1e5 else f"{factor:.0e}"


__all__ = ["Part", "Regret", "Retried", "StepProfile", "Sum", "copy_bandwidth", "profile_step", "step_regret"]
