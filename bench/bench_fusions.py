"""cuDNN's fusions of convolutions with batch norm, at ResNet-34's shapes: what it offers, and what that takes.

A fused graph does, in the convolution's own pass over memory, what else a pass of our own kernels does. For each
pattern, and each convolution of a training step in which it may stand:

    count    how often it stands in a step
    bytes    what the fused form moves less than the convolution and our kernels, each operand once a pass; `saved` is
             that at the speed of a copy (--bandwidth)
    engines  those that cuDNN's heuristics list (modes A and fallback, B where those have nothing): "2 x9" is engine 2
             in nine configurations, "3c" one that compiles its kernel; after "by hand" those that no mode lists and
             that still made a plan; or why there are none

and on a GPU, in microseconds, medians of device events by flcuda.timing with cold operands, in turn:

    fused    the graph with its fastest engine that is right, and what has to follow it: the batch norm's factors out of
             the sums (another graph), or our pass for what the graph leaves
    parts    `flcuda.plan`'s convolution and our kernels for the same, one after the other: what the first has written
             may still be in the cache
    plain    the convolution of these alone
    gain     parts less fused; "a step" is that times count
    bits     whether a second run of the fused graph gave the same bits

Of each graph the first LISTED configurations that need no compiler are run, and --compiled that do. A result counts as
right when its distance from that of the parts is at most TOLERANCE of its length. A process of its own measures: what
an engine's fault ends is begun again without that engine.

The filter gradient with scale, bias and ReLU in front saves nothing by itself: it is the price of the forward one's
not storing what it computes. The stem's images have 8 channels here, in both forms, which a step's have not.

Run: python bench/bench_fusions.py [--precision float16] [--batch 128] [--only NAME] [--json]
     python bench/bench_fusions.py --plan-only [--gpu h200]
"""

import argparse
import contextlib
import json
import math
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from bench_kernels import EPS, Bench, Kept, free
from record import machine, machine_line

import flcuda
from flcuda import device as devices
from flcuda import timing
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import EngineConfig, ExecutionPlan, Graph, OperationGraph, Tensor, build_plans
from flcuda.cudnn.resources import Handle, handle
from flcuda.device import Device
from flcuda.errors import CudnnError
from flcuda.finder.measure import failure_reason
from flcuda.finder.problem import ConvolutionProblem
from flcuda.ops import batch_norm, elementwise
from flcuda.ops.batch_norm import Norm

STAGES = ((64, 4, 3), (128, 8, 4), (256, 16, 6), (512, 32, 3))
"""Channels of a stage, how many times smaller than the image it is, and its blocks."""

LISTED = 16
COMPILED = 2
"""So many configurations of a graph are run: that need no compiler, and that do, which take some 0.3 s to build each,
with reductions behind a data gradient some seconds."""

TOLERANCE = {"float16": 0.01, "bfloat16": 0.05}
COARSE_REPEATS, COARSE_BUDGET_S = 3, 0.01
SILENT_S = 60.0
"""A process that says nothing for so long is ended."""

FINALIZED = ("factor", "offset", "mean", "inverse", "new_mean", "new_variance")

Answer = dict[str, Any]
Run = Callable[[], Any]


