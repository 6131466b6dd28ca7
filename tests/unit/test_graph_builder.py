"""The graph builder without cuDNN: what it infers, what it refuses, and the tables of attributes."""

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import graph_cases
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flcuda import device as devices
from flcuda.cudnn import bindings, graph, library
from flcuda.cudnn.graph import Graph, Tensor
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.problem import output_shape


def test_there_are_thirty_misbuilt_graphs() -> None:
    assert len(graph_cases.MISBUILT) >= 30


@pytest.mark.parametrize(
    ("build", "kind", "names"),
    [case[1:] for case in graph_cases.MISBUILT],
    ids=[case[0] for case in graph_cases.MISBUILT],
)
def test_misbuilt(build, kind, names, monkeypatch) -> None:
    def called(*arguments):
        raise AssertionError("cuDNN was asked")

    monkeypatch.setattr(bindings, "cudnnBackendCreateDescriptor", called)
    with pytest.raises(kind) as caught:
        build(Graph())
    for name in names:
        assert name in str(caught.value)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.data(),
)
def test_convolution_shapes(rank: int, groups: int, data: st.DataObject) -> None:
    """Output shapes are the Problem's, the gradients take them back, and every layout is kept."""
    draw = data.draw
    size = st.integers(1, 9)
    x_shape = (draw(size), groups * draw(st.integers(1, 4)), *(draw(st.integers(3, 12)) for _ in range(rank)))
    w_shape = (groups * draw(st.integers(1, 4)), x_shape[1] // groups, *(draw(st.integers(1, 3)) for _ in range(rank)))
    padding = tuple((draw(st.integers(0, 3)), draw(st.integers(2, 4))) for _ in range(rank))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(rank))
    layout = draw(st.sampled_from(devices.LAYOUTS))
    geometry = {"padding": padding, "stride": stride, "dilation": dilation}
    before, after = ([pair[side] for pair in padding] for side in (0, 1))
    expected = output_shape(x_shape, w_shape, before, after, stride, dilation, groups)
    g = Graph()
    x, w = (g.tensor(shape, "float16", layout=layout) for shape in (x_shape, w_shape))
    y = g.convolution_forward(x, w, **geometry)
    assert y.shape == expected
    assert y.virtual
    dy = g.output(y)
    assert (dy.dtype, dy.virtual, dy.strides) == ("float16", False, devices.contiguous_strides(expected, layout))
    dx = g.convolution_backward_data(dy, w, x_shape, **geometry)
    dw = g.convolution_backward_filter(x, dy, w_shape, **geometry)
    for made, shape in ((dx, x_shape), (dw, w_shape)):
        assert made.shape == shape
        ambiguous = devices.contiguous_strides(expected, "nchw") == devices.contiguous_strides(expected, "nhwc")
        if not ambiguous or made is dw:
            assert made.strides in {devices.contiguous_strides(shape, name) for name in devices.LAYOUTS}


def test_memory_order_follows_the_first_input() -> None:
    g = Graph()
    x = g.tensor((2, 3, 4, 5), "float32", strides=(1, 2, 6, 24))
    assert g.relu(x).strides == (1, 2, 6, 24)
    assert g.generate_statistics(x)[0].strides == (1, 1, 3, 3)


def test_dtypes() -> None:
    """Virtual tensors have the intermediate dtype; outputs that of the inputs; statistics the compute dtype."""
    g = Graph(intermediate="float16")
    x = g.tensor((2, 8, 4, 4), np.float16, layout="nhwc")
    w = g.tensor((8, 8, 1, 1), "float16", layout="nhwc")
    y = g.convolution_forward(x, w)
    assert y.dtype == "float16"
    assert g.relu(y, dtype="float32").dtype == "float32"
    total, _ = g.generate_statistics(y)
    assert total.dtype == "float32"
    assert g.output(total).dtype == "float32"
    assert g.output(y).dtype == "float16"
    assert g.pointwise("cmp_gt", y, 0.0).dtype == "boolean"
    plain = Graph()
    made = plain.relu(plain.tensor((2, 8), "bfloat16"))
    assert made.dtype == "float32"
    assert plain.output(made).dtype == "bfloat16"
    other = plain.relu(plain.tensor((2, 8), "bfloat16"))
    assert plain.output(other, dtype="float32", name="z") == Tensor(
        other.uid, "z", (2, 8), (8, 1), "float32", 16, virtual=False
    )


