"""What cuDNN has for traced functions, forward and backward, on the profile of an H200: no GPU is needed."""

import json

import pytest
from planning import CUDNN, require_device_properties

import flcuda
from flcuda import device as devices
from flcuda.cudnn import library
from flcuda.finder import ConvolutionProblem
from flcuda.finder.graph_problem import GraphProblem

pytestmark = CUDNN

graph = flcuda.graph
ACTIVATIONS = ("relu", "silu", "gelu", "sigmoid", "tanh")
SHAPES = ((3, 64, 13, 11), (48, 64, 3, 3), (1, 48, 1, 1))


@pytest.fixture(autouse=True, scope="module")
def _libcuda():
    require_device_properties()


def arrays(shapes, dtype, layout="nhwc", gradients=True):
    made = [devices.zeros(shape, dtype, device="cpu", layout=layout) for shape in shapes]
    return [flcuda.Tensor(a, requires_grad=True) for a in made] if gradients else made


def layer(activation, **settings):
    @graph(**settings)
    def conv_bias_activation(x, w, b):
        return getattr(graph, activation)(graph.conv(x, w, padding=1) + b)

    return conv_bias_activation


def usable(part):
    return [candidate for candidate in part.candidates if candidate.reason is None]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "tf32"])
def test_every_graph_of_a_layer_has_engines(precision, activation):
    if precision == "tf32" and activation in ("sigmoid", "tanh") and library.load().version < 92800:
        pytest.skip("known fault of cuDNN 9.19: what backward needs is computed again there")
    if precision == "tf32":
        function, dtype = layer(activation, math="tensor_op"), "float32"
    else:
        function, dtype = layer(activation), precision
    explanation = function.explain(*arrays(SHAPES, dtype), gpu="h200")
    # The forward graph with all that backward needs; one graph of the pointwise gradient and the bias's sum; the two
    # gradients of the convolution as problems of their own. Nothing was refused and split.
    assert [part.title for part in explanation.parts] == ["forward", "backward 1", "backward 2", "backward 3"]
    kinds = [type(part.problem) for part in explanation.parts]
    assert kinds == [GraphProblem, GraphProblem, ConvolutionProblem, ConvolutionProblem]
    assert [part.problem.kind for part in explanation.parts[2:]] == ["backward_data", "backward_filter"]
    methods = [operation.method for operation in explanation.parts[1].problem.operations]
    assert methods == ["pointwise", "reduction"]
    assert len(explanation.parts[0].problem.outputs) == (1 if activation == "relu" else 2)
    for part in explanation.parts:
        assert part.refusal is None
        assert usable(part), part
        assert part.report is None


def test_explanation_as_text_and_json():
    explanation = layer("silu").explain(*arrays(SHAPES, "float16"), gpu="h200")
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= 80
    assert "conv_bias_activation" in text
    assert "backward_filter n3 c64 13x11 k48 3x3 p1 s1 float16 nhwc" in text
    assert "engines of the graph API that do not take it:" in text
    content = json.loads(explanation.to_json())
    first = content["parts"][0]
    assert GraphProblem.parse(first["problem"]) == explanation.parts[0].problem
    assert first["rows"][0]["source"] == "graph"
    assert first["rows"][0]["median_ms"] is None
    assert any("NOT_SUPPORTED" in refusal["reason"] for refusal in first["refusals"])
    # Each engine is in one of the three lists.
    listed = {int(row["algo"]) for row in first["rows"]}
    refused = {refusal["engine"] for refusal in first["refusals"]}
    assert sorted([*listed, *refused, *first["others"]]) == list(range(explanation.parts[0].engines))
    assert first["others"]
    assert "engines that take it too, further down cuDNN's list" in str(explanation)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_why_not(dtype):
    explanation = layer("silu").explain(*arrays(SHAPES, dtype, "nchw"), gpu="h200")
    titles = [part.title for part in explanation.parts]
    assert titles == ["forward", "forward, without what backward needs"]
    assert not any(usable(part) for part in explanation.parts)
    text = str(explanation)
    assert "nothing can be used" in text
    assert "is not nhwc, which 16-bit engines" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert all(part["refusal"] for part in json.loads(explanation.to_json())["parts"])


def test_strict_float32_is_never_tf32():
    explanation = layer("silu").explain(*arrays(SHAPES, "float32"), gpu="h200")
    for part in explanation.parts:
        assert all(candidate.math == "fma" for candidate in usable(part))
    refused = [c for part in explanation.parts for c in part.candidates if c.reason is not None]
    assert any("TF32" in candidate.reason for candidate in refused)


@pytest.mark.parametrize(
    ("name", "function", "shapes", "layout"),
    [
        ("pointwise chain", lambda x, y: graph.tanh(x * y + 2) / (1 + graph.exp(-x)), (SHAPES[0], SHAPES[0]), "nhwc"),
        ("scale and bias", lambda x, s, b: graph.gelu(x * s + b), (SHAPES[0], (1, 64, 1, 1), (1, 64, 1, 1)), "nhwc"),
        ("selection", lambda x, y: graph.where(x > y, x * 2, y), (SHAPES[0], SHAPES[0]), "nhwc"),
        ("maximum", lambda x, y: graph.maximum(x, abs(y)), (SHAPES[0], SHAPES[0]), "nhwc"),
        (
            "residual",
            lambda x, w, b, z: graph.relu(graph.conv(x, w, padding=1) + b + z),
            ((3, 64, 13, 11), (64, 64, 3, 3), (1, 64, 1, 1), (3, 64, 13, 11)),
            "nhwc",
        ),
        ("groups", lambda x, w: graph.silu(graph.conv(x, w, stride=2)), (SHAPES[0], (64, 32, 3, 3)), "nhwc"),
        ("matrix product", lambda a, b: graph.silu(a @ b), ((2, 64, 32), (2, 32, 48)), "nchw"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_functions_have_engines_both_ways(name, function, shapes, layout):
    explanation = graph(function).explain(*arrays(shapes, "float16", layout), gpu="h200")
    assert len(explanation.parts) >= 2
    for part in explanation.parts:
        assert part.refusal is None, part
        assert usable(part), part


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("shapes", "layout"),
    [
        (((3, 16, 7, 5), (1, 16, 1, 1)), "nchw"),
        (((3, 16, 7, 5), (3, 16, 7, 5)), "nchw"),
        (((3, 16, 7, 5), (1, 16, 7, 5)), "nhwc"),
        (((7, 13), (7, 1)), "nchw"),
    ],
)
def test_pointwise_graphs_that_are_done_at_rank_3(shapes, layout, dtype):
    explanation = graph(lambda a, b: graph.silu(a * b)).explain(*arrays(shapes, dtype, layout), gpu="h200")
    takes = [part for part in explanation.parts if part.refusal is None]
    # Forward and the pointwise part of backward, whatever becomes of the sum.
    assert len(takes) >= 2, explanation
    assert all(usable(part) for part in takes)
    assert {len(part.problem.tensors[0].shape) for part in takes} <= {3, len(shapes[0])}
    assert "silu1" in takes[0].problem.outputs


def test_only_the_forward_graph_without_gradients():
    explanation = layer("silu").explain(*arrays(SHAPES, "float16", gradients=False), gpu="h200")
    (part,) = explanation.parts
    assert part.problem == layer("silu").problem(*arrays(SHAPES, "float16", gradients=False))
    assert len(part.problem.outputs) == 1
    assert usable(part)