# --- where in the network ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A convolution of the network.

    Attributes:
        batch: images.
        channels, size: of x, which is square.
        filters, window, stride: of the convolution; it is padded by half the window.
        counts: how often it stands in a step, by the kind of place: "all" of them; "inner", all but the stem; "second"
            of a block, its input is batch norm and ReLU of the first; "end", its input is the end of a block, batch
            norm, the block's input and ReLU, and goes to the next block's end too; "normalised end", the same where
            the block's input has a batch norm of its own.
    """

    batch: int
    channels: int
    size: int
    filters: int
    window: int
    stride: int
    counts: Mapping[str, int]

    @property
    def padding(self) -> int:
        return self.window // 2

    @property
    def x(self) -> tuple[int, ...]:
        return (self.batch, self.channels, self.size, self.size)

    @property
    def w(self) -> tuple[int, ...]:
        return (self.filters, self.channels, self.window, self.window)

    @property
    def y(self) -> tuple[int, ...]:
        size = (self.size + 2 * self.padding - self.window) // self.stride + 1
        return (self.batch, self.filters, size, size)

    @property
    def geometry(self) -> dict[str, Any]:
        return {"padding": self.padding, "stride": self.stride}

    def problem(self, direction: str, precision: str) -> ConvolutionProblem:
        return ConvolutionProblem.create(direction, self.x, self.w, dtype=precision, layout="nhwc", **self.geometry)

    def __str__(self) -> str:
        window = f"{self.window}x{self.window}"
        return f"{self.channels}x{self.size}x{self.size} k{self.filters} {window} s{self.stride}"


def sites(batch: int, size: int) -> Iterator[Site]:
    """The convolutions of ResNet-34, each kind once."""
    yield Site(batch, 8, size, STAGES[0][0], 7, 2, {"all": 1})
    for stage, (channels, reduction, blocks) in enumerate(STAGES):
        side = -(-size // reduction)
        if stage == 0:
            # Its first block's input is the pool's.
            counts = {"all": 2 * blocks, "inner": 2 * blocks, "second": blocks, "end": blocks - 1}
            yield Site(batch, channels, side, channels, 3, 1, counts)
            continue
        before, larger = STAGES[stage - 1][0], -(-size // STAGES[stage - 1][1])
        yield Site(batch, before, larger, channels, 3, 2, {"all": 1, "inner": 1, "end": 1})
        yield Site(batch, before, larger, channels, 1, 2, {"all": 1, "inner": 1})
        count = 2 * blocks - 1
        counts = {"all": count, "inner": count, "second": blocks, "end": blocks - 2, "normalised end": 1}
        yield Site(batch, channels, side, channels, 3, 1, counts)


# --- the fused graphs -------------------------------------------------------------------------------------------------


class Draft:
    """A fused graph while it is drawn: its tensors by the roles that arrays are known by.

    Args:
        graph: a `Graph`, or what has its methods.
        site: where.
        precision: of images and filters.
    """

    def __init__(self, graph: Any, site: Site, precision: str) -> None:
        self.graph = graph
        self.site = site
        self.precision = precision
        self.roles: dict[str, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.vectors: set[str] = set()
        self.outputs: set[str] = set()

    def image(self, role: str, shape: tuple[int, ...]) -> Any:
        return self._input(role, shape, self.precision)

    def vector(self, role: str, channels: int, dtype: str = "float32") -> Any:
        self.vectors.add(role)
        return self._input(role, (1, channels, 1, 1), dtype)

    def give(self, role: str, tensor: Any, dtype: str = "") -> Any:
        """Makes a result an output: an image or a filter of the precision, or of another dtype a vector."""
        self.outputs.add(role)
        if dtype:
            self.vectors.add(role)
        self.roles[role] = made = self.graph.output(tensor, dtype=dtype or self.precision)
        self.shapes[role] = tuple(made.shape)
        return made

    def _input(self, role: str, shape: tuple[int, ...], dtype: str) -> Any:
        self.roles[role] = made = self.graph.tensor(shape, dtype, layout="nhwc", name=role)
        self.shapes[role] = shape
        return made

    def forward(self, x: Any) -> Any:
        y = self.graph.convolution_forward(x, self.image("w", self.site.w), **self.site.geometry)
        return self.give("y", y)

    def data_gradient(self, dy: Any) -> Any:
        w = self.image("w", self.site.w)
        return self.graph.convolution_backward_data(dy, w, self.site.x, **self.site.geometry)

    def scaled(self, x: Any) -> Any:
        """relu(x * factor + offset): what a batch norm is once its factors are known; they are of 16 bits too."""
        g, c = self.graph, self.site.channels
        product = g.mul(x, self.vector("factor", c, self.precision))
        return g.relu(g.add(product, self.vector("offset", c, self.precision)))

    def normalised(self, x: Any, mark: str = "") -> tuple[Any, tuple[Any, Any, Any]]:
        """The batch norm in the form that cuDNN knows, and the vectors mean, inverse and weight of it."""
        g = self.graph
        mean, inverse, weight, bias = (
            self.vector(f"{role}{mark}", self.site.channels) for role in ("mean", "inverse", "weight", "bias")
        )
        z = g.add(g.mul(g.mul(g.sub(x, mean), inverse), weight), bias)
        return z, (mean, inverse, weight)

    def statistics(self, y: Any) -> None:
        for role, total in zip(("total", "square_sum"), self.graph.generate_statistics(y), strict=True):
            self.give(role, total, "float32")

    def weight_sums(self, dz: Any, x: Any, vectors: tuple[Any, Any, Any], mark: str = "") -> None:
        made = self.graph.batch_norm_backward_weights(dz, x, *vectors)
        for role, tensor in zip(("dweight", "dbias", "of_dz", "of_x", "constant"), made, strict=True):
            self.give(f"{role}{mark}", tensor, "float32")

    def sum_of(self, role: str, image: Any) -> None:
        channels = tuple(image.shape)[1]
        self.give(role, self.graph.reduction("add", image, (1, channels, 1, 1)), "float32")

    def input_gradient(self) -> Any:
        """The batch norm's gradient of its input, dz * of_dz + x * of_x + constant, in front of a gradient."""
        g, k = self.graph, self.site.filters
        dz, y = self.image("dz", self.site.y), self.image("y", self.site.y)
        scaled = g.add(g.mul(dz, self.vector("of_dz", k)), g.mul(y, self.vector("of_x", k)))
        return g.add(scaled, self.vector("constant", k))


def draw_statistics(d: Draft) -> None:
    d.statistics(d.forward(d.image("x", d.site.x)))


def draw_reductions(d: Draft) -> None:
    y = d.forward(d.image("x", d.site.x))
    d.sum_of("total", y)
    d.sum_of("square_sum", d.graph.mul(y, y))


def draw_scaled(d: Draft) -> None:
    d.forward(d.scaled(d.image("x", d.site.x)))


def draw_scaled_statistics(d: Draft) -> None:
    d.statistics(d.forward(d.scaled(d.image("x", d.site.x))))


def draw_scaled_filter(d: Draft) -> None:
    scaled = d.scaled(d.image("x", d.site.x))
    dw = d.graph.convolution_backward_filter(scaled, d.image("dy", d.site.y), d.site.w, **d.site.geometry)
    d.give("dw", dw)


def draw_relu(d: Draft) -> None:
    dx = d.data_gradient(d.image("dy", d.site.y))
    d.give("dz", d.graph.relu_backward(dx, d.image("activation", d.site.x)))


def draw_relu_weights(d: Draft) -> None:
    dx = d.data_gradient(d.image("dy", d.site.y))
    x = d.image("x", d.site.x)
    z, vectors = d.normalised(x)
    d.weight_sums(d.give("dz", d.graph.relu_backward(dx, z)), x, vectors)


