"""Fused graphs run on the GPU and compared with float64 on the host; where no engine takes one, the error says why."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from helpers import place, to_numpy

from flcuda import device as devices
from flcuda.cudnn import library
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import EngineConfig, ExecutionPlan, Graph, OperationGraph, Tensor, build_plans
from flcuda.cudnn.resources import handle
from flcuda.errors import CudnnError, CudnnNotSupportedError
from flcuda.ops.convolution import convolution

# Shares of the largest magnitude of a result: rounding of 16-bit outputs, and of 16-bit intermediates where engines
# have them.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-3, "boolean": 0.0}
PLANS = 6  # of each graph, the best first


@dataclass
class Fusion:
    """A graph with its inputs and, by the names of its outputs, what they have to be."""

    graph: Graph
    dtype: str
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    expected: dict[str, np.ndarray] = field(default_factory=dict)

    def tensor(self, name: str, values: np.ndarray, dtype: str = "") -> Tensor:
        """Adds an input; its values are rounded to the dtype first."""
        word = dtype or self.dtype
        self.inputs[name] = values.astype(devices.DTYPES[word])
        return self.graph.tensor(values.shape, word, layout="nhwc", name=name)

    def wide(self, name: str) -> np.ndarray:
        return self.inputs[name].astype(np.float64)

    def output(self, tensor: Tensor, name: str, expected: np.ndarray) -> Tensor:
        self.expected[name] = expected
        return self.graph.output(tensor, layout="nhwc", name=name)


N, SIZE = 4, 14


def images(rng: np.random.Generator, channels: int) -> np.ndarray:
    return rng.standard_normal((N, channels, SIZE, SIZE))


def per_channel(rng: np.random.Generator, channels: int, low: float = -1.0) -> np.ndarray:
    return rng.uniform(low, 1.5, (1, channels, 1, 1))


def filters(rng: np.random.Generator, channels: int) -> np.ndarray:
    return rng.standard_normal((channels, channels, 3, 3)) / np.sqrt(9 * channels)


CONVOLUTION = convolution(padding=1)


def forward(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return CONVOLUTION.forward(x, w)


def sums(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return y.sum((0, 2, 3), keepdims=True), (y * y).sum((0, 2, 3), keepdims=True)


def conv_bias_activation(f: Fusion, rng: np.random.Generator, c: int) -> None:
    g = f.graph
    x, w = f.tensor("x", images(rng, c)), f.tensor("w", filters(rng, c))
    b = f.tensor("b", per_channel(rng, c))
    y = forward(f.wide("x"), f.wide("w")) + f.wide("b")
    f.output(g.relu(g.add(g.convolution_forward(x, w, padding=1), b)), "y", np.maximum(y, 0))


def conv_bias_silu(f: Fusion, rng: np.random.Generator, c: int) -> None:
    g = f.graph
    x, w = f.tensor("x", images(rng, c)), f.tensor("w", filters(rng, c))
    b = f.tensor("b", per_channel(rng, c))
    y = forward(f.wide("x"), f.wide("w")) + f.wide("b")
    f.output(g.silu(g.add(g.convolution_forward(x, w, padding=1), b)), "y", y / (1 + np.exp(-y)))


def add_statistics(f: Fusion, y: Tensor, expected: np.ndarray) -> None:
    for name, tensor, value in zip(("sum", "square_sum"), f.graph.generate_statistics(y), sums(expected), strict=True):
        f.output(tensor, name, value)


def conv_statistics(f: Fusion, rng: np.random.Generator, c: int) -> None:
    x, w = f.tensor("x", images(rng, c) + 0.5), f.tensor("w", filters(rng, c) + 0.02)
    expected = forward(f.wide("x"), f.wide("w"))
    y = f.output(f.graph.convolution_forward(x, w, padding=1), "y", expected)
    add_statistics(f, y, expected)


def prologue(f: Fusion, rng: np.random.Generator, c: int) -> tuple[Tensor, np.ndarray]:
    g = f.graph
    x = f.tensor("x", images(rng, c))
    scale, bias = f.tensor("scale", per_channel(rng, c)), f.tensor("bias", per_channel(rng, c))
    wide = np.maximum(f.wide("x") * f.wide("scale") + f.wide("bias"), 0)
    return g.relu(g.add(g.mul(x, scale), bias)), wide


def full_form(f: Fusion, rng: np.random.Generator, c: int) -> None:
    prepared, wide = prologue(f, rng, c)
    w = f.tensor("w", filters(rng, c))
    expected = forward(wide, f.wide("w"))
    y = f.output(f.graph.convolution_forward(prepared, w, padding=1), "y", expected)
    add_statistics(f, y, expected)


def prologue_filter_gradient(f: Fusion, rng: np.random.Generator, c: int) -> None:
    prepared, wide = prologue(f, rng, c)
    dy = f.tensor("dy", images(rng, c))
    expected = CONVOLUTION.backward_filter(wide, f.wide("dy"), (c, c, 3, 3))
    f.output(f.graph.convolution_backward_filter(prepared, dy, (c, c, 3, 3), padding=1), "dw", expected)


def data_gradient_drelu(f: Fusion, rng: np.random.Generator, c: int) -> None:
    g = f.graph
    dy, w, x = f.tensor("dy", images(rng, c)), f.tensor("w", filters(rng, c)), f.tensor("x", images(rng, c))
    dx = CONVOLUTION.backward_data(f.wide("dy"), f.wide("w"), x.shape)
    made = g.relu_backward(g.convolution_backward_data(dy, w, x.shape, padding=1), x)
    f.output(made, "dx", np.where(f.wide("x") > 0, dx, 0))


def data_gradient_drelu_weights(f: Fusion, rng: np.random.Generator, c: int) -> None:
    g = f.graph
    dy, w = f.tensor("dy", images(rng, c)), f.tensor("w", filters(rng, c))
    # No normalised value is near zero, where rounding would choose the side.
    values = images(rng, c)
    x = f.tensor("x", values + np.sign(values))
    wide = f.wide("x")
    mean = f.tensor("mean", np.zeros((1, c, 1, 1)), "float32")
    inv_std = f.tensor("inv_std", 1 / wide.std((0, 2, 3), keepdims=True), "float32")
    scale = f.tensor("scale", per_channel(rng, c, 0.5), "float32")
    bias = f.tensor("bias", np.zeros((1, c, 1, 1)), "float32")
    normalised = g.add(g.mul(g.mul(g.sub(x, mean), inv_std), scale), bias)
    dx = np.where(wide > 0, CONVOLUTION.backward_data(f.wide("dy"), f.wide("w"), wide.shape), 0)
    masked = g.relu_backward(g.convolution_backward_data(dy, w, x.shape, padding=1), normalised)
    masked = f.output(masked, "masked", dx)
    made = g.batch_norm_backward_weights(masked, x, mean, inv_std, scale)
    unit = wide * f.wide("inv_std")
    dscale, dbias = (dx * unit).sum((0, 2, 3), keepdims=True), dx.sum((0, 2, 3), keepdims=True)
    count = wide.size / c
    # dx = scale * inv_std * (dy - dbias / count - unit * dscale / count), as factors of dy, of x, and the rest.
    factor = f.wide("scale") * f.wide("inv_std")
    f.output(made.dscale, "dscale", dscale)
    f.output(made.dbias, "dbias", dbias)
    f.output(made.equivalent_dy_scale, "equivalent_dy_scale", factor)
    f.output(made.equivalent_x_scale, "equivalent_x_scale", -factor * f.wide("inv_std") * dscale / count)
    f.output(made.equivalent_bias, "equivalent_bias", -factor * dbias / count)


def norm_add_relu(f: Fusion, rng: np.random.Generator, c: int) -> None:
    g = f.graph
    x, z = f.tensor("x", images(rng, c) * 2 + 0.5), f.tensor("z", images(rng, c))
    scale, bias = (f.tensor(name, per_channel(rng, c), "float32") for name in ("scale", "bias"))
    mean = f.tensor("old_mean", per_channel(rng, c), "float32")
    variance = f.tensor("old_variance", per_channel(rng, c, 0.5), "float32")
    made = g.norm_forward("batch", x, scale, bias, running_mean=mean, running_variance=variance, momentum=0.25)
    wide = f.wide("x")
    m, v = wide.mean((0, 2, 3), keepdims=True), wide.var((0, 2, 3), keepdims=True)
    inv = 1 / np.sqrt(v + 1e-5)
    y = (wide - m) * inv * f.wide("scale") + f.wide("bias") + f.wide("z")
    f.output(g.relu(g.add(made.y, z)), "y", np.maximum(y, 0))
    count = wide.size / c
    expected = (
        m,
        inv,
        0.75 * f.wide("old_mean") + 0.25 * m,
        0.75 * f.wide("old_variance") + 0.25 * v * count / (count - 1),
    )
    names = ("mean", "inv_variance", "running_mean", "running_variance")
    for name, tensor, value in zip(names, made[1:], expected, strict=True):
        assert tensor is not None
        f.output(tensor, name, value)


def norm_backward(f: Fusion, rng: np.random.Generator, c: int) -> None:
    g = f.graph
    dy, x = f.tensor("dy", images(rng, c)), f.tensor("x", images(rng, c) * 2 + 0.5)
    scale = f.tensor("scale", per_channel(rng, c, 0.5), "float32")
    wide, dwide = f.wide("x"), f.wide("dy")
    mean = f.tensor("mean", wide.mean((0, 2, 3), keepdims=True), "float32")
    inv = f.tensor("inv", 1 / np.sqrt(wide.var((0, 2, 3), keepdims=True) + 1e-5), "float32")
    made = g.norm_backward("batch", dy, x, scale, mean=mean, inv_variance=inv)
    unit = (wide - f.wide("mean")) * f.wide("inv")
    dscale, dbias = (dwide * unit).sum((0, 2, 3), keepdims=True), dwide.sum((0, 2, 3), keepdims=True)
    count = wide.size / c
    dx = f.wide("scale") * f.wide("inv") * (dwide - dbias / count - unit * dscale / count)
    assert made.dbias is not None
    for name, tensor, value in zip(("dx", "dscale", "dbias"), made, (dx, dscale, dbias), strict=True):
        f.output(tensor, name, value)


FUSIONS: dict[str, Callable[[Fusion, np.random.Generator, int], None]] = {
    "convolution, bias, relu": conv_bias_activation,
    "convolution, bias, silu": conv_bias_silu,
    "convolution, statistics": conv_statistics,
    "scale, bias, relu, convolution, statistics": full_form,
    "scale, bias, relu, filter gradient": prologue_filter_gradient,
    "data gradient, drelu": data_gradient_drelu,
    "data gradient, drelu, batch norm weight gradients": data_gradient_drelu_weights,
    "norm, add, relu": norm_add_relu,
    "norm backward": norm_backward,
}


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Arrays:
    """The arrays of a graph on the GPU: inputs, and outputs full of NaN."""

    by_uid: dict[int, Any]
    outputs: dict[str, Any]

    @classmethod
    def of(cls, built: OperationGraph, inputs: dict[str, np.ndarray]) -> "Arrays":
        by_uid = {tensor.uid: place(inputs[tensor.name], "cuda", "nhwc") for tensor in built.inputs}
        outputs = {}
        for tensor in built.outputs:
            array = devices.empty(tensor.shape, tensor.dtype, device=devices.resolve("cuda"), layout="nhwc")
            # How far a dimension of one element is apart from nothing does not matter.
            assert all(
                size == 1 or ours == theirs
                for size, ours, theirs in zip(tensor.shape, devices.element_strides(array), tensor.strides, strict=True)
            )
            array[...] = np.nan
            by_uid[tensor.uid] = outputs[tensor.name] = array
        return cls(by_uid, outputs)

    def numpy(self) -> dict[str, np.ndarray]:
        return {name: to_numpy(array) for name, array in self.outputs.items()}


def execute(made: ExecutionPlan, arrays: Arrays) -> None:
    scratch = devices.cupy().empty(max(1, made.workspace), np.uint8)
    made.execute(handle(), arrays.by_uid, scratch)
    devices.synchronize(devices.resolve("cuda"))


def plans(configurations: list[EngineConfig]) -> Iterator[ExecutionPlan]:
    """The plans that can be built, of the best configurations and of one a further engine."""
    engines = {configuration.engine_id: configuration for configuration in reversed(configurations)}
    chosen = {c.key: c for c in (*configurations[:PLANS], *engines.values())}
    for configuration in chosen.values():
        try:
            yield configuration.plan()
        except CudnnNotSupportedError:
            continue


def check(arrays: Arrays, fusion: Fusion, tag: str) -> None:
    for name, expected in fusion.expected.items():
        found = to_numpy(arrays.outputs[name]).astype(np.float64)
        scale = np.abs(expected).max()
        error = np.abs(found - expected).max()
        assert np.isfinite(found).all(), f"{name} of {tag}"
        assert error <= TOLERANCE[fusion.dtype] * scale, f"{name} of {tag}: {error / scale:.2e} of {scale:.3g}"


def configurations_or_why_not(built: OperationGraph) -> list[EngineConfig]:
    """The configurations; none when the error lists every engine with its reason."""
    counts = [len(built.heuristics(mode)) for mode in ("A", "fallback", "B")]
    if any(counts):
        return built.configurations()
    with pytest.raises(CudnnNotSupportedError) as caught:
        built.configurations()
    assert "no engine supports operation 1" in str(caught.value)
    assert "engine 0" in str(caught.value)
    return []


def capability() -> int:
    return int(devices.cupy().cuda.Device().compute_capability)


@pytest.mark.parametrize("intermediate", ["float32", "same"])
@pytest.mark.parametrize("channels", [64, 60])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FUSIONS)
def test_fusion(name: str, dtype: str, channels: int, intermediate: str, rng: np.random.Generator) -> None:
    fusion = Fusion(Graph(intermediate=dtype if intermediate == "same" else None), dtype)
    FUSIONS[name](fusion, rng, channels)
    built = fusion.graph.build(handle())
    configurations = configurations_or_why_not(built)
    if not configurations:
        # Where this is known to work it has to.
        assert not (capability() == 90 and (dtype, channels, intermediate) == ("float16", 64, "float32"))
        return
    count = 0
    for made in plans(configurations):
        arrays = Arrays.of(built, fusion.inputs)
        execute(made, arrays)
        check(arrays, fusion, made.tag)
        count += 1
    assert count


# --- plans ------------------------------------------------------------------------------------------------------------


def some_fusion(rng: np.random.Generator) -> tuple[Fusion, OperationGraph]:
    fusion = Fusion(Graph(), "float16")
    conv_bias_activation(fusion, rng, 64)
    return fusion, fusion.graph.build(handle())


def test_restored_plan_gives_the_same_bits(rng: np.random.Generator) -> None:
    fusion, built = some_fusion(rng)
    configuration = next(c for c in built.configurations() if c.deterministic)
    made = configuration.plan()
    restored = ExecutionPlan.from_json(made.to_json(), handle())
    results = []
    for plan in (made, restored):
        arrays = Arrays.of(built, fusion.inputs)
        execute(plan, arrays)
        check(arrays, fusion, plan.tag)
        results.append(arrays.numpy()["y"].tobytes())
    assert results[0] == results[1]


def test_this_gpu_by_its_own_properties(rng: np.random.Generator) -> None:
    """Heuristics with the properties read off the GPU are those of its handle, and a plan made from them runs."""
    if library.load().version < 90800:
        pytest.skip("device properties came with cuDNN 9.8")
    fusion, built = some_fusion(rng)
    with DeviceProperties.of_handle(handle()) as properties:
        described = [configuration.key for configuration in built.heuristics("A", device=properties)]
        assert described == [configuration.key for configuration in built.heuristics("A")]
        made = built.configurations(properties)[0].plan(device=properties)
    arrays = Arrays.of(built, fusion.inputs)
    execute(made, arrays)
    check(arrays, fusion, made.tag)


def filter_gradient(f: Fusion, rng: np.random.Generator, c: int) -> None:
    x, dy = f.tensor("x", images(rng, c)), f.tensor("dy", images(rng, c))
    expected = CONVOLUTION.backward_filter(f.wide("x"), f.wide("dy"), (c, c, 3, 3))
    f.output(f.graph.convolution_backward_filter(x, dy, (c, c, 3, 3), padding=1), "dw", expected)


def plan_with_workspace(rng: np.random.Generator) -> tuple[Fusion, OperationGraph, ExecutionPlan]:
    """Which plans need a workspace is different in each version of cuDNN; some filter gradient's does in all."""
    for dtype in ("float16", "float32"):
        fusion = Fusion(Graph(), dtype)
        filter_gradient(fusion, rng, 64)
        built = fusion.graph.build(handle())
        for configuration in built.configurations():
            try:
                made = configuration.plan()
            except CudnnNotSupportedError:
                continue
            if made.workspace:
                return fusion, built, made
    raise AssertionError("no plan of a filter gradient needs a workspace")


