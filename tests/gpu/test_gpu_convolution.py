"""Convolutions on CUDA through the finder, against float64 on the host.

Tolerances are shares of the largest sum of magnitudes: FFT and Winograd mix elements, so that no element has an error
of its own.
"""

import threading
import warnings

import numpy as np
import pytest
from convolution_oracle import TOLERANCE

import flcuda
from flcuda import device as devices
from flcuda.errors import CudnnNotSupportedError, FlcudaError
from flcuda.finder.plan import Plan
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem
from flcuda.finder.sources.reference import Columns
from flcuda.ops.bias import bias_forward
from flcuda.ops.convolution import convolution

PRECISIONS = list(TOLERANCE)

LINES = [
    "n3 c8 13x11 k16 3x3 p1",
    "n4 c5 9x7 k3 3x2 p1x0 s2x1",
    "n2 c8 15x15 k8 5x5 p2 s3",
    "n2 c16 14x14 k32 1x1 s2",
    "n2 c16 14x14 k32 1x1",
    "n2 c3 32x32 k8 7x7 p3 s2",
    "n2 c8 9x9 k8 3x3 p1:2x0:1",
    "n2 c8 12x12 k8 3x3 p3:0x2:1 s2",
]
HARDER = [
    "n2 c16 10x10 k16 3x3 p1 g2",
    "n2 c8 10x10 k8 3x3 p1 g8",
    "n2 c8 17x17 k8 3x3 p2 d2",
    "n2 c8 17x17 k8 3x3 p1:4 d2x3 g2",
    "n3 c4 40 k8 5 p2 s2",
    "n3 c4 40 k8 5 p3:1 d2",
    "n2 c4 7x8x9 k8 3x3x3 p1",
    "n2 c4 7x8x9 k8 3x1x2 p1:0x0x1 s2x1x2",
]


def wide(problem):
    """The same problem in float64, contiguous."""
    return ConvolutionProblem.create(
        problem.direction,
        problem.x_shape,
        problem.w_shape,
        dtype="float64",
        padding=tuple(zip(problem.padding_before, problem.padding_after, strict=True)),
        stride=problem.stride,
        dilation=problem.dilation,
        groups=problem.groups,
    )


def expected(problem, first, second):
    """The result and the sum of the magnitudes, in float64 by the CPU device, which has its own tests."""
    exact = wide(problem)
    algo = "col2im" if problem.direction == "backward_data" else "im2col"
    results = []
    for of in (np.asarray, np.abs):
        out = np.empty(exact.shape_of(exact.operands[2]))
        Columns(exact, algo, 8 << 20)(of(first.astype(np.float64)), of(second.astype(np.float64)), out)
        results.append(out)
    return results


def host(a):
    return devices.cupy().asnumpy(a).astype(np.float64)


def on_gpu(problem, name, values):
    with devices.resolve("cuda").use():
        a = problem.empty(name, devices.resolve("cuda"))
        a[...] = devices.cupy().asarray(np.ascontiguousarray(values))
    return a


def operands(problem, make):
    """Inputs rounded to the problem's dtype, on both sides."""
    dtype = devices.DTYPES[problem.dtype_of(problem.operands[0])]
    values = [make(problem.shape_of(name)).astype(dtype) for name in problem.operands[:2]]
    return values, [on_gpu(problem, name, v) for name, v in zip(problem.operands[:2], values, strict=True)]


def run(problem, inputs, out):
    """Calls the op with the problem's geometry."""
    pads = tuple(zip(problem.padding_before, problem.padding_after, strict=True))
    op = convolution(problem.stride, pads, problem.dilation, problem.groups, problem.math, len(problem.stride))
    if problem.direction == "forward":
        # The op only writes y; adding to it is what a Plan can do.
        return flcuda.plan(problem)(*inputs, out=out) if problem.accumulate else op.forward(*inputs, out=out)
    shape = problem.shape_of(problem.operands[2])
    return getattr(op, problem.direction)(*inputs, shape, out=out, accumulate=problem.accumulate)