def test_broadcast_and_numbers() -> None:
    g = Graph()
    x = g.tensor((2, 8, 4, 4), "float16", layout="nhwc")
    b = g.tensor((1, 8, 1, 1), "float16")
    y = g.mul(g.add(b, x), 0.5)
    assert y.shape == x.shape
    assert y.strides == x.strides
    scalars = [tensor for tensor in g._tensors.values() if tensor.value is not None]
    assert [(tensor.value, tensor.shape, tensor.dtype) for tensor in scalars] == [(0.5, (1, 1, 1, 1), "float32")]


def test_scalars() -> None:
    g = Graph()
    assert g.scalar(3, "int64").value == 3
    assert g.scalar(np.float32(0.5)).value == 0.5
    with pytest.raises(ValueError, match=r"value: 0\.5 does not fit in int32"):
        g.scalar(0.5, "int32")
    with pytest.raises(TypeError, match="'1' is no number"):
        g.scalar("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="True is no number"):
        g.scalar(True)
    x = g.tensor((2, 8, 4, 4), "float16")
    with pytest.raises(TypeError, match=r"convolution_forward: w: .* is by value"):
        g.convolution_forward(x, g.scalar(1.0))


def test_resample_shapes() -> None:
    g = Graph()
    x = g.tensor((2, 8, 7, 9), "float16", layout="nhwc")
    y, index = g.resample_forward("max", x, window=3, stride=2, padding=1, index=True)
    assert y.shape == (2, 8, 4, 5)
    assert index is not None
    assert (index.shape, index.dtype) == (y.shape, "int8")
    larger, none = g.resample_forward("bilinear", x, window=2, stride=Fraction(1, 2))
    assert none is None
    assert larger.shape == (2, 8, 11, 15)


def test_names_are_unique() -> None:
    g = Graph()
    names = [g.tensor((1,), "float32", name=name).name for name in ("x", "x", "x_2", "x")]
    assert len(set(names)) == 4
    assert names[0] == "x"


def test_extent() -> None:
    g = Graph()
    assert g.tensor((2, 3), "float16", strides=(8, 2)).extent == 2 * (8 + 4 + 1)
    assert g.tensor((3, 5), "boolean").extent == 2


def test_every_operation_has_a_case() -> None:
    methods = {name for name in vars(Graph) if not name.startswith("_")}
    short = {"tensor", "scalar", "output", "build", "check", "relu_backward", "identity", "sub", "div", "add", "mul"}
    short |= {"relu", "sigmoid", "tanh", "elu", "gelu", "softplus", "silu"}
    for method in methods - short:
        told = method.replace("convolution_", "convolution ")
        assert any(name.startswith(told) for name in graph_cases.CASES), method


def test_short_names_are_the_pointwise_modes() -> None:
    g = Graph()
    x = g.tensor((2, 8), "float32")
    made = [g.relu(x), g.sigmoid(x), g.tanh(x), g.elu(x), g.gelu(x), g.softplus(x), g.silu(x), g.identity(x)]
    made += [g.add(x, x), g.sub(x, 1.0), g.mul(2.0, x), g.div(x, x), g.relu_backward(x, x, lower_slope=0.1)]
    assert len({tensor.uid for tensor in made}) == len(made)
    modes = [operation.label.split("pointwise ")[1] for operation in g._operations]
    assert modes == [
        *("relu_fwd", "sigmoid_fwd", "tanh_fwd", "elu_fwd", "gelu_fwd", "softplus_fwd", "swish_fwd", "identity"),
        *("add", "sub", "mul", "div", "relu_bwd"),
    ]


# --- tables ---------------------------------------------------------------------------------------------------------


def test_tables_name_real_things() -> None:
    attributes = {name.removeprefix("CUDNN_ATTR_") for name in bindings.cudnnBackendAttributeName_t.__members__}
    assert set(graph._ATTRIBUTE_TYPES) <= attributes
    for prefix in graph._ATTRIBUTE_SINCE:
        assert any(name.startswith(prefix) for name in attributes), prefix
    types = {name.removeprefix("CUDNN_TYPE_") for name in bindings.cudnnBackendAttributeType_t.__members__}
    assert {graph.attribute_type(name) for name in attributes} <= types
    for kind in (*graph._KIND_SINCE, *graph._CONTENT_KINDS.values()):
        assert f"CUDNN_BACKEND_{kind}_DESCRIPTOR" in bindings.cudnnBackendDescriptorType_t.__members__
    notes = {*graph.NOTES}
    for enum, prefix in (
        (bindings.cudnnBackendNumericalNote_t, "CUDNN_NUMERICAL_NOTE_"),
        (bindings.cudnnBackendBehaviorNote_t, "CUDNN_BEHAVIOR_NOTE_"),
    ):
        words = {member.name.removeprefix(prefix).lower() for member in enum if "COUNT" not in member.name}
        assert words <= notes


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("TENSOR_DIMENSIONS", "INT64"),
        ("TENSOR_IS_VIRTUAL", "BOOLEAN"),
        ("OPERATION_CONVOLUTION_FORWARD_X", "BACKEND_DESCRIPTOR"),
        ("OPERATION_CONVOLUTION_BWD_FILTER_DW", "BACKEND_DESCRIPTOR"),
        ("OPERATION_CONVOLUTION_FORWARD_ALPHA", "FLOAT"),
        ("OPERATION_POINTWISE_XDESC", "BACKEND_DESCRIPTOR"),
        ("OPERATION_BN_FINALIZE_MATH_PREC", "DATA_TYPE"),
        ("EXECUTION_PLAN_JSON_REPRESENTATION", "CHAR"),
        ("EXECUTION_PLAN_HANDLE", "HANDLE"),
        ("ENGINEHEUR_SM_COUNT_TARGET", "INT32"),
    ],
)
def test_attribute_type(name: str, kind: str) -> None:
    assert graph.attribute_type(name) == kind


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("TENSOR_DIMENSIONS", 90000),
        ("ENGINEHEUR_DEVICEPROP", 90800),
        ("EXECUTION_PLAN_CUDA_GRAPH_RETENTION", 92800),
        ("OPERATION_REDUCTION_XDESC", 90000),
        ("OPERATION_REDUCTION_DIMS", 92700),
    ],
)
def test_attribute_since(name: str, version: int) -> None:
    assert graph.attribute_since(name) == version