def test_pointers_and_workspace(rng: np.random.Generator) -> None:
    """New pointers are followed, old ones kept; a missing one is an error before cuDNN sees it."""
    fusion, built, made = plan_with_workspace(rng)
    sets = [Arrays.of(built, fusion.inputs) for _ in range(20)]
    for arrays in (*sets, *sets[:3]):
        execute(made, arrays)
    for arrays in sets:
        check(arrays, fusion, made.tag)
    pointers = {uid: array.data.ptr for uid, array in sets[0].by_uid.items()}
    with pytest.raises(ValueError, match=f"workspace: the plan needs {made.workspace} bytes"):
        made.execute(handle(), pointers)
    first = made.uids[0]
    with pytest.raises(ValueError, match=f"there is none for the tensor with uid {first}"):
        made.execute(handle(), {uid: pointer for uid, pointer in pointers.items() if uid != first}, 1 << 20)
    with pytest.raises(ValueError, match=f"that of the tensor with uid {first} is null"):
        made.execute(handle(), {**pointers, first: 0}, 1 << 20)
    with pytest.raises(TypeError, match="expected a device address or a CuPy array"):
        made.execute(handle(), {**pointers, first: "x"}, 1 << 20)


def test_plans_built_in_threads_run(rng: np.random.Generator) -> None:
    """All threads use the one handle while they build; it is this thread's again when the plans run."""
    fusion, built = some_fusion(rng)
    configurations = built.configurations()[:12]
    made = build_plans(configurations, handle(), threads=4)
    assert len(made) == len(configurations)
    good = 0
    for configuration, plan in zip(configurations, made, strict=True):
        if isinstance(plan, CudnnError):
            assert isinstance(plan, CudnnNotSupportedError)
            continue
        assert plan.tag == configuration.tag
        assert plan.build_ms > 0
        arrays = Arrays.of(built, fusion.inputs)
        execute(plan, arrays)
        check(arrays, fusion, plan.tag)
        good += 1
    assert good > 1