def check(problem, rng):
    values, inputs = operands(problem, rng.standard_normal)
    out_name = problem.operands[2]
    out_dtype = devices.DTYPES[problem.dtype_of(out_name)]
    shape = problem.shape_of(out_name)
    before = rng.standard_normal(shape).astype(out_dtype) if problem.accumulate else np.full(shape, np.nan, out_dtype)
    out = on_gpu(problem, out_name, before)
    wanted, scale = expected(problem, *values)
    if problem.accumulate:
        wanted, scale = wanted + before.astype(np.float64), scale + np.abs(before.astype(np.float64))
    for _ in range(2):  # searched, then remembered
        out[...] = devices.cupy().asarray(before)
        assert run(problem, inputs, out) is out
        error = np.abs(host(out) - wanted).max()
        assert error <= TOLERANCE[problem.precision] * scale.max(), f"{problem}: {error} of {scale.max()}"
    for a, v in zip(inputs, values, strict=True):
        np.testing.assert_array_equal(host(a), v.astype(np.float64))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", LINES + HARDER)
def test_agrees_with_float64(line, direction, precision, layout, rng):
    check(ConvolutionProblem.parse(f"{direction} {line} {precision} {layout}"), rng)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", [LINES[0], LINES[6]])
def test_adds_to_out(line, direction, precision, rng):
    layout = "nchw" if precision in ("float32", "float64") else "nhwc"
    check(ConvolutionProblem.parse(f"{direction} {line} {precision} {layout} acc"), rng)