def draw_relu_reductions(d: Draft) -> None:
    g = d.graph
    dx = d.data_gradient(d.image("dy", d.site.y))
    x = d.image("x", d.site.x)
    mean, inverse, weight, bias = (d.vector(role, d.site.channels) for role in ("mean", "inverse", "weight", "bias"))
    standard = g.mul(g.sub(x, mean), inverse)
    dz = d.give("dz", g.relu_backward(dx, g.add(g.mul(standard, weight), bias)))
    d.sum_of("dbias", dz)
    d.sum_of("dweight", g.mul(dz, standard))


def draw_end(d: Draft) -> None:
    g = d.graph
    dx = g.add(d.data_gradient(d.image("dy", d.site.y)), d.image("branch", d.site.x))
    x = d.image("x", d.site.x)
    z, vectors = d.normalised(x)
    dz = d.give("dz", g.relu_backward(dx, g.add(z, d.image("residual", d.site.x))))
    d.weight_sums(dz, x, vectors)


def draw_normalised_end(d: Draft) -> None:
    g = d.graph
    dx = g.add(d.data_gradient(d.image("dy", d.site.y)), d.image("branch", d.site.x))
    x, residual = d.image("x", d.site.x), d.image("residual", d.site.x)
    z, vectors = d.normalised(x)
    other, others = d.normalised(residual, "_2")
    dz = d.give("dz", g.relu_backward(dx, g.add(z, other)))
    d.weight_sums(dz, x, vectors)
    d.weight_sums(dz, residual, others, "_2")


def draw_input_data(d: Draft) -> None:
    d.give("dx", d.data_gradient(d.input_gradient()))


def draw_input_filter(d: Draft) -> None:
    dy = d.input_gradient()
    d.give("dw", d.graph.convolution_backward_filter(d.image("x", d.site.x), dy, d.site.w, **d.site.geometry))


def finalize_graph(channels: int, count: int, precision: str) -> Draft:
    """The batch norm's factors out of the sums, which the statistics pass of ours gives with them."""
    d = Draft(Graph(), Site(1, channels, 1, channels, 1, 1, {}), precision)
    given = [d.vector(role, channels) for role in ("total", "square_sum", "weight", "bias")]
    # No engine takes it without the running statistics.
    running = {role: d.vector(role, channels) for role in ("running_mean", "running_variance")}
    made = d.graph.batch_norm_finalize(*given, count=count, epsilon=EPS, **running)
    for role, tensor in zip(FINALIZED, made, strict=True):
        d.give(role, tensor, precision if role in ("factor", "offset") else "float32")
    return d


# --- the parts that they stand for ------------------------------------------------------------------------------------


@dataclass
class Parts:
    """What a fused graph stands for, on one set of operands.

    Attributes:
        run: the convolution and our kernels; gives the results that the graph has to give, by role. A pair is a result
            and what its distance is a share of.
        plain: the convolution alone.
        after: what has to follow the graph, or None.
        rest: what follows the graph and is in `run` too, and what of that is not: the time of the first less that of
            the second counts with the graph's.
    """

    run: Callable[[], Answer]
    plain: Run
    after: Run | None = None
    rest: tuple[Run, Run] | None = None


class Convolutions:
    """The unfused convolutions, each planned once."""

    def __init__(self, bench: Bench, precision: str) -> None:
        self.bench = bench
        self.precision = precision
        self._plans: dict[str, Any] = {}

    def plan(self, site: Site, direction: str) -> Any:
        problem = site.problem(direction, self.precision)
        return self._plans.setdefault(str(problem), None) or self._make(problem)

    def _make(self, problem: ConvolutionProblem) -> Any:
        made = self._plans[str(problem)] = flcuda.plan(problem, device=self.bench.device)
        return made


def norm_of(a: Mapping[str, Any], mark: str = "") -> Norm:
    return Norm(*(a[f"{role}{mark}"] for role in ("weight", "bias", "mean", "inverse")))


def statistics_parts(c: Convolutions, site: Site, a: Answer) -> Parts:
    plan, ticket = c.plan(site, "forward"), batch_norm.new_ticket(site.filters, c.bench.device)

    def run() -> Answer:
        y = plan(a["x"], a["w"])
        return {"y": y, **statistics_of(y, ticket)}

    return Parts(run, lambda: plan(a["x"], a["w"]))


def statistics_of(y: Any, ticket: Any) -> Answer:
    mean, inverse = batch_norm.statistics(y, None, None, None, 0.1, EPS, ticket=ticket)
    # of a mean near 0 the deviation is what matters
    return {"mean_of_y": (mean, inverse), "inverse_of_y": inverse}


def scaled_parts(c: Convolutions, site: Site, a: Answer) -> Parts:
    plan, ticket = c.plan(site, "forward"), batch_norm.new_ticket(site.filters, c.bench.device)

    def run() -> Answer:
        y = plan(batch_norm.apply(a["x"], norm_of(a), relu=True)[0], a["w"])
        return {"y": y, **statistics_of(y, ticket)}

    return Parts(run, lambda: plan(a["x"], a["w"]))


def scaled_filter_parts(c: Convolutions, site: Site, a: Answer) -> Parts:
    plan = c.plan(site, "backward_filter")
    # The forward pass has it already.
    activation = batch_norm.apply(a["x"], norm_of(a), relu=True)[0]
    return Parts(lambda: {"dw": plan(activation, a["dy"])}, lambda: plan(activation, a["dy"]))