class _Old:
    version = 90100
    version_text = "9.1.0"
    path = "/old"


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda: graph.Backend("DEVICEPROP"), ("DEVICEPROP descriptor", "9.8.0 brought it")),
        (
            lambda: graph._require(
                graph.attribute_since("ENGINEHEUR_DEVICEPROP"), "f", "attribute ENGINEHEUR_DEVICEPROP"
            ),
            ("ENGINEHEUR_DEVICEPROP", "9.8.0 brought it"),
        ),
        (lambda: _built(dtype="float4_e2m1fn"), ("float4_e2m1fn", "'x'", "9.7.0 brought it")),
        (lambda: _built(shape=(1, 2, 2**15, 2**15)), ("2^31-1 elements", "'x'", "9.3.0 brought it")),
    ],
)
def test_what_the_library_is_too_old_for(ask, named, monkeypatch) -> None:
    monkeypatch.setattr(library, "load", lambda path=None: _Old())
    monkeypatch.setattr(graph, "_Held", lambda kind: pytest.fail("cuDNN was asked"))
    with pytest.raises(CudnnNotSupportedError) as caught:
        ask()
    for text in (*named, "cuDNN 9.1.0 of /old"):
        assert text in str(caught.value)


def _built(shape: tuple[int, ...] = (1, 2, 4, 4), dtype: str = "float16") -> None:
    g = Graph()
    g.output(g.relu(g.tensor(shape, dtype, name="x")))
    g.build()


def test_modes_are_the_headers() -> None:
    assert len(graph.POINTWISE_MODES) == len(bindings.cudnnPointwiseMode_t.__members__)
    assert set(graph_cases.TWO) == set(graph._BINARY)


def test_importing_loads_nothing() -> None:
    text = "import sys, flcuda.cudnn.graph; from flcuda.cudnn import library; "
    text += "print(library.is_loaded(), 'cupy' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", text], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
