"""Sources that rewrite a convolution into another Problem, which cuDNN solves faster, and let others solve that one.

- ``space_to_depth``: of a strided convolution one of stride 1, with a block of positions as channels. A first layer, 3
  channels, 7x7, stride 2, becomes 12 channels, 4x4, stride 1, and its padding is gone. Or the channels hold all that a
  row of the filter reads, windows that overlap, and it becomes 42 channels, 4x1. See Note [windows].
- ``padded``: channels and filters become as many as tensor cores want, by zeros.
- ``relayout``: the operands in the other layout: NHWC for tensor cores, NCHW for FFT and Winograd.
- ``matmul``: a filter of one element is a matrix product.

An operand that does not have the form is copied, at each run and so as a part of the time that the finder measures; an
output is computed as such a copy and written back, or added to. Padding that differs before and after, alignments and
gaps between elements are gone in a copy.

Note [few]: a search must not take twice as long for them. So an inner source is asked as if nothing was to be measured,
which costs a few milliseconds, and only some of what it says are offered, `FAST`: the first of each engine, then the
second of each, since cuDNN lists an engine made for Hopper behind several others with all their knobs. Of the legacy
algorithms, which are few, all are. Plans that need a compiler take a quarter of a second and more, so there is none of
them under the effort "fast". And there a rewrite is only tried where it is likely to pay, as each source says; under
"wide" wherever it is possible, with more candidates.

Note [paying]: a copy costs bytes, and what it may gain is a part of the convolution's time. An H200 does some 180
operations for each byte in 16 bits, 15 in float32. If a kernel for odd channels or in the wrong layout takes a few
times the time of another, there is something to gain from `PAYING` operations a byte of the copies on: an estimate,
which only decides what is tried.

Note [windows]: of a first layer, the windows have enough channels to fill the vectors and tiles of tensor-core engines,
the filter has no zeros along the width, and each x is copied kernel width / stride times. "folded": windows of the
width, and blocks of the others; "kept": only the windows, and the other strides stay. On an H200 with cuDNN 9.19, the
layer of ResNet (batch 128, 224x224), ms, forward and filter gradient, to which comes the copy (158 MB of 48 channels of
16 bits, 211 of 64 or of 32 kept, 54 of the block; 38 are read):

    =========================  ===========  ===========  ===========  ===========
    channels                   float16      bfloat16     TF32         float32
    =========================  ===========  ===========  ===========  ===========
    as given: 3                0.288 0.297  0.890 0.580  0.785 0.895  1.454 1.603
    padded: 4                  0.206 0.217  0.889 0.574  0.700 0.836
    block: 12 as 16            0.333 0.244  0.331 0.243  0.424 0.810  1.09  1.69
    windows, folded: 42 as 48  0.172 0.178  0.172 0.177  0.279 0.497  1.043 3.18
    windows, folded: 42 as 64  0.146 0.160  0.144 0.155  0.262 0.502
    windows, kept: 21 as 32    0.147 0.268  0.134 0.265  0.252 0.888  0.951 3.02
    =========================  ===========  ===========  ===========  ===========

So "kept" is for the forward direction, and without tensor cores nothing else is, with no channels added. There is no
data gradient of windows: it would have to add what overlaps.

Note [channels]: tensor-core engines load 16 bytes of channels at once: 8 channels of 16 bits, 4 of TF32. Of fewer than
16 channels cuDNN's lists for an H200 have no engine made for Hopper (62 for float16, 67 for TF32), of 16 they have, but
not with a stride. So there are two paddings where channels are few and the stride is 1: to the vector, which copies
less, and to 16. In float16 the legacy algorithms, and only they, have fast kernels for 4 channels: a third padding.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda.device import Device
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.candidate import Candidate, Runner
from flcuda.finder.choice import Choice
from flcuda.finder.copies import VECTOR, Copy, Transfer
from flcuda.finder.graph_problem import GraphProblem, GraphTensor, Operation, Ref
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem, Problem, same_strides
from flcuda.finder.sources.graph import GraphRunner, StagedRunner
from flcuda.finder.sources.staging import split_padding

FAST = 5
"""So many candidates of an inner source are offered. See Note [few]."""

FAST_WINDOWS = 3
"""And so many for each form of Note [windows], which the heuristics know well."""

WIDE = 12
"""So many under the effort "wide"."""

COMPILED = 2
"""So many of them may need a compiler under the effort "wide", none under "fast". A matrix product has no others."""

PAYING = {"tensor_op": 32, "fma": 8}
"""Operations for each byte that the copies move, by math. See Note [paying]."""

FEW_CHANNELS = 32
"""Up to so many channels of a block, space to depth is tried under the effort "fast"."""

MOST_CHANNELS = 1024
"""And so many under "wide"."""

WINDOWED_CHANNELS = {False: 4, True: 15}
"""Up to so many channels of x, windows are tried, by whether the effort is "wide"."""

FILLED = 1.6
"""Windows are padded to whole tiles of an engine where that makes at most so many times their channels."""

_HOPPER_CHANNELS = 16
_QUAD = 4
_TILE_BYTES = 128
_COMPILED = "runtime_compilation"
_BLOCK = 512
_PREFIX = "inner."

Parameters = tuple[tuple[str, int | str], ...]


# --- what becomes of a Problem ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A Problem as another one.

    Attributes:
        problem: the Problem.
        inner: what is solved instead; its operands are those of the Problem, in the same order, under the same names.
        copies: of each operand, its copy; None where the operand itself is used.
        parameters: what tells this rewrite from others of its source, enough to make it again.
        few: so many candidates of an inner source are offered under the effort "fast", but all legacy ones.
        asked: names of the inner sources to ask under "fast"; empty: those that are fast in general.
    """

    problem: ConvolutionProblem
    inner: Problem
    copies: tuple[Copy | None, ...]
    parameters: Parameters
    few: int = FAST
    asked: tuple[str, ...] = ()

    @property
    def copied(self) -> int:
        """Bytes of workspace that the copies take: whole blocks of CuPy's pool."""
        return sum(_room(copy) for copy in self.copies)

    @property
    def is_possible(self) -> bool:
        """Whether the kernels take every copy."""
        return all(copy is None or copy.is_possible for copy in self.copies)

    @property
    def pays(self) -> bool:
        """Whether there may be more to gain than the copies cost. See Note [paying]."""
        moved = sum(copy.nbytes + math.prod(copy.shape) * copy.itemsize for copy in self.copies if copy is not None)
        return self.problem.flops >= PAYING[self.problem.math] * moved