def relu_parts(c: Convolutions, site: Site, a: Answer) -> Parts:
    plan, ticket = c.plan(site, "backward_data"), batch_norm.new_ticket(site.channels, c.bench.device)
    norm, count = norm_of(a), math.prod(site.x) // site.channels

    def run() -> Answer:
        dx = plan(a["dy"], a["w"])
        batch_norm.gradient_sums(dx, a["x"], norm, count, relu=True, ticket=ticket)
        return {"unmasked": dx}

    def after() -> Any:
        return batch_norm.gradient_sums(a["dz"], a["x"], norm, count, ticket=ticket)

    return Parts(run, lambda: plan(a["dy"], a["w"]), after)


def relu_sums_parts(c: Convolutions, site: Site, a: Answer) -> Parts:
    plan, ticket = c.plan(site, "backward_data"), batch_norm.new_ticket(site.channels, c.bench.device)
    norm, count = norm_of(a), math.prod(site.x) // site.channels

    def run() -> Answer:
        dx = plan(a["dy"], a["w"])
        _, dweight, dbias = batch_norm.gradient_sums(dx, a["x"], norm, count, relu=True, ticket=ticket)
        return {"unmasked": dx, "dweight": dweight, "dbias": dbias}

    return Parts(run, lambda: plan(a["dy"], a["w"]))


def end_parts(c: Convolutions, site: Site, a: Answer) -> Parts:
    plan, ticket = c.plan(site, "backward_data"), batch_norm.new_ticket(site.channels, c.bench.device)
    norm, count, x = norm_of(a), math.prod(site.x) // site.channels, a["x"]
    _, mask = batch_norm.apply(x, norm, residual=a["residual"], relu=True, keep_mask=True)

    def run() -> Answer:
        dx = plan(a["dy"], a["w"])
        made = batch_norm.backward([dx, a["branch"]], x, norm, relu=True, adds=True, mask=mask, ticket=ticket)
        return {"dz": made.dresidual, "dweight": made.dweight, "dbias": made.dbias}

    def both() -> Any:
        return batch_norm.backward([a["dz"]], x, norm, ticket=ticket).dx

    def first() -> Any:
        return batch_norm.gradient_sums(a["dz"], x, norm, count, ticket=ticket)

    return Parts(run, lambda: plan(a["dy"], a["w"]), None, (both, first))


