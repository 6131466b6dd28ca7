"""Symptoms that users of such software have reported, on a GPU; the table is in tests/unit/test_problem_reports.py."""

import contextlib
import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from convolution_oracle import TOLERANCE, exact, host

import flcuda
from flcuda import device as devices
from flcuda.device import Device
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder import Choice, Policy, Problem, default_store, measure
from flcuda.finder.plan import Plan
from flcuda.finder.problem import DIRECTIONS
from flcuda.finder.sources import source_named
from flcuda.finder.verify import Verifier

MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[Device]:
    found = devices.resolve("cuda")
    with found.use():
        yield found


@contextlib.contextmanager
def memory_taken(leave: int) -> Iterator[None]:
    """Holds all of the GPU's memory but `leave` bytes, as another program or library would: not in CuPy's pool."""
    cupy = devices.cupy()
    cupy.get_default_memory_pool().free_all_blocks()
    held = []
    while (size := cupy.cuda.runtime.memGetInfo()[0] - leave) > 2 * MIB:
        # what is free may lie in pieces
        while size > 2 * MIB:
            try:
                held.append(cupy.cuda.Memory(size))
                break
            except cupy.cuda.runtime.CUDARuntimeError:
                size //= 2
        else:
            break
    try:
        yield
    finally:
        held.clear()


@contextlib.contextmanager
def pool_limited(leave: int) -> Iterator[None]:
    """Lets CuPy's pool grow by `leave` bytes and no more: out of memory at the same call whatever others hold."""
    pool = devices.cupy().get_default_memory_pool()
    pool.free_all_blocks()
    pool.set_limit(size=pool.used_bytes() + leave)
    try:
        yield
    finally:
        pool.set_limit(size=0)