def _room(copy: Copy | None) -> int:
    return 0 if copy is None else -(-copy.nbytes // _BLOCK) * _BLOCK


@dataclass(frozen=True, slots=True)
class _Form:
    """What an operand has to be: a shape, and how it comes from the operand, as `Copy` says it."""

    shape: tuple[int, ...]
    step: tuple[int, ...] | None = None
    factor: tuple[int, ...] | None = None
    shift: tuple[int, ...] | None = None

    def copy_of(self, problem: ConvolutionProblem, name: str, layout: str, *, always: bool = False) -> Copy | None:
        """Makes the copy of an operand; None when it has the form and is packed and aligned, unless `always`."""
        shape, strides = problem.shape_of(name), problem.strides_of(name)
        copy = Copy.create(
            shape,
            strides,
            problem.dtype_of(name),
            layout=layout,
            alignment=problem.alignment_of(name),
            staged_shape=self.shape,
            step=self.step,
            factor=self.factor,
            shift=self.shift,
        )
        same = copy.plain and self.shape == shape and problem.alignment_of(name) >= VECTOR
        packed = same_strides(shape, strides, devices.contiguous_strides(shape, layout))
        return None if same and packed and not always else copy


def _convolution(
    problem: ConvolutionProblem,
    layout: str,
    forms: dict[str, _Form],
    parameters: Parameters,
    **geometry: Any,
) -> Rewrite:
    """Makes a Rewrite into another convolution.

    Args:
        problem: the Problem.
        layout: of all operands of the other one.
        forms: what x, w and y, or their gradients, become.
        parameters: as the attribute.
        geometry: fields of the Problem that change besides.
    """
    copies = tuple(forms[name[-1]].copy_of(problem, name, layout) for name in problem.operands)
    for name, copy in zip(problem.operands, copies, strict=True):
        letter = name[-1]
        shape = forms[letter].shape
        if letter != "y":
            geometry[f"{letter}_shape"] = shape
        geometry[f"{letter}_strides"] = devices.contiguous_strides(shape, layout)
        geometry[f"{letter}_alignment"] = VECTOR if copy is not None else problem.alignment_of(name)
    geometry["accumulate"] = problem.accumulate and copies[-1] is None
    return Rewrite(problem, replace(problem, **geometry), copies, parameters)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _vector(problem: ConvolutionProblem) -> int:
    """Gives the channels that tensor-core engines load at once. See Note [channels]."""
    return VECTOR // devices.DTYPES[problem.dtype_of(problem.operands[0])].itemsize


def _paddings(problem: ConvolutionProblem, channels: int, stride: Sequence[int]) -> tuple[int, ...]:
    """Gives the channels that so many may be padded to, for a convolution of a stride. See Note [channels]."""
    if problem.math == "fma":
        return (channels,)
    vectors = _up(channels, _vector(problem))
    return tuple(sorted({vectors, max(vectors, _HOPPER_CHANNELS)})) if set(stride) == {1} else (vectors,)


def _fillings(problem: ConvolutionProblem, channels: int, rows: str) -> tuple[int, ...]:
    """Gives the channels that those of windows may be padded to. See Note [windows]."""
    if problem.math == "fma":
        return (channels,)
    found = {_up(channels, _HOPPER_CHANNELS)}
    filled = _up(channels, _TILE_BYTES // devices.DTYPES[problem.dtype_of(problem.operands[0])].itemsize)
    if rows == "folded" and filled <= FILLED * channels:
        found.add(filled)
    return tuple(sorted(found))


def _preferred(problem: ConvolutionProblem) -> str:
    return "nhwc" if problem.math == "tensor_op" else "nchw"


def _layouts(problem: ConvolutionProblem, policy: Policy) -> tuple[str, ...]:
    best = _preferred(problem)
    return (best, "nchw" if best == "nhwc" else "nhwc") if policy.effort == "wide" else (best,)


# --- running ----------------------------------------------------------------------------------------------------------


class RewrittenRunner:
    """A runner: copies, the inner runner, and the way back. Of a workspace that is taken once.

    Args:
        rewrite: what is done.
        inner: solves its inner Problem.

    Attributes:
        launch: the inner runner's where nothing is copied. See `Runner`.
    """

    def __init__(self, rewrite: Rewrite, inner: Runner) -> None:
        problem = rewrite.problem
        self._inner = inner
        # of each copy: the operand's place, what makes its array and where in the workspace, and what fills it
        self._copies: list[tuple[int, Callable[[Any, int], Any], int, Transfer | None]] = []
        self._scattering: Transfer | None = None
        last = len(problem.operands) - 1
        start = 0
        for place, copy in enumerate(rewrite.copies):
            if copy is None:
                continue
            if place == last:
                self._scattering = copy.scattering(add=problem.accumulate)
            self._copies.append((place, copy.placing(), start, None if place == last else copy.gathering()))
            start += _room(copy)
        self._room = start
        self._views = None if isinstance(rewrite.inner, ConvolutionProblem) else _views(rewrite.inner)
        self.launch = None if self._copies else getattr(inner, "launch", None)
        self._into = _scratch_taker(inner)
        # what takes no scratch takes a workspace of its own
        self._taken = start + (inner.workspace if self._into is not None else 0)

    def prepare(self) -> None:
        """Loads the kernels of the copies, which the first run would do else, and seem slow."""
        for *_, gathering in self._copies:
            if gathering is not None:
                gathering.prepare()
        if self._scattering is not None:
            self._scattering.prepare()

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory: the copies, and what the inner runner takes."""
        return self._room + self._inner.workspace

    def __call__(self, *operands: Any) -> None:
        """Computes the output from the inputs, on CuPy's current stream.

        Args:
            operands: the inputs and the output in the Problem's order; the output is written, or added to.

        Raises:
            CudnnError: cuDNN refuses to run.
            MemoryError: there is no memory for the workspace.
        """
        host = isinstance(operands[0], np.ndarray)
        memory = np.empty(self._taken, np.uint8) if host else devices.workspace(self._taken)
        given = list(operands)
        for place, placed, start, gathering in self._copies:
            given[place] = placed(memory, start)
            if gathering is not None:
                gathering(given[place], operands[place])
        staged = given[-1]
        if self._into is not None:
            self._into(given, memory[self._room :])
        elif self._views is None:
            self._inner(*given)
        else:
            self._inner(*(_view(array, *view) for array, view in zip(given, self._views, strict=True)))
        if self._scattering is not None:
            self._scattering(operands[-1], staged)


def _scratch_taker(inner: Runner) -> Any:
    """Gives what runs an inner runner with a workspace that is there already; None where it takes its own.

    Only a plan of the graph API does that, and it looks at nothing of an operand but the address.
    """
    return inner.run_in if isinstance(inner, GraphRunner) and not isinstance(inner, StagedRunner) else None


def _views(inner: Problem) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(inner.shape_of(name), inner.strides_of(name)) for name in inner.operands]


def _view(array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Gives a packed array another shape."""
    steps = tuple(step * array.itemsize for step in strides)
    if isinstance(array, np.ndarray):
        return np.lib.stride_tricks.as_strided(array, shape, steps)
    return devices.cupy().ndarray(shape, array.dtype, array.data, steps)


# --- the sources ------------------------------------------------------------------------------------------------------


class RewriteSource:
    """What the four sources share: they say how a Problem may be rewritten, and the rest is here.

    Args:
        inner: the sources that are asked for the inner Problem; by default those of cuDNN.
    """

    name = ""
    devices: tuple[str, ...] = ("cuda",)
    kinds = (ConvolutionProblem,)

    def __init__(self, inner: Sequence[Any] | None = None) -> None:
        self._given = None if inner is None else tuple(inner)
        self._made: dict[str, Any] = {}

    def rewrites(self, problem: ConvolutionProblem, policy: Policy) -> Iterator[Rewrite]:
        """Yields how a Problem may be rewritten, under the policy's effort."""
        raise NotImplementedError

    def rewritten(self, problem: ConvolutionProblem, parameters: dict[str, int | str]) -> Rewrite:
        """Makes the Rewrite of given parameters.

        Raises:
            ValueError, KeyError: there is none.
        """
        raise NotImplementedError

    def candidates(self, problem: Problem, policy: Policy, device: Device) -> Iterator[Candidate]:
        """Yields the first of what the inner sources offer for each rewritten Problem. See Note [few].

        Nothing is run. In the mode "heuristic" there is at most one candidate.

        Args:
            problem: a ConvolutionProblem; for another kind there is nothing.
            policy: mode, effort, determinism and workspace limit.
            device: current for the calling thread.

        Yields:
            Candidates that can be used, as far as the inner sources say; nothing where the rewrite does not apply.
        """
        if not isinstance(problem, ConvolutionProblem):
            return
        for rewrite in self.rewrites(problem, policy):
            within = self._policy(rewrite, policy, device)
            if within is None or not rewrite.is_possible:
                continue
            for source in self._sources(rewrite, policy):
                for candidate in self._few(source, rewrite, within, policy, device):
                    yield self._outer(rewrite, candidate, device)
                    if policy.mode == "heuristic":
                        return

    @contextlib.contextmanager
    def climbing(self) -> Iterator[None]:
        """Opens a search of the inner sources on this thread, until its end."""
        with contextlib.ExitStack() as stack:
            for inner in (self._source("graph"),) if self._given is None else self._given:
                if hasattr(inner, "climbing"):
                    stack.enter_context(inner.climbing())
            yield

    def around(self, problem: Problem, candidate: Candidate, policy: Policy, device: Device) -> Iterator[Candidate]:
        """Yields what is near a candidate by its inner engine's knobs and may be used.

        Args:
            problem: the Problem that the candidate is for.
            candidate: one of this source's.
            policy: effort, determinism and workspace limit.
            device: current for the calling thread.

        Yields:
            Candidates; none where the inner source knows no neighbours. Where this source has several forms of a
            Problem, some may have been yielded before.
        """
        if not isinstance(problem, ConvolutionProblem):
            return
        source, algo, own, inner_parameters = self._taken_apart(candidate.algo, candidate.parameters)
        rewrite = self.rewritten(problem, own)
        within = self._policy(rewrite, policy, device)
        look = getattr(source, "around", None)
        if look is None or within is None:
            return
        inner = replace(
            candidate,
            source=source.name,
            algo=algo,
            parameters=inner_parameters,
            workspace=candidate.workspace - rewrite.copied,
        )
        for neighbour in look(rewrite.inner, inner, replace(within, effort=policy.effort), device):
            if neighbour.reason is None:
                yield self._outer(rewrite, neighbour, device)

    def restore(self, problem: Problem, choice: Choice, device: Device) -> Candidate:
        """Makes the candidate of a stored choice again: its rewrite, and the inner source's candidate.

        Args:
            problem: the Problem it was chosen for.
            choice: what was stored.
            device: current for the calling thread.

        Returns:
            The candidate.

        Raises:
            FlcudaError, ValueError, LookupError: the inner source cannot, or there is no such rewrite.
        """
        if not isinstance(problem, ConvolutionProblem):
            raise ValueError(f"choice: {self.name} rewrites convolutions only, not {problem}")
        source, algo, own, inner_parameters = self._taken_apart(choice.algo, choice.parameters)
        rewrite = self.rewritten(problem, own)
        if not rewrite.is_possible:
            raise ValueError(f"choice: {self.name} does not take operands as large as those of {problem}")
        inner = replace(
            choice,
            key=replace(choice.key, problem=rewrite.inner),
            source=source.name,
            algo=algo,
            parameters=inner_parameters,
            workspace=max(0, choice.workspace - rewrite.copied),
        )
        restored = source.restore(rewrite.inner, inner, device)
        return replace(self._outer(rewrite, restored, device), workspace=choice.workspace, parameters=choice.parameters)

    def _outer(self, rewrite: Rewrite, inner: Candidate, device: Device | None) -> Candidate:
        """Makes the candidate of a rewrite and a candidate for its inner Problem."""
        build_inner = inner.build

        def build() -> RewrittenRunner:
            runner = RewrittenRunner(rewrite, build_inner())
            if device is not None and device.kind == "cuda":
                runner.prepare()
            return runner

        return replace(
            inner,
            source=self.name,
            algo=inner.id,
            workspace=rewrite.copied + inner.workspace,
            parameters=(*rewrite.parameters, *((_PREFIX + name, value) for name, value in inner.parameters)),
            reported_ms=None,
            build=build,
        )

    def _taken_apart(self, algo: str, parameters: Parameters) -> tuple[Any, str, dict[str, int | str], Parameters]:
        """Gives the inner source and its algo, the rewrite's own parameters and the inner ones."""
        name, _, algo = algo.partition(":")
        own = {key: value for key, value in parameters if not key.startswith(_PREFIX)}
        inner = tuple((key.removeprefix(_PREFIX), value) for key, value in parameters if key.startswith(_PREFIX))
        return self._source(name), algo, own, inner

    def _source(self, name: str) -> Any:
        if self._given is not None:
            found = next((source for source in self._given if source.name == name), None)
        else:
            if name not in self._made and name in ("graph", "legacy"):
                # the table of sources has this one in it
                from flcuda.finder.sources import source_named

                self._made[name] = source_named(name)
            found = self._made.get(name)
        if found is None:
            raise ValueError(f"{self.name} has no inner source {name!r}")
        return found

    def _sources(self, rewrite: Rewrite, policy: Policy) -> list[Any]:
        """Gives the inner sources to ask: of the legacy ones little is fast on tensor cores."""
        inner = rewrite.inner
        if self._given is not None:
            return [source for source in self._given if isinstance(inner, tuple(source.kinds))]
        if isinstance(inner, GraphProblem):
            names = ["graph"]
        elif rewrite.asked and policy.effort != "wide":
            names = list(rewrite.asked)
        elif inner.math == "fma":
            names = ["legacy", "graph"]
        else:
            names = ["graph", "legacy"] if policy.effort == "wide" else ["graph"]
        return [self._source(name) for name in names]

    def _policy(self, rewrite: Rewrite, policy: Policy, device: Device) -> Policy | None:
        """Gives the policy under which the inner sources are asked; None when the copies alone are too large."""
        limit = devices.workspace_limit(device) if policy.workspace_limit is None else policy.workspace_limit
        left = limit - rewrite.copied
        return None if left < 0 else replace(policy, mode="heuristic", effort="fast", workspace_limit=left)

    def _few(
        self, source: Any, rewrite: Rewrite, within: Policy, policy: Policy, device: Device
    ) -> Iterator[Candidate]:
        """Yields the first candidates of an inner source. See Note [few]."""
        wide = policy.effort == "wide"
        compiled = COMPILED if wide else 0
        by_algo: dict[str, list[Candidate]] = {}
        try:
            offered: Iterable[Candidate] = source.candidates(rewrite.inner, within, device)
            for candidate in offered:
                if candidate.reason is not None:
                    continue
                if _COMPILED in candidate.notes:
                    compiled -= 1
                    if compiled < 0:
                        continue
                by_algo.setdefault(candidate.algo, []).append(candidate)
        except CudnnNotSupportedError:
            return
        in_turn = (each for turn in itertools.zip_longest(*by_algo.values()) for each in turn if each is not None)
        yield from itertools.islice(in_turn, WIDE if wide or source.name == "legacy" else rewrite.few)


class SpaceToDepth(RewriteSource):
    """The source ``space_to_depth``: of strides, blocks or windows as channels. See the module.

    Blocks, under the effort "fast": where all strides are above 1, and a block has few channels (`FEW_CHANNELS`) or the
    filter is no larger than the stride, so that each input is read once. Under "wide": where any stride is above 1, up
    to `MOST_CHANNELS`. Windows, but for the data gradient, where they overlap and x has few channels
    (`WINDOWED_CHANNELS`); under "fast" in two dimensions or more, all strides above 1, where it pays by Note [paying].
    Neither with groups, dilation, or a filter of one element.
    """

    name = "space_to_depth"

    def rewrites(self, problem: ConvolutionProblem, policy: Policy) -> Iterator[Rewrite]:
        """Yields how a Problem may be rewritten, under the policy's effort."""
        if problem.groups != 1 or set(problem.dilation) != {1} or math.prod(problem.w_shape[2:]) == 1:
            return
        wide = policy.effort == "wide"
        if not wide and min(problem.stride) == 1:
            return
        yield from self._blocks(problem, policy, wide)
        yield from self._windows(problem, policy, wide)

    def _blocks(self, problem: ConvolutionProblem, policy: Policy, wide: bool) -> Iterator[Rewrite]:
        block = math.prod(problem.stride)
        channels = problem.x_shape[1] * block
        apart = all(size <= step for size, step in zip(problem.w_shape[2:], problem.stride, strict=True))
        if block == 1 or channels > (MOST_CHANNELS if wide or apart else FEW_CHANNELS):
            return
        # a filter in the form of the Hopper engines first
        paddings = sorted(_paddings(problem, channels, (1,)), reverse=True)
        for layout in _layouts(problem, policy):
            for padded in paddings if wide else paddings[:1]:
                yield self.rewritten(problem, {"channels": padded, "layout": layout})

    def _windows(self, problem: ConvolutionProblem, policy: Policy, wide: bool) -> Iterator[Rewrite]:
        channels, window = problem.x_shape[1], problem.w_shape[-1]
        if problem.direction == "backward_data" or channels > WINDOWED_CHANNELS[wide] or window <= problem.stride[-1]:
            return
        others = math.prod(problem.stride[:-1])
        forms = {}
        if others > 1:
            forms["folded"] = channels * window * others
        forms["kept"] = channels * window
        if not wide:
            if len(problem.stride) == 1 or (problem.math == "fma" and problem.direction != "forward"):
                return
            if problem.math == "fma":
                forms.pop("folded", None)
            elif problem.direction != "forward":
                del forms["kept"]
        for layout in _layouts(problem, policy):
            for rows, count in forms.items():
                for padded in _fillings(problem, count, rows):
                    rewrite = self.rewritten(problem, {"channels": padded, "layout": layout, "rows": rows})
                    if padded <= MOST_CHANNELS and (wide or rewrite.pays):
                        yield rewrite

    def rewritten(self, problem: ConvolutionProblem, parameters: dict[str, int | str]) -> Rewrite:
        """Makes the Rewrite of given parameters: with "rows", "folded" or "kept", that of windows."""
        channels, layout = int(parameters["channels"]), str(parameters["layout"])
        rows = str(parameters.get("rows", ""))
        own: Parameters = (("channels", channels), ("layout", layout))
        kernel, positions = problem.w_shape[2:], problem.y_shape[2:]
        # of x: the distance of blocks or windows, and their size, which is also their distance in w
        step = size = problem.stride
        left = (1,) * len(step)
        if rows:
            if rows not in ("folded", "kept") or problem.direction == "backward_data":
                raise ValueError(f"parameters: there are no windows with rows {rows!r} of {problem}")
            own = (*own, ("rows", rows))
            if rows == "kept":
                left = (*step[:-1], 1)
                step = (*(1,) * (len(step) - 1), step[-1])
            size = (*step[:-1], kernel[-1])
        taps = tuple(-(-count // each) for count, each in zip(kernel, size, strict=True))
        image = tuple((count - 1) * each + tap for count, each, tap in zip(positions, left, taps, strict=True))
        filters = problem.w_shape[0]
        if problem.math == "tensor_op":
            filters = _up(filters, _vector(problem))
        batch = problem.x_shape[0]
        nothing = (0,) * len(step)
        rewrite = _convolution(
            problem,
            layout,
            {
                "x": _Form((batch, channels, *image), step=step, factor=size, shift=problem.padding_before),
                "w": _Form((filters, channels, *taps), step=size, factor=size),
                "y": _Form((batch, filters, *positions)),
            },
            own,
            padding_before=nothing,
            padding_after=nothing,
            stride=left,
        )
        return replace(rewrite, few=FAST_WINDOWS) if rows else rewrite


class Padded(RewriteSource):
    """The source ``padded``: channels and filters that fill the vectors of tensor-core engines. See the module.

    Under the effort "fast": on tensor cores, where channels or filters are no multiple of 8 (16-bit types) or 4 (TF32)
    and it pays by Note [paying], and of float16 to 4 channels; under "wide" also where it does not, and to 16 channels
    from fewer. Never with groups.
    """

    name = "padded"

    def rewrites(self, problem: ConvolutionProblem, policy: Policy) -> Iterator[Rewrite]:
        """Yields how a Problem may be rewritten, under the policy's effort."""
        if problem.math != "tensor_op" or problem.groups != 1:
            return
        vector = _vector(problem)
        channels, filters = problem.x_shape[1], problem.w_shape[0]
        full = channels % vector == 0 and filters % vector == 0
        if full and (policy.effort != "wide" or channels >= _HOPPER_CHANNELS):
            return
        paddings = _paddings(problem, channels, problem.stride)
        if channels < _QUAD and problem.dtype_of(problem.operands[0]) == "float16":
            paddings = (_QUAD, *paddings)
        for layout in _layouts(problem, policy):
            for padded in paddings:
                rewrite = self.rewritten(problem, {"channels": padded, "layout": layout})
                if policy.effort == "wide" or rewrite.pays:
                    yield rewrite

    def rewritten(self, problem: ConvolutionProblem, parameters: dict[str, int | str]) -> Rewrite:
        """Makes the Rewrite of given parameters."""
        channels, layout = int(parameters["channels"]), str(parameters["layout"])
        rewrite = _same_geometry(
            problem, layout, channels, _up(problem.w_shape[0], _vector(problem)), (("channels", channels),)
        )
        return replace(rewrite, asked=("legacy",)) if channels % _vector(problem) else rewrite


class Relayout(RewriteSource):
    """The source ``relayout``: all operands in the layout that the math prefers. See the module.

    That is NHWC on tensor cores, else NCHW. Under the effort "fast": where x, y and their gradients are packed in the
    other layout and it pays by Note [paying]; under "wide": any operands that are not packed in one of the two layouts.
    """

    name = "relayout"

    def rewrites(self, problem: ConvolutionProblem, policy: Policy) -> Iterator[Rewrite]:
        """Yields how a Problem may be rewritten, under the policy's effort."""
        for layout in _layouts(problem, policy):
            rewrite = self.rewritten(problem, {"layout": layout})
            if all(copy is None for copy in rewrite.copies):
                continue
            given = {problem.layout_of(name) for name in problem.operands if name[-1] != "w"}
            if policy.effort == "wide" or (given.isdisjoint((layout, "strided")) and rewrite.pays):
                yield rewrite

    def rewritten(self, problem: ConvolutionProblem, parameters: dict[str, int | str]) -> Rewrite:
        """Makes the Rewrite of given parameters."""
        return _same_geometry(problem, str(parameters["layout"]), problem.x_shape[1], problem.w_shape[0], ())


def _same_geometry(
    problem: ConvolutionProblem, layout: str, channels: int, filters: int, parameters: Parameters
) -> Rewrite:
    """Makes a Rewrite into a convolution that is the same but for channels, filters and layout."""
    common, borders = split_padding(problem)
    x_shape, w_shape, y_shape = problem.x_shape, problem.w_shape, problem.y_shape
    image = tuple(size + before + after for size, (before, after) in zip(x_shape[2:], borders, strict=True))
    return _convolution(
        problem,
        layout,
        {
            "x": _Form((x_shape[0], channels, *image), shift=tuple(before for before, _ in borders)),
            "w": _Form((filters, channels // problem.groups, *w_shape[2:])),
            "y": _Form((y_shape[0], filters, *y_shape[2:])),
        },
        (*parameters, ("layout", layout)),
        padding_before=common,
        padding_after=common,
    )


class Matmul(RewriteSource):
    """The source ``matmul``: a convolution with a filter of one element as a matrix product. See the module.

    In NHWC all three directions are one product; in NCHW the forward direction and the data gradient are one an image.
    With a stride or padding x is a copy of the positions that are read. Only under the effort "wide": cuDNN compiles a
    kernel for each plan, for a quarter of a second and more, and on an H200 with cuDNN 9.19 it was as fast as the
    engines of convolutions, to a few per cent (ResNet-50's layers, float16 and TF32).
    """

    name = "matmul"

    def rewrites(self, problem: ConvolutionProblem, policy: Policy) -> Iterator[Rewrite]:
        """Yields how a Problem may be rewritten, under the policy's effort."""
        if policy.effort != "wide" or problem.groups != 1 or math.prod(problem.w_shape[2:]) != 1:
            return
        for layout in ("nhwc", "nchw"):
            if layout == "nchw" and (problem.direction == "backward_filter" or math.prod(problem.y_shape[2:]) == 1):
                continue
            rewrite = self.rewritten(problem, {"layout": layout})
            yield rewrite
            if all(copy is None for copy in rewrite.copies):
                return

    def rewritten(self, problem: ConvolutionProblem, parameters: dict[str, int | str]) -> Rewrite:
        """Makes the Rewrite of given parameters."""
        layout = str(parameters["layout"])
        n, k, *positions = problem.y_shape
        channels = problem.x_shape[1]
        forms = {
            "x": _Form((n, channels, *positions), step=problem.stride, shift=problem.padding_before),
            "w": _Form(problem.w_shape),
            "y": _Form(problem.y_shape),
        }
        copies = tuple(
            forms[name[-1]].copy_of(
                problem,
                name,
                "nchw" if name[-1] == "w" else layout,
                # a graph does not add to its outputs
                always=problem.accumulate and name in problem.outputs,
            )
            for name in problem.operands
        )
        space = math.prod(positions)
        batch, rows = (1, n * space) if layout == "nhwc" else (n, space)
        tensors = []
        for name, copy in zip(problem.operands, copies, strict=True):
            columns = channels if name[-1] == "x" else k
            if name[-1] == "w":
                shape, strides = (1, k, channels), (k * channels, channels, 1)
            elif layout == "nhwc":
                shape, strides = (1, rows, columns), (rows * columns, columns, 1)
            else:
                shape, strides = (batch, columns, rows), (columns * rows, rows, 1)
            alignment = VECTOR if copy is not None else problem.alignment_of(name)
            tensors.append(GraphTensor(name, shape, strides, problem.dtype_of(name), alignment))
        left, right = self._product(problem, layout, tensors)
        operands = {tensor.name: tensor for tensor in (left, right)}
        inner = GraphProblem(
            tensors=tuple(operands[name] for name in problem.inputs),
            operations=(Operation("matmul", (("a", Ref(left.name)), ("b", Ref(right.name))), (problem.outputs[0],)),),
            results=(tensors[-1],),
            compute=problem.compute,
            math=problem.math,
        )
        return Rewrite(problem, inner, copies, (("layout", layout),))

    @staticmethod
    def _product(
        problem: ConvolutionProblem, layout: str, tensors: Sequence[GraphTensor]
    ) -> tuple[GraphTensor, GraphTensor]:
        """Gives the two factors, transposed where they have to be."""
        first, second = tensors[:2]
        if problem.direction == "backward_filter":
            # dw = dy^T x
            return _transposed(second), first
        if layout == "nhwc":
            # y = x w^T; dx = dy w
            return first, _transposed(second) if problem.direction == "forward" else second
        # of each image: y = w x; dx = w^T dy
        return second if problem.direction == "forward" else _transposed(second), first


def _transposed(tensor: GraphTensor) -> GraphTensor:
    (batch, rows, columns), (far, row, column) = tensor.shape, tensor.strides
    return replace(tensor, shape=(batch, columns, rows), strides=(far, column, row))