def test_called_with_arrays_on_the_current_stream(rng: np.random.Generator) -> None:
    """The workspace is CuPy's, the handle this thread's, and the stream CuPy's current one at each call."""
    cupy = devices.cupy()
    fusion, built, made = plan_with_workspace(rng)
    arrays = Arrays.of(built, fusion.inputs)
    in_order = [arrays.by_uid[uid] for uid in made.uids]
    taken = []
    pool = cupy.cuda.MemoryPool()

    def allocate(size: int) -> Any:
        taken.append(size)
        return pool.malloc(size)

    stream = cupy.cuda.Stream(non_blocking=True)
    devices.synchronize(devices.resolve("cuda"))
    with cupy.cuda.using_allocator(allocate):
        made(*in_order)
        devices.synchronize(devices.resolve("cuda"))
        check(arrays, fusion, made.tag)
        with stream:
            arrays.outputs["dw"][...] = np.nan
            made(*in_order)
            assert handle().stream == stream.ptr
            stream.synchronize()
            check(arrays, fusion, made.tag)
    assert taken.count(made.workspace) == 2
    assert handle().stream == cupy.cuda.get_current_stream().ptr
    with pytest.raises(ValueError, match=f"pointers: 2 for the {len(made.uids)} tensors"):
        made(*in_order[:2])