# --- the patterns -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """A form of fusion.

    Attributes:
        name: what is in one graph.
        kind: the kind of place, of `Site.counts`.
        draw: draws it.
        saved: (images of x's size, images of y's size) that it moves less than the parts do.
        parts: what it stands for; None where nothing is measured.
        finalizes: the sums go through another graph before they are of use.
    """

    name: str
    kind: str
    draw: Callable[[Draft], None]
    saved: tuple[float, float]
    parts: Callable[[Convolutions, Site, Answer], Parts] | None = None
    finalizes: bool = False

    def saved_bytes(self, site: Site, itemsize: int) -> int:
        return int(itemsize * (self.saved[0] * math.prod(site.x) + self.saved[1] * math.prod(site.y)))


PATTERNS = (
    Pattern("convolution, statistics", "all", draw_statistics, (0, 1), statistics_parts, finalizes=True),
    Pattern("convolution, two reductions", "all", draw_reductions, (0, 1), statistics_parts, finalizes=True),
    Pattern("scale, bias, relu, convolution", "second", draw_scaled, (2, 0)),
    Pattern("scale, bias, relu, convolution, statistics", "second", draw_scaled_statistics, (2, 1), scaled_parts, True),
    Pattern("scale, bias, relu, filter gradient", "second", draw_scaled_filter, (0, 0), scaled_filter_parts),
    # The graph reads the activation; our pass has to read as much as before.
    Pattern("data gradient, relu's", "second", draw_relu, (-1, 0), relu_parts),
    Pattern("data gradient, relu's, weight sums", "second", draw_relu_weights, (1, 0), relu_sums_parts),
    Pattern("data gradient, relu's, two reductions", "second", draw_relu_reductions, (1, 0), relu_sums_parts),
    # Our pass reads two gradients, x and a bit of each element and writes one; the graph reads three images more.
    Pattern("data gradient, add, end's relu, weight sums", "end", draw_end, (1 + 1 / 16, 0), end_parts),
    # Ours reads the shortcut as well, the graph does so too.
    Pattern("the same, of a normalised end", "normalised end", draw_normalised_end, (1 + 1 / 16, 0)),
    # Our second pass reads two images and writes one. It goes only if both gradients, which read two instead of one,
    # can do without it; otherwise nothing is saved.
    Pattern("batch norm's gradient, data gradient", "inner", draw_input_data, (0, 2)),
    Pattern("batch norm's gradient, filter gradient", "inner", draw_input_filter, (0, -1)),
)


# --- what cuDNN offers ------------------------------------------------------------------------------------------------


@dataclass
class Offer:
    """What there is for a pattern at a site.

    Attributes:
        draft: the graph with its roles.
        graph: the same, built.
        intermediate: the dtype of what stays inside it: float32 where any engine takes that, else the precision.
        configurations: listed by the heuristics; may be empty.
        refusal: why there are none, as cuDNN and its documentation say.
    """

    draft: Draft
    graph: OperationGraph | None
    intermediate: str
    configurations: list[EngineConfig] = field(default_factory=list)
    refusal: tuple[str, ...] = ()


def offered(
    pattern: Pattern,
    site: Site,
    precision: str,
    *,
    on: Handle | None = None,
    properties: DeviceProperties | None = None,
) -> Offer:
    """Asks for the engines of a pattern at a site, on the GPU of the handle or of the properties."""
    for intermediate in ("float32", precision):
        draft = Draft(Graph(intermediate=intermediate), site, precision)
        pattern.draw(draft)
        offer = Offer(draft, None, intermediate)
        try:
            offer.graph = draft.graph.build(on, properties)
            offer.configurations = offer.graph.configurations()
        except CudnnError as error:
            offer.refusal = reasons(error)
        if offer.configurations:
            break
    return offer


def reasons(error: CudnnError) -> tuple[str, ...]:
    """Gives what stands below the line that repeats the graph; that line where nothing does."""
    lines = [line.strip() for line in error.text.splitlines()]
    return tuple(lines[1:] or lines or [failure_reason(error)])


def compiles(configuration: EngineConfig) -> bool:
    return "runtime_compilation" in configuration.behavior_notes


def engines_text(configurations: Sequence[EngineConfig]) -> str:
    """Says which engines are listed, how often."""
    counts = Counter(f"{each.engine_id}{'c' if compiles(each) else ''}" for each in configurations)
    return ", ".join(f"{engine} x{count}" for engine, count in counts.items())


def by_hand(offer: Offer) -> dict[int, str]:
    """Tries each engine that takes the graph and that no mode lists, its knobs left to cuDNN.

    Returns:
        By number "" for a plan, or why there is none.
    """
    if offer.graph is None:
        return {}
    listed = {each.engine_id for each in offer.configurations}
    found = {}
    for engine in offer.graph.engines():
        if engine.id in listed:
            continue
        try:
            engine.configure().plan()
            found[engine.id] = ""
        except CudnnError as error:
            found[engine.id] = failure_reason(error)
    return found


def planned(
    pattern: Pattern, site: Site, precision: str, properties: DeviceProperties, bandwidth: float, *, every: bool
) -> Answer:
    """Says what is offered, without a run."""
    offer = offered(pattern, site, precision, properties=properties)
    plans = build_plans(chosen(offer.configurations, COMPILED))
    built = [plan for plan in plans if isinstance(plan, ExecutionPlan)]
    hand = by_hand(offer) if every else {}
    saved = pattern.saved_bytes(site, devices.DTYPES[precision].itemsize)
    notes = {each.engine_id: [*each.numerical_notes, *each.behavior_notes] for each in offer.configurations}
    return {
        **row_of(pattern, site),
        "saved_bytes": saved,
        "saved_us": saved / bandwidth / 1e3,
        "intermediate": offer.intermediate,
        "engines": engines_text(offer.configurations),
        "notes": notes,
        "plans": len(built),
        "refused_plans": sorted({failure_reason(plan) for plan in plans if isinstance(plan, CudnnError)}),
        "workspace": max((plan.workspace for plan in built), default=None),
        "build_ms": sum(plan.build_ms for plan in built),
        "by_hand": {str(engine): why for engine, why in hand.items()},
        "refusal": offer.refusal,
    }


def row_of(pattern: Pattern, site: Site) -> Answer:
    return {"pattern": pattern.name, "site": str(site), "count": site.counts[pattern.kind]}


def chosen(configurations: Sequence[EngineConfig], compiled: int) -> list[EngineConfig]:
    """Those that are run, in the heuristics' order."""
    taken: list[EngineConfig] = []
    left = {False: LISTED, True: compiled}
    for each in configurations:
        if left[compiles(each)]:
            left[compiles(each)] -= 1
            taken.append(each)
    return taken


# --- measuring --------------------------------------------------------------------------------------------------------


def operands(bench: Bench, draft: Draft, precision: str) -> Answer:
    """Makes the arrays of a graph's roles, random ones of those that it reads."""
    site = draft.site
    norm = bench.norm(site.channels)
    made: Answer = dict(zip(("weight", "bias", "mean", "inverse"), norm, strict=True))
    if "factor" in draft.roles:
        factor = norm.weight * norm.inverse
        made["factor"] = rounded(bench, factor, precision)
        made["offset"] = rounded(bench, norm.bias - norm.mean * factor, precision)
    for role, shape in draft.shapes.items():
        if role in made:
            continue
        if role in draft.vectors:
            made[role] = devices.empty((shape[1],), np.float32, device=bench.device)
        elif role in draft.outputs:
            made[role] = devices.empty(shape, bench.dtype, device=bench.device, layout=bench.layout)
        else:
            made[role] = bench.normal(shape)
    if "activation" in draft.roles:
        made["x"] = bench.normal(site.x)
        made["activation"] = batch_norm.apply(made["x"], norm, relu=True)[0]
    return made


def rounded(bench: Bench, vector: Any, precision: str) -> Any:
    made = devices.empty(vector.shape, devices.DTYPES[precision], device=bench.device)
    return elementwise.cast(vector, devices.DTYPES[precision], out=made)


def wide(a: Any) -> Any:
    """Gives an array's numbers in float64."""
    # Not by CuPy alone, to which bfloat16 is new.
    return elementwise.cast(a, np.float32).astype(np.float64)


def errors(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, float]:
    """The distance of each result over the length of what it should be."""
    made = {}
    for role, value in wanted.items():
        value, inverse = value if isinstance(value, tuple) else (value, None)
        value, got = wide(value), wide(found[role])
        length = value if inverse is None else 1 / wide(inverse)
        made[role] = math.sqrt(float(((got - value) ** 2).sum()) / max(1e-30, float((length**2).sum())))
    return made