def assert_right(problem: Problem, plan: Any, seed: int = 7) -> None:
    """Runs a plan into a NaN-filled, or a preset, output and compares with float64."""
    arrays = problem.random_arrays(seed=seed, device="cuda")
    wanted, scale = exact(problem, arrays)
    if problem.accumulate:
        before = host(arrays["out"])
        wanted, scale = wanted + before, scale + np.abs(before)
    plan(*(arrays[name] for name in problem.inputs), out=arrays["out"])
    error = np.abs(host(arrays["out"]) - wanted).max()
    assert error <= TOLERANCE[problem.precision] * scale.max(), f"{plan}: {error} of {scale.max()}"
    assert np.abs(wanted).max() > 0


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", ["fast", "wide"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_search_while_cupys_pool_holds_the_memory(direction, effort, device):
    """CNTK PR#1516: what cuDNN allocates for a search by itself does not come out of the caller's pool."""
    cupy = devices.cupy()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    block = cupy.cuda.alloc(int(0.95 * cupy.cuda.runtime.memGetInfo()[0]))
    held = pool.total_bytes()
    problem = Problem.parse(f"{direction} n16 c64 56x56 k64 3x3 p1 float32 nchw")
    del block
    report = flcuda.find(problem, device=device, policy=Policy(effort=effort), sources=["legacy"])
    assert pool.total_bytes() <= held + 4096 * MIB
    assert any(row.candidate.workspace > 0 for row in report.usable), report
    assert not re.search("out of memory|ALLOC", report.reasons), report.reasons
    pool.free_all_blocks()
    assert_right(problem, report.usable[0].plan())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_search_with_little_memory(direction, device):
    """CNTK PR#1516, pytorch PR#558: what does not fit is passed over, and the search still answers."""
    problem = Problem.parse(f"{direction} n32 c64 28x28 k64 3x3 p1 float32 nchw")
    assert_right(problem, flcuda.find(problem, device=device, store=False).usable[0].plan())  # loads all that is needed
    with memory_taken(leave=192 * MIB):
        report = flcuda.find(problem, device=device, store=False)
    assert report.usable
    assert_right(problem, report.usable[0].plan())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_out_of_memory_falls_to_what_needs_less(direction, device):
    """pytorch PR#558: training goes on without the workspace of the best, and the next CUDA call does not fail."""
    problem = Problem.parse(f"{direction} n16 c64 56x56 k64 3x3 p1 float32 nchw")
    report = flcuda.find(problem, device=device, sources=["legacy"])
    hungry = max(report.usable, key=lambda row: row.candidate.workspace)
    assert hungry.candidate.workspace >= 32 * MIB, report
    # as it is stored when it is the best
    key = flcuda.find(problem, device=device).key
    choice = Choice.of(key, hungry.candidate, 1e-3, 0.0)
    default_store().put(choice)
    plan = flcuda.plan(problem, device=device)
    assert plan.choice.identity == choice.identity
    assert_right(problem, plan)
    arrays = problem.random_arrays(seed=8, device=device)
    wanted, scale = exact(problem, arrays)
    inputs = [arrays[name] for name in problem.inputs]
    with pool_limited(leave=min(hungry.candidate.workspace // 2, 256 * MIB)):
        with pytest.warns(UserWarning, match="is used instead"):
            plan(*inputs, out=arrays["out"])
        assert plan.workspace < hungry.candidate.workspace
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan(*inputs, out=arrays["out"])
            # remembered: nobody tries it again in this process
            again = flcuda.plan(problem, device=device)
            assert again.choice.identity == plan.choice.identity
    assert np.abs(host(arrays["out"]) - wanted).max() <= TOLERANCE["float32"] * scale.max()
    # another library's kernels, and cuDNN itself, do not see the error of before
    assert int(devices.cupy().arange(5).sum()) == 10
    assert_right(problem, flcuda.find(problem, device=device, sources=["legacy"]).usable[0].plan())


@pytest.mark.parametrize("mode", ["find", "heuristic"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_limit_is_kept_by_what_is_really_allocated(direction, mode, device):
    """pytorch#49207: the first choice of a heuristic must not take the memory of the next layer."""
    cupy = devices.cupy()
    limit = 8 * MIB
    problem = Problem.parse(f"{direction} n16 c64 56x56 k64 3x3 p1 float32 nchw")
    with flcuda.policy(mode=mode, workspace_limit=limit):
        plan = flcuda.plan(problem, device=device)
    assert_right(problem, plan)
    arrays = problem.random_arrays(seed=9, device=device)
    sizes = []
    allocate = cupy.cuda.get_allocator()

    def counted(size: int) -> Any:
        sizes.append(size)
        return allocate(size)

    with cupy.cuda.using_allocator(counted):
        plan(*(arrays[name] for name in problem.inputs), out=arrays["out"])
    assert sum(sizes) <= limit


# --- not supported ----------------------------------------------------------------------------------------------------

ODD = [
    "n1 c3 17x13 k5 2x5 p1x2 s3x1 float16 nhwc",
    "n7 c1 9x31 k3 1x7 float32 nchw",
    "n2 c10 12x12 k15 3x3 p1 g5 tf32 nhwc",
    "n2 c16 20x20 k24 3x3 p2 d2 bfloat16 nhwc",
    "n3 c5 1x40 k7 1x9 p0x4 s1x2 float64 nchw",
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", ODD)
def test_a_heuristics_first_that_does_not_run_is_passed_over(line, direction, device):
    """pytorch#1485: it ranks first what then answers NOT_SUPPORTED."""
    problem = Problem.parse(f"{direction} {line}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is no news to the user
        plan = flcuda.plan(problem, device=device, policy=Policy(mode="heuristic"))
        assert_right(problem, plan)


HARD = [
    # more channels than vectors hold, of which groups have an odd number (TensorFlow#55633)
    "n2 c6 10x10 k10 3x3 p1 g2 float16 nhwc",
    "n2 c6 10x10 k10 1x1 g2 float16 nhwc",
    "n2 c9 12x12 k3 3x3 p1 s2 g3 tf32 nhwc",
    "n2 c7 10x10 k7 3x3 p1 g7 float32 nchw",
    # padded on one side (CUDA.jl#128)
    "n2 c3 15x14 k8 7x7 p3:2x2:3 s2 float16 nhwc",
    "n2 c3 15x14 k8 7x7 p0:5 s2 float32 nchw",
    "n2 c5 9x9 k3 1x1 p1:0x0:2 tf32 nhwc",
]


@pytest.mark.parametrize(
    ("line", "effort"), [*((line, "fast") for line in HARD), *((line, "wide") for line in HARD[::4])]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_source_keeps_groups_and_sides_of_the_padding(direction, line, effort, device):
    """Also those that pad channels, change the layout, or rewrite the problem as another."""
    problem = Problem.parse(f"{direction} {line}")
    report = flcuda.find(problem, device=device, policy=Policy(effort=effort), verify=True, store=False)
    wrong = [f"{row.label}: {row.reason}" for row in report.rows if row.verification and row.verification.reason]
    assert not wrong
    for row in report.usable:
        assert_right(problem, row.plan())


# --- right results ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_candidates_of_different_math_may_take_turns(direction, device):
    """cupy PR#1428: each has the math type that it needs, whichever ran before."""
    problem = Problem.parse(f"{direction} n8 c32 28x28 k32 3x3 p1 tf32 nhwc")
    arrays = problem.random_arrays(seed=4, device=device)
    inputs = [arrays[name] for name in problem.inputs]
    runners = []
    for source in ("legacy", "graph"):
        for candidate in source_named(source).candidates(problem, Policy(), device):
            if candidate.reason is None and candidate.deterministic:
                with contextlib.suppress(CudnnNotSupportedError):
                    runner = candidate.build()
                    runner(*inputs, arrays["out"])
                    runners.append((candidate, runner))
    assert len(runners) > 2
    first: dict[Any, Any] = {}
    for order in (runners, runners[::-1], runners[::2] + runners[1::2]):
        for candidate, runner in order:
            arrays["out"].fill(np.nan)
            runner(*inputs, arrays["out"])
            found = host(arrays["out"])
            np.testing.assert_array_equal(found, first.setdefault(candidate.identity, found), err_msg=str(candidate))


@pytest.mark.parametrize("where", ["behind", "in front"])
def test_writing_beside_the_workspace_is_caught(where, device):
    """TensorFlow#32836: an algorithm writes outside of its buffer."""
    cupy = devices.cupy()
    problem = Problem.parse("forward n2 c8 9x8 k8 3x3 p1 float32 nchw")
    right = flcuda.find(problem, device=device, store=False).usable[0].plan()
    arrays = problem.random_arrays(seed=2, device=device)
    verifier = Verifier(problem, tuple(arrays[name] for name in problem.inputs), device)

    def careless(x: Any, w: Any, y: Any) -> None:
        right(x, w, out=y)
        scratch = devices.workspace(1000)
        start = 1000 if where == "behind" else -8
        cupy.ndarray((8,), np.uint8, scratch.data + start)[...] = 0

    def careful(x: Any, w: Any, y: Any) -> None:
        right(x, w, out=y)
        devices.workspace(1000)[...] = 0

    assert verifier.check(careful, deterministic=False).reason is None
    assert "workspace" in str(verifier.check(careless, deterministic=False).reason)


def test_candidates_that_disagree_are_told_apart_by_their_error(device):
    """jax#15976: the error of each stands beside its time, and a policy limits it."""
    problem = Problem.parse("forward n8 c64 28x28 k64 5x5 p2 float32 nchw")
    report = flcuda.find(problem, device=device, verify=True, store=False)
    errors = sorted(row.verification.relative for row in report.usable if row.verification is not None)
    assert len(errors) == len(report.usable)
    assert 0 < errors[0] < errors[-1]
    limit = 1.5 * errors[0]
    strict = flcuda.find(problem, device=device, policy=Policy(max_error=limit), store=False)
    assert strict.usable
    assert all(row.verification.relative <= limit for row in strict.usable)
    assert any("is above" in str(row.reason) for row in strict.rows) == (errors[-1] > limit)


@pytest.mark.parametrize("word", ["float32 nchw", "float16 nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_whoever_promises_the_same_bits_is_held_to_it(direction, word, device):
    """mxnet PR#13142, pytorch#188288: of every source, and one that breaks its promise is no candidate."""
    problem = Problem.parse(f"{direction} n8 c40 14x14 k24 3x3 p1 {word}")
    policy = Policy(deterministic=True)
    report = flcuda.find(problem, device=device, policy=policy, verify=True, store=False)
    assert report.usable
    assert all(row.verification is not None and row.verification.repeats is True for row in report.usable)
    arrays = problem.random_arrays(seed=6, device=device)
    inputs = [arrays[name] for name in problem.inputs]
    for row in report.usable:
        plan = row.plan()
        bits = host(plan(*inputs))
        for _ in range(3):
            np.testing.assert_array_equal(host(plan(*inputs)), bits, err_msg=row.label)


def test_the_price_of_determinism_is_shown(device):
    """pytorch#28777: the deterministic choice for dilated convolutions is much slower."""
    problem = Problem.parse("backward_filter n16 c64 56x56 k64 3x3 p2 d2 float32 nchw")
    report = flcuda.find(problem, device=device, store=False)
    if report.usable[0].deterministic:
        strict = flcuda.find(problem, device=device, policy=Policy(deterministic=True), store=False)
        assert strict.usable[0].timing.median_ms <= 1.5 * report.usable[0].timing.median_ms
    else:
        assert "best deterministic:" in str(report)


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["float32 nchw", "tf32 nhwc", "float16 nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_first_call_that_adds_gives_the_right_sum(direction, word, device):
    """Theano PR#6368: a search by the call itself must not have written into what is added to."""
    problem = Problem.parse(f"{direction} n4 c3 16x16 k8 3x3 p1 s2 {word} acc")
    arrays = problem.random_arrays(seed=11, device=device)
    before = host(arrays["out"])
    wanted, scale = exact(problem, arrays)
    plan: Plan = flcuda.plan(problem, device=device)
    np.testing.assert_array_equal(host(arrays["out"]), before)
    plan(*(arrays[name] for name in problem.inputs), out=arrays["out"])
    error = np.abs(host(arrays["out"]) - before - wanted).max()
    assert error <= TOLERANCE[problem.precision] * (scale + np.abs(before)).max()
    # and so does every candidate of every source, each after the others have run
    for row in flcuda.find(problem, device=device, verify=True, store=False).usable:
        assert_right(problem, row.plan())


def test_the_sets_of_a_search_are_its_own(device):
    """Theano PR#6368: no set of operands of a search shares memory with another, or with the caller's."""
    for line in (
        "forward n4 c8 20x20 k8 3x3 p1 float16 nhwc",
        "backward_filter n4 c8 20x20 k8 3x3 p1 float32 nchw acc",
    ):
        problem = Problem.parse(line)
        own = problem.random_arrays(seed=1, device=device)
        sets = measure.operand_sets(problem, device, Policy())
        assert len(sets) > 1
        spans = []
        for arrays in [tuple(own.values()), *sets]:
            for array, name in zip(arrays, problem.operands, strict=True):
                extent = 1 + sum((n - 1) * s for n, s in zip(array.shape, problem.strides_of(name), strict=True))
                spans.append((array.data.ptr, array.data.ptr + extent * array.itemsize))
        spans.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