STRIDED = [
    "n2 c4 6x7 k8 3x3 p1 xs:1000x200x14x2",
    "n2 c4 6x7 k8 3x3 p1 ws:1x8x32x96",
    "n2 c4 6x7 k8 3x3 p1 ys:1000x120x14x2 acc",
    "n2 c4 6x7 k8 3x3 p1 xs:1000x1x140x20 ws:36x9x3x1 ys:2000x200x1x8",
    "n2 c4 6x7 k8 3x3 p1:0 xs:1000x200x14x2",
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", STRIDED)
def test_any_strides(line, direction, precision, rng):
    check(ConvolutionProblem.parse(f"{direction} {line} {precision}"), rng)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", LINES)
def test_sparse_integers_into_poisoned_outputs(line, direction, precision, rng):
    """Products of small integers: a wrong, missing or doubled element is off by 1, rounding never is."""
    problem = ConvolutionProblem.parse(f"{direction} {line} {precision} nhwc")

    def sparse(shape):
        return rng.integers(-2, 3, shape) * (rng.random(shape) < 0.15)

    values, inputs = operands(problem, sparse)
    out_name = problem.operands[2]
    out = on_gpu(problem, out_name, np.full(problem.shape_of(out_name), np.nan))
    wanted, _ = expected(problem, *values)
    run(problem, inputs, out)
    error = np.abs(host(out) - wanted)
    assert not np.isnan(error).any()
    assert np.all(error <= 0.05 + 2.0**-8 * np.abs(wanted)), f"{problem}: {error.max()}"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_strict_float32_never_rounds_to_tf32(direction):
    # 1 + 2^-12 is a float32; TF32, with 10 bits of mantissa, makes it 1.
    problem = ConvolutionProblem.parse(f"{direction} n8 c32 16x16 k32 3x3 p1 float32 nchw")
    values, inputs = operands(problem, lambda shape: np.full(shape, 1 + 2.0**-12))
    out_name = problem.operands[2]
    wanted, scale = expected(problem, *values)
    report = flcuda.find(problem, device="cuda")
    for row in report.rows:
        if row.reason is None:
            out = on_gpu(problem, out_name, np.full(problem.shape_of(out_name), np.nan))
            row.candidate.build()(*inputs, out)
            error = np.abs(host(out) - wanted).max() / scale.max()
            assert error < 5e-5, f"{row.candidate}: {error}"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_outputs_are_allocated_in_the_layout_of_x(dtype, rng):
    cupy = devices.cupy()
    for layout in ("nchw", "nhwc"):
        problem = ConvolutionProblem.parse(f"forward n2 c8 9x9 k8 3x3 p1 {dtype} {layout}")
        _, (x, w) = operands(problem, rng.standard_normal)
        op = convolution(padding=1)
        y = op.forward(x, w)
        assert isinstance(y, cupy.ndarray)
        assert devices.memory_layout(y) == layout
        assert devices.memory_layout(op.backward_data(y, w, x.shape)) == layout
        assert devices.memory_layout(op.backward_filter(x, y, w.shape)) == layout


def test_with_bias(rng):
    problem = ConvolutionProblem.parse("forward n2 c4 9x9 k8 3x3 p1 float32 nhwc")
    values, (x, w) = operands(problem, rng.standard_normal)
    bias = rng.standard_normal(8, np.float32)
    y = bias_forward(convolution(padding=1).forward(x, w), devices.cupy().asarray(bias))
    wanted, scale = expected(problem, *values)
    assert np.abs(host(y) - wanted - bias[:, None, None]).max() <= 2e-5 * scale.max()


def test_broadcast_inputs_are_copied(rng):
    cupy = devices.cupy()
    x = cupy.broadcast_to(cupy.asarray(rng.standard_normal((1, 4, 8, 8), np.float32)), (3, 4, 8, 8))
    w = cupy.asarray(rng.standard_normal((4, 4, 3, 3), np.float32))
    problem = ConvolutionProblem.parse("forward n3 c4 8x8 k4 3x3")
    wanted, scale = expected(problem, host(x), host(w))
    for _ in range(2):
        assert np.abs(host(convolution().forward(x, w)) - wanted).max() <= 2e-5 * scale.max()


def test_an_empty_batch_calls_no_library(monkeypatch, rng):
    from flcuda.ops import convolution as module

    monkeypatch.setattr(module.finder, "plan", lambda *_, **__: pytest.fail("nothing is to be planned"))
    cupy = devices.cupy()
    x, w = cupy.empty((0, 4, 8, 8), np.float32), cupy.ones((4, 4, 3, 3), np.float32)
    y = convolution().forward(x, w)
    assert y.shape == (0, 4, 6, 6)
    assert not host(convolution().backward_filter(x, y, w.shape)).any()


def test_mixed_devices_and_dtypes_are_refused():
    cupy = devices.cupy()
    x, w = cupy.ones((1, 2, 5, 5), np.float32), np.ones((2, 2, 3, 3), np.float32)
    with pytest.raises((TypeError, ValueError), match="w"):
        convolution().forward(x, w)
    with pytest.raises(TypeError, match="mixed"):
        convolution().forward(x, cupy.ones((2, 2, 3, 3), np.float16))
    with pytest.raises(ValueError, match="positive"):
        convolution().forward(x[:, :, ::-1], cupy.ones((2, 2, 3, 3), np.float32))


@pytest.mark.parametrize("line", [LINES[0], LINES[6]])
def test_runs_on_the_callers_stream_and_in_a_capture(line, rng):
    cupy = devices.cupy()
    problem = ConvolutionProblem.parse(f"forward {line} float32 nchw")
    values, inputs = operands(problem, rng.standard_normal)
    wanted, scale = expected(problem, *values)
    out = on_gpu(problem, "y", np.full(problem.y_shape, np.nan))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):
            run(problem, inputs, out)
        stream.synchronize()
        stream.begin_capture()
        run(problem, inputs, out)
        graph = stream.end_capture()
        for factor in (2, 3):
            # The graph reads the inputs as they are when it is launched.
            inputs[0] *= np.float32(factor)
            out.fill(np.nan)
            graph.launch()
        stream.synchronize()
    assert np.abs(host(out) - 6 * wanted).max() <= 6 * 2e-5 * scale.max()