def masked(wanted: Answer, a: Mapping[str, Any]) -> Answer:
    """Masks the gradient that our kernels mask while they read it."""
    if "unmasked" not in wanted:
        return wanted
    made = dict(wanted)
    passes = wide(batch_norm.apply(a["x"], norm_of(a), relu=True)[0]) > 0
    made["dz"] = wide(made.pop("unmasked")) * passes
    return made


class Fused:
    """A plan of a fused graph on sets of operands, with what follows it."""

    def __init__(self, draft: Draft, plan: ExecutionPlan, on: Handle, scratch: Any) -> None:
        self._roles = {tensor.uid: role for role, tensor in draft.roles.items()}
        self._plan, self._on, self._scratch = plan, on, scratch

    def run(self, a: Mapping[str, Any]) -> Run:
        """Gives what launches the plan on a set, whose arrays it keeps."""
        arrays = [a[self._roles[uid]] for uid in self._plan.uids]
        scratch = self._scratch.data.ptr if self._plan.workspace else 0
        return lambda: self._plan.run(self._on, tuple([array.data.ptr for array in arrays]), scratch)


def finalizing(site: Site, precision: str, bench: Bench, on: Handle) -> Callable[[Answer], Run]:
    """Gives what makes a batch norm's factors out of the sums of a set, in the fastest form there is: the only one."""
    draft = finalize_graph(site.filters, math.prod(site.y) // site.filters, precision)
    plan = draft.graph.build(on).configurations()[0].plan()
    fused = Fused(draft, plan, on, devices.workspace(plan.workspace))
    norm = bench.norm(site.filters)

    def of(a: Answer) -> Run:
        made = {role: devices.zeros((site.filters,), np.float32, device=bench.device) for role in FINALIZED[2:]}
        running = {"running_mean": made["new_mean"], "running_variance": made["new_variance"]}
        halves = {role: rounded(bench, norm.bias, precision) for role in FINALIZED[:2]}
        a |= {"mean_of_y": made["mean"], "inverse_of_y": made["inverse"]}
        sums = {role: a[role] for role in ("total", "square_sum")}
        return fused.run({**sums, "weight": norm.weight, "bias": norm.bias, **running, **made, **halves})

    return of


def one_after_the_other(runs: Sequence[Run | None]) -> Run:
    taken = [run for run in runs if run is not None]

    def run() -> None:
        for each in taken:
            each()

    return run


def measured(
    pattern: Pattern,
    site: Site,
    convolutions: Convolutions,
    *,
    skip: Sequence[str],
    compiled: int,
    repeats: int,
    budget_s: float,
    tell: Callable[[Answer], None],
) -> Answer:
    """Runs what is offered for a pattern at a site, and its fastest right form beside the parts."""
    bench, precision, on = convolutions.bench, convolutions.precision, handle()
    assert pattern.parts is not None
    offer = offered(pattern, site, precision, on=on)
    row: Answer = {
        **row_of(pattern, site),
        "engines": engines_text(offer.configurations),
        "intermediate": offer.intermediate,
        "refusal": offer.refusal,
    }
    wanted = [each for each in chosen(offer.configurations, compiled) if each.tag not in skip]
    plans = dict(zip([each.tag for each in wanted], build_plans(wanted), strict=True))
    row["failed"] = {tag: failure_reason(plan) for tag, plan in plans.items() if isinstance(plan, CudnnError)}
    built = {tag: plan for tag, plan in plans.items() if isinstance(plan, ExecutionPlan)}
    if not built:
        return row
    scratch = devices.workspace(max(plan.workspace for plan in built.values()))
    first = operands(bench, offer.draft, precision)
    nbytes = sum(array.nbytes for array in first.values())
    count = timing.buffer_sets(nbytes, timing.l2_bytes(bench.device))
    sets = [first, *(operands(bench, offer.draft, precision) for _ in range(count - 1))]
    # A set gets its finalized vectors before its parts are made of it.
    finalize = finalizing(site, precision, bench, on) if pattern.finalizes else None
    finalized = [None if finalize is None else finalize(a) for a in sets]
    parts = [pattern.parts(convolutions, site, a) for a in sets]
    expected = masked(parts[0].run(), first)
    times: dict[str, float] = {}
    checked: dict[str, Answer] = {}
    for tag, plan in built.items():
        tell({"trying": tag})
        fused = Fused(offer.draft, plan, on, scratch)
        try:
            check = checked_run(fused, offer.draft.outputs, first, finalized[0], expected, bench.device)
            if not all(error <= TOLERANCE[precision] for error in check["errors"].values()):
                row["failed"][tag] = f"wrong: {check['errors']}"
                continue
            runs = [fused.run(a) for a in sets]
            quick = timing.measure(runs, bench.device, warmup=1, repeats=COARSE_REPEATS, budget_s=COARSE_BUDGET_S)
        except CudnnError as error:
            row["failed"][tag] = failure_reason(error)
            continue
        times[tag], checked[tag] = quick.median_ms, check
    tell({"trying": ""})
    row["tried"] = len(built)
    if not times:
        return row
    best = min(times, key=times.__getitem__)
    fused = Fused(offer.draft, built[best], on, scratch)
    works: dict[str, Sequence[Run]] = {
        "fused": [
            one_after_the_other([fused.run(a), last, part.after])
            for a, last, part in zip(sets, finalized, parts, strict=True)
        ],
        "parts": [Kept(part.run) for part in parts],
        "plain": [Kept(part.plain) for part in parts],
    }
    rests = [part.rest for part in parts if part.rest is not None]
    if rests:
        works["both"], works["first"] = ([Kept(rest[i]) for rest in rests] for i in range(2))
    timed = timing.in_turn(list(works.values()), bench.device, warmup=count, repeats=repeats, budget_s=budget_s)
    row |= {f"{name}_us": 1e3 * time.median_ms for name, time in zip(works, timed, strict=True)}
    row |= {
        "graph_us": {tag: 1e3 * ms for tag, ms in times.items()},
        "engine": best,
        "workspace": built[best].workspace,
        "sets": count,
        "spread_us": 1e3 * max(time.spread_ms for time in timed),
        "queued": all(time.queued for time in timed),
        **checked[best],
    }
    if rests:
        row["fused_us"] += row["both_us"] - row["first_us"]
    row["gain_us"] = row["parts_us"] - row["fused_us"]
    row["step_us"] = row["count"] * row["gain_us"]
    return row


def checked_run(
    fused: Fused,
    outputs: Collection[str],
    a: Answer,
    finalize: Run | None,
    expected: Mapping[str, Any],
    device: Device,
) -> Answer:
    """Runs a graph twice on one set: how far its results are off, and whether they have the same bits."""
    run = one_after_the_other([fused.run(a), finalize])
    for role in {*outputs, *expected}:
        # Not a number, so that nothing that is there already counts.
        bits_of(a[role])[...] = np.iinfo(bits_of(a[role]).dtype).max
    run()
    devices.synchronize(device)
    before = {role: bits_of(a[role]).copy() for role in expected}
    found = errors(a, expected)
    run()
    devices.synchronize(device)
    same = all(bool((bits_of(a[role]) == before[role]).all()) for role in expected)
    return {"errors": found, "same_bits": same}


def bits_of(array: Any) -> Any:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


# --- the process that measures ----------------------------------------------------------------------------------------


def cases_of(only: str, batch: int, size: int, *, measurable: bool) -> list[tuple[Pattern, Site]]:
    """All pairs of a pattern and a site where it may stand."""
    return [
        (pattern, site)
        for pattern in PATTERNS
        if only in pattern.name and (pattern.parts is not None or not measurable)
        for site in sites(batch, size)
        if site.counts.get(pattern.kind)
    ]


def child(stdin: IO[str]) -> None:
    """Measures what it is asked for; says as lines of JSON what it tries and what it found."""
    asked = json.load(stdin)
    device = devices.resolve(asked["device"])
    cases = cases_of(asked["only"], asked["batch"], asked["size"], measurable=True)
    with device.use():
        bench = Bench(device, asked["precision"], "nhwc", None)
        convolutions = Convolutions(bench, asked["precision"])
        for index in asked["cases"]:

            def tell(line: Answer, index: int = index) -> None:
                print(json.dumps({"case": index, **line}), flush=True)

            tell({"trying": ""})
            skip = asked["skip"].get(str(index), [])
            pattern, site = cases[index]
            row = measured(
                pattern,
                site,
                convolutions,
                skip=skip,
                compiled=asked["compiled"],
                repeats=asked["repeats"],
                budget_s=asked["budget"],
                tell=tell,
            )
            free(device, None)
            tell({"row": row})


def lines_of(process: "subprocess.Popen[str]", silent_s: float) -> Iterator[Answer]:
    """Gives what a process says until it ends; ends it when it is silent for too long."""
    said: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line)
        said.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = said.get(timeout=silent_s)
        except queue.Empty:
            process.kill()
            return
        if line is None:
            return
        if line.startswith("{"):
            yield json.loads(line)