def test_scalars_by_value(rng: np.random.Generator) -> None:
    """The plan keeps a scalar's memory: nothing else refers to it when the plan runs."""
    g = Graph()
    x = g.tensor((N, 64, SIZE, SIZE), "float16", layout="nhwc", name="x")
    y = g.output(g.add(g.mul(x, 2.5), -1.0), name="y")
    made = g.build(handle()).configurations()[0].plan()
    values = images(rng, 64).astype(np.float16)
    source = place(values, "cuda", "nhwc")
    out = devices.empty(x.shape, "float16", device=devices.resolve("cuda"), layout="nhwc")
    scratch = devices.cupy().empty(max(1, made.workspace), np.uint8)
    made.execute(handle(), {x.uid: source, y.uid: out}, scratch)
    np.testing.assert_allclose(to_numpy(out), values.astype(np.float64) * 2.5 - 1, rtol=2e-3, atol=2e-3)


def test_capture(rng: np.random.Generator) -> None:
    """A captured run gives the same as the run itself, at each replay."""
    cupy = devices.cupy()
    fusion, built = some_fusion(rng)
    made = built.configurations()[0].plan()
    arrays = Arrays.of(built, fusion.inputs)
    execute(made, arrays)
    expected = arrays.numpy()["y"]
    scratch = cupy.empty(max(1, made.workspace), np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        made.execute(handle(), arrays.by_uid, scratch)
        stream.begin_capture()
        made.execute(handle(), arrays.by_uid, scratch)
        captured = stream.end_capture()
        for _ in range(2):
            arrays.outputs["y"][...] = np.nan
            captured.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(arrays.numpy()["y"], expected)


def test_populate_cuda_graph(rng: np.random.Generator) -> None:
    """An engine without the note refuses in words, one with it fills a CUDA graph."""
    if library.load().version < 90500:
        pytest.skip("cuDNN 9.5 brought cudnnBackendPopulateCudaGraph")
    fusion, built = some_fusion(rng)
    arrays = Arrays.of(built, fusion.inputs)
    cuda_graph = _empty_cuda_graph()
    native = [c for c in built.configurations() if "supports_cuda_graph_native_api" in c.behavior_notes]
    if not native:
        with pytest.raises(CudnnError):
            _populate(built.configurations()[0].plan(), cuda_graph, arrays)
        return
    _populate(native[0].plan(), cuda_graph, arrays)


def _populate(made: ExecutionPlan, cuda_graph: int, arrays: Arrays) -> None:
    scratch = devices.cupy().empty(max(1, made.workspace), np.uint8)
    made.populate_cuda_graph(handle(), cuda_graph, arrays.by_uid, scratch)
    made.update_cuda_graph(handle(), cuda_graph, arrays.by_uid, scratch)


def _empty_cuda_graph() -> int:
    """CuPy has no call that makes an empty graph; the driver is in the process already."""
    driver = ctypes.CDLL("libcuda.so.1")
    made = ctypes.c_void_p()
    assert driver.cuGraphCreate(ctypes.byref(made), 0) == 0
    assert made.value is not None
    return made.value