def test_a_search_inside_a_capture_is_an_error():
    cupy = devices.cupy()
    x, w = cupy.ones((2, 3, 7, 7), np.float32), cupy.ones((5, 3, 3, 3), np.float32)
    out = cupy.empty((2, 5, 5, 5), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(FlcudaError, match="capture"):
                convolution().forward(x, w, out=out)
        finally:
            stream.end_capture()


def test_threads_with_streams_of_their_own_give_the_same_bits(rng):
    cupy = devices.cupy()
    problem = ConvolutionProblem.parse("forward n4 c8 20x20 k8 3x3 p1 float32 nchw")
    values, inputs = operands(problem, rng.standard_normal)
    wanted, scale = expected(problem, *values)
    cupy.cuda.Device().synchronize()
    results, failures = [], []

    def work():
        try:
            for _ in range(2):
                with cupy.cuda.Stream(non_blocking=True) as stream:
                    out = on_gpu(problem, "y", np.full(problem.y_shape, np.nan))
                    for _ in range(5):
                        run(problem, inputs, out)
                    stream.synchronize()
                    results.append(host(out))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(results) == 16
    for result in results:
        assert np.abs(result - wanted).max() <= 2e-5 * scale.max()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_policies(direction, rng):
    problem = ConvolutionProblem.parse(f"{direction} n8 c16 20x20 k16 3x3 p1 float32 nchw")
    values, inputs = operands(problem, rng.standard_normal)
    wanted, scale = expected(problem, *values)
    for changes in ({"mode": "heuristic"}, {"deterministic": True}, {"workspace_limit": 0}):
        with flcuda.policy(**changes):
            plan = flcuda.plan(problem, device="cuda")
            out = on_gpu(problem, problem.operands[2], np.full(wanted.shape, np.nan))
            first = host(plan(*inputs, out=out))
            assert np.abs(first - wanted).max() <= 2e-5 * scale.max()
            if "deterministic" in changes:
                assert plan.choice.deterministic
                for _ in range(5):
                    np.testing.assert_array_equal(host(plan(*inputs, out=out)), first)
            if "workspace_limit" in changes:
                assert plan.workspace == 0


def test_more_elements_than_descriptors_hold_is_refused_without_being_allocated():
    problem = ConvolutionProblem.parse("forward n65536 c64 32x32 k1 1x1 float16 nhwc")
    with pytest.raises(CudnnNotSupportedError, match=r"2\^31-1"):
        flcuda.find(problem, device="cuda", sources=["legacy"])


@pytest.mark.parametrize("word", ["float32 nchw", "float16 nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_both_sources_are_ranked_in_one_list(direction, word, rng):
    problem = ConvolutionProblem.parse(f"{direction} n8 c32 28x28 k32 3x3 p1 {word}")
    values, inputs = operands(problem, rng.standard_normal)
    wanted, scale = expected(problem, *values)
    report = flcuda.find(problem, device="cuda")
    assert {row.candidate.source for row in report.usable} == {"legacy", "graph"}
    for row in report.usable:
        out = row.plan()(*inputs)
        error = np.abs(host(out) - wanted).max()
        assert error <= TOLERANCE[problem.precision] * scale.max(), f"{row.candidate}: {error} of {scale.max()}"
    plan = flcuda.plan(problem, device="cuda")
    assert plan.choice.identity == report.best.identity


@pytest.mark.parametrize("word", ["float32 nchw", "float16 nhwc"])
@pytest.mark.parametrize("changes", [{"deterministic": True}, {"workspace_limit": 0}, {"workspace_limit": 1 << 20}])
def test_no_row_breaks_the_policy(changes, word):
    for direction in DIRECTIONS:
        problem = ConvolutionProblem.parse(f"{direction} n16 c64 28x28 k64 3x3 p1 {word}")
        for mode in ("find", "heuristic"):
            report = flcuda.find(problem, device="cuda", policy=flcuda.Policy(mode=mode, **changes))
            assert report.usable
            for row in report.usable:
                if "deterministic" in changes:
                    assert row.candidate.deterministic
                    continue
                try:
                    assert row.candidate.build().workspace <= changes["workspace_limit"]
                except CudnnNotSupportedError:
                    # What has not been measured may turn out not to run.
                    assert mode == "heuristic"


# --- Note [hit] -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["float32 nchw", "float16 nhwc"])
def test_hits_give_what_the_long_way_gives(word, rng, monkeypatch):
    """Three directions, with a bias, a layout that x has not, adding; each time other values in the inputs."""
    from flcuda.ops import convolution as module

    cupy = devices.cupy()
    line = "n3 c8 11x9 k16 3x3 p1 s2"
    problems = {direction: ConvolutionProblem.parse(f"{direction} {line} {word}") for direction in DIRECTIONS}
    op = convolution(2, 1, math=problems["forward"].math)
    dtype = devices.DTYPES[problems["forward"].x_dtype]
    w, dw = (on_gpu(problems["forward"], "w", np.zeros(problems["forward"].w_shape)) for _ in range(2))
    bias = cupy.zeros(16, dtype)
    layout = "nhwc" if word == "float32 nchw" else None
    for step in range(5):
        if step == 3:
            monkeypatch.setattr(module.Convolution, "_run", lambda *_: pytest.fail("the long way was taken"))
        values = {
            name: rng.standard_normal(problems["backward_filter"].shape_of(operand)).astype(dtype)
            for name, operand in (("x", "x"), ("w", "dw"), ("dy", "dy"))
        }
        x, dy = on_gpu(problems["forward"], "x", values["x"]), on_gpu(problems["backward_filter"], "dy", values["dy"])
        w[...] = cupy.asarray(values["w"])
        shift = rng.standard_normal(16).astype(dtype)
        bias[...] = cupy.asarray(shift)
        y = op.forward(x, w, bias=bias, layout=layout)
        if layout:
            assert devices.memory_layout(y) == layout
        found = {
            "forward": y - bias[:, None, None],
            "backward_data": op.backward_data(dy, w, x.shape),
            "backward_filter": op.backward_filter(x, dy, w.shape, out=dw).copy(),
        }
        added = op.backward_filter(x, dy, w.shape, out=dw, accumulate=True)
        for direction, problem in problems.items():
            names = [{"dw": "w"}.get(name, name) for name in problem.operands[:2]]
            wanted, scale = expected(problem, *[values[name] for name in names])
            results = [(found[direction], wanted, scale)]
            if direction == "backward_filter":
                results.append((added, 2 * wanted, 2 * scale))
            for result, right, size in results:
                error = np.abs(host(result) - right).max()
                assert error <= 2 * TOLERANCE[problem.precision] * size.max(), f"{step} {problem}: {error}"


def test_what_is_stored_works_in_a_capture_on_a_thread_that_never_called(rng):
    """The plan is built during the capture; a miss is an error, after which the capture goes on."""
    cupy = devices.cupy()
    for word in ("float32 nchw", "float16 nhwc"):
        problem = ConvolutionProblem.parse(f"forward n2 c8 12x12 k16 3x3 p1 {word}")
        values, inputs = operands(problem, rng.standard_normal)
        wanted, scale = expected(problem, *values)
        out = on_gpu(problem, "y", np.full(problem.y_shape, np.nan))
        missing = on_gpu(
            ConvolutionProblem.parse(f"forward n5 c8 12x12 k16 3x3 p1 {word}"), "x", np.ones((5, 8, 12, 12))
        )
        missing_out = cupy.empty((5, 16, 12, 12), out.dtype)
        flcuda.find(problem, device="cuda")
        cupy.cuda.Device().synchronize()
        failures = []

        def work(problem=problem, inputs=inputs, out=out, missing=missing, missing_out=missing_out, failures=failures):
            try:
                stream = cupy.cuda.Stream(non_blocking=True)
                with stream:
                    stream.begin_capture()
                    run(problem, inputs, out)
                    with pytest.raises(FlcudaError, match="run the step once before the capture"):
                        run(problem, (missing, inputs[1]), missing_out)
                    graph = stream.end_capture()
                    graph.launch()
                    stream.synchronize()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not failures
        # Before cuDNN 9.28 a graph does not keep its plan; the result is there already.
        assert np.abs(host(out) - wanted).max() <= TOLERANCE[problem.precision] * scale.max()


def test_out_of_memory_takes_what_needs_less_and_nothing_stays_behind(rng):
    """CuPy's pool is given a limit, so that a workspace does not fit; what comes after runs as if nothing had been."""
    cupy = devices.cupy()
    problem = ConvolutionProblem.parse("forward n32 c64 56x56 k64 3x3 p1 float32 nchw")
    values, inputs = operands(problem, lambda shape: rng.standard_normal(shape, np.float32))
    out = on_gpu(problem, "y", np.full(problem.y_shape, np.nan))
    rows = flcuda.find(problem, device="cuda", sources=["legacy"]).usable
    greedy = max(rows, key=lambda row: row.candidate.workspace)
    modest = [row for row in rows if row.candidate.workspace < 1 << 20]
    if greedy.candidate.workspace < 8 << 20 or not modest:
        pytest.skip("no algorithm here needs a large workspace")
    others = [(row.choice, row.candidate) for row in rows if row is not greedy]
    plan = Plan(greedy.choice, devices.Device("cuda", 0), greedy.candidate.build(), others=lambda: iter(others))
    # One of the test's own: in the process's there may be a large block of which a test before still has a small part.
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=4 << 20)
    with cupy.cuda.using_allocator(pool.malloc):
        with pytest.warns(UserWarning, match="is used instead") as caught:
            plan(*inputs, out=out)
        assert caught[0].filename == __file__
        assert plan.workspace < 4 << 20
        plan(*inputs, out=out)
    sample = (slice(0, 1), slice(None), slice(None), slice(None))
    wanted, scale = expected(
        ConvolutionProblem.parse("forward n1 c64 56x56 k64 3x3 p1 float32 nchw"), values[0][sample], values[1]
    )
    assert np.abs(host(out)[:1] - wanted).max() <= TOLERANCE["float32"] * scale.max()
    # No error is pending: kernels of CuPy's and cuDNN's run.
    cupy.cuda.Device().synchronize()
    greedy.candidate.build()(*inputs, out)
    assert np.abs(host(out)[:1] - wanted).max() <= TOLERANCE["float32"] * scale.max()


def test_a_search_with_little_memory_finds_what_fits(rng):
    cupy = devices.cupy()
    problem = ConvolutionProblem.parse("forward n16 c64 28x28 k64 3x3 p1 float32 nchw")
    values, inputs = operands(problem, lambda shape: rng.standard_normal(shape, np.float32))
    out = on_gpu(problem, "y", np.full(problem.y_shape, np.nan))
    wanted, scale = expected(problem, *values)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    size = sum(array.nbytes for array in (*inputs, out))
    pool.set_limit(size=pool.used_bytes() + 2 * size)
    try:
        with warnings.catch_warnings():
            # Where not even the operands of a search fit, the first that runs is used, and a warning says so.
            warnings.simplefilter("ignore", UserWarning)
            run(problem, inputs, out)
    finally:
        pool.set_limit(size=0)
    assert np.abs(host(out) - wanted).max() <= TOLERANCE["float32"] * scale.max()


def test_a_layer_whose_shapes_vary_is_not_searched_for_ever(rng, monkeypatch):
    from flcuda.ops import convolution as module

    monkeypatch.setattr(module, "SEARCHED", 2)
    monkeypatch.setattr(module, "_searches", module._Searches())
    problems = [ConvolutionProblem.parse(f"forward n{n} c8 9x9 k8 3x3 p1 float16 nhwc") for n in range(11, 16)]
    caught = []
    for problem in problems:
        values, inputs = operands(problem, rng.standard_normal)
        out = on_gpu(problem, "y", np.full(problem.y_shape, np.nan))
        wanted, scale = expected(problem, *values)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run(problem, inputs, out)
        caught.extend(found)
        assert np.abs(host(out) - wanted).max() <= TOLERANCE["float16"] * scale.max()
    told = [each for each in caught if "a convolution has been searched for 2 shapes" in str(each.message)]
    assert len(told) == 1
    assert told[0].filename == __file__