def ask(
    request: Answer,
    cases: Sequence[tuple[Pattern, Site]],
    *,
    silent_s: float = SILENT_S,
    command: Sequence[str] = (sys.executable, str(Path(__file__).resolve()), "--child"),
) -> list[Answer]:
    """Has all cases measured, in a new process after each fault.

    Args:
        request: what the child reads, without cases and skip.
        cases: to be measured; each is known by its place.
        silent_s: as for `lines_of`.
        command: starts the child.

    Returns:
        A row of each case, in order; one that could not be measured has "error".

    Raises:
        RuntimeError: a process ended before it began.
    """
    rows: dict[int, Answer] = {}
    skip: dict[int, dict[str, str]] = {}
    while left := [index for index in range(len(cases)) if index not in rows]:
        at, trying = None, ""
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            skipped = {str(index): list(tags) for index, tags in skip.items()}
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write(json.dumps({**request, "cases": left, "skip": skipped}))
                process.stdin.close()
            for line in lines_of(process, silent_s):
                at = line["case"]
                trying = line.get("trying", trying)
                if "row" in line:
                    rows[at] = line["row"]
                    rows[at]["failed"] |= skip.get(at, {})
        if at is None:
            raise RuntimeError(f"the process that measures ended with status {process.returncode} before it began")
        pending = [index for index in left if index not in rows]
        if not pending:
            break
        if at in rows:
            at, trying = pending[0], ""
        why = f"the process ended with status {process.returncode}"
        if trying and trying not in skip.get(at, {}):
            skip.setdefault(at, {})[trying] = why
        else:
            rows[at] = {**row_of(*cases[at]), "error": why, "failed": skip.get(at, {})}
    return [rows[index] for index in range(len(cases))]


# --- what is printed --------------------------------------------------------------------------------------------------


def totals(rows: Sequence[Answer], key: str) -> dict[str, float]:
    """Sums a figure over a step, by pattern."""
    made: dict[str, float] = {}
    for row in rows:
        if row.get(key) is not None:
            made[row["pattern"]] = made.get(row["pattern"], 0.0) + row[key] * (1 if key == "step_us" else row["count"])
    return made


def grouped(rows: Sequence[Answer]) -> Iterator[tuple[str, list[Answer]]]:
    for name in dict.fromkeys(row["pattern"] for row in rows):
        yield name, [row for row in rows if row["pattern"] == name]


ELSEWHERE = ("is not enabled", "Blackwell", "index -1")
"""In refusals of engines that are for other graphs or GPUs."""


def plan_table(rows: Sequence[Answer]) -> Iterator[str]:
    sums = totals(rows, "saved_us")
    for name, members in grouped(rows):
        yield f"{name}: {sums[name]:.0f} us a step of bytes"
        yield f"  {'count':>5} {'saved us':>8}  {'site':<24}engines"
        for row in members:
            hand = ", ".join(engine for engine, why in row["by_hand"].items() if not why)
            text = row["engines"] or "none"
            if row["engines"] and row["intermediate"] != "float32":
                text += " (16-bit intermediates)"
            text += f"; by hand {hand}" if hand else ""
            yield f"  {row['count']:>5} {row['saved_us']:>8.1f}  {row['site']:<24}{text}"
        refusals = Counter(why for row in members for why in row["refusal"] if not any(map(why.count, ELSEWHERE)))
        yield from (f"  none: {why[:80]} ({count} sites)" for why, count in refusals.items())
        reasons = Counter(why for row in members for why in row["by_hand"].values() if why)
        yield from (f"  by hand: {why[:80]} ({count} times)" for why, count in reasons.most_common(3))


def table(rows: Sequence[Answer]) -> Iterator[str]:
    sums = totals(rows, "step_us")
    for name, members in grouped(rows):
        yield f"{name}: {sums[name]:+.0f} us a step" if name in sums else f"{name}: not measured"
        yield f"  {'fused':>6} {'parts':>6} {'plain':>6} {'gain':>6} {'a step':>7} {'bits':>5}  engine  count, site"
        for row in members:
            where = f"{row['count']:>5}  {row['site']}"
            if "gain_us" not in row:
                whys = [row["error"]] if "error" in row else [*row["refusal"], *row["failed"].values()]
                yield f"  {where}: {whys[0].splitlines()[0][:60] if whys else 'no engine'}"
                continue
            figures = " ".join(f"{row[f'{key}_us']:6.1f}" for key in ("fused", "parts", "plain", "gain"))
            same = "same" if row["same_bits"] else "other"
            engine = row["engine"].partition("[")[0].removeprefix("engine")
            held = "" if row["queued"] else " (the host's time)"
            yield f"  {figures} {row['step_us']:7.1f} {same:>5}  {engine:<6}{where}{held}"
    faults = [(row["pattern"], row["site"], tag, why) for row in rows for tag, why in row["failed"].items()]
    for pattern, site, tag, why in faults:
        yield f"left out: {tag.partition('[')[0]} of {pattern}, {site}: {why.splitlines()[0][:60]}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--precision", choices=tuple(TOLERANCE), default="float16")
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--size", type=int, default=224, help="height and width of the images")
    made.add_argument("--only", default="", help="of the patterns, those with this in their names")
    made.add_argument("--plan-only", action="store_true", help="what is offered, for a GPU that need not be here")
    made.add_argument("--gpu", default="h200", help="with --plan-only: a profile's name or file")
    made.add_argument("--bandwidth", type=float, default=4159.0, help="GB/s of a copy, for what is saved")
    made.add_argument("--every", action="store_true", help="with --plan-only: also engines that no mode lists")
    made.add_argument("--compiled", type=int, default=COMPILED, help="configurations of a graph that need a compiler")
    made.add_argument("--repeats", type=int, default=20, help="samples of each")
    made.add_argument("--budget", type=float, default=0.05, help="seconds for each one's samples")
    made.add_argument("--device", default="cuda")
    made.add_argument("--json", action="store_true")
    made.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if args.child:
        child(sys.stdin)
        return
    cases = cases_of(args.only, args.batch, args.size, measurable=not args.plan_only)
    if not cases:
        names = sorted({pattern.name for pattern in PATTERNS})
        sys.exit(f"--only {args.only!r} is in the name of no pattern; they are: {'; '.join(names)}")
    start = time.perf_counter()
    if args.plan_only:
        with DeviceProperties.from_profile(args.gpu) as properties:
            rows = [
                planned(pattern, site, args.precision, properties, args.bandwidth, every=args.every)
                for pattern, site in cases
            ]
    else:
        devices.resolve(args.device)  # what is not here is said here
        words = ("precision", "batch", "size", "only", "compiled", "repeats", "budget", "device")
        rows = ask({word: getattr(args, word) for word in words}, cases)
    key = "saved_us" if args.plan_only else "step_us"
    answer = {
        "precision": args.precision,
        "batch": args.batch,
        "size": args.size,
        "gpu": args.gpu if args.plan_only else None,
        "bandwidth_gb_per_s": args.bandwidth if args.plan_only else None,
        "seconds": time.perf_counter() - start,
        f"a_step_{key}": totals(rows, key),
        "rows": rows,
    }
    if args.json:
        json.dump(answer, sys.stdout, indent=1)
        print()
        return
    if not args.plan_only:
        print(machine_line(machine()))
    print(f"{args.precision} nhwc, batch {args.batch}{f', planned for {args.gpu}' if args.plan_only else ''}")
    print("\n".join(plan_table(rows) if args.plan_only else table(rows)))


if __name__ == "__main__":
    main()
