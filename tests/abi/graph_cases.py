"""Graphs of every operation, for the tests of the builder and of plans."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from flcuda.cudnn.graph import NORM_MODES, POINTWISE_MODES, REDUCTION_MODES, RESAMPLE_MODES, Graph, Tensor

Case = Callable[[], Graph]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def register(build: Case) -> Case:
        CASES[name] = build
        return build

    return register


def image(g: Graph, channels: int = 16, size: int = 8, name: str = "x", layout: str = "nhwc") -> Tensor:
    return g.tensor((4, channels, size, size), "float16", layout=layout, name=name)


def channels(g: Graph, name: str, count: int = 16, dtype: str = "float32") -> Tensor:
    return g.tensor((1, count, 1, 1), dtype, layout="nhwc", name=name)


def convolution(
    direction: str = "forward",
    x_shape: tuple[int, ...] = (128, 64, 56, 56),
    w_shape: tuple[int, ...] = (64, 64, 3, 3),
    y_shape: tuple[int, ...] = (128, 64, 56, 56),
    dtype: str = "float16",
    layout: str = "nhwc",
    **geometry: object,
) -> Graph:
    g = Graph("float64" if dtype == "float64" else "float32")
    geometry = {"padding": 1, **geometry}

    def tensor(shape: tuple[int, ...], name: str) -> Tensor:
        return g.tensor(shape, dtype, layout=layout, name=name)

    if direction == "forward":
        g.output(g.convolution_forward(tensor(x_shape, "x"), tensor(w_shape, "w"), **geometry))
    elif direction == "backward_data":
        g.output(g.convolution_backward_data(tensor(y_shape, "dy"), tensor(w_shape, "w"), x_shape, **geometry))
    else:
        g.output(g.convolution_backward_filter(tensor(x_shape, "x"), tensor(y_shape, "dy"), w_shape, **geometry))
    return g


def _convolutions() -> None:
    shapes = {
        "1d": ((4, 16, 9), (8, 16, 3), (4, 8, 9)),
        "2d": ((4, 16, 9, 7), (8, 16, 3, 3), (4, 8, 9, 7)),
        "3d": ((4, 16, 9, 7, 5), (8, 16, 3, 3, 3), (4, 8, 9, 7, 5)),
        "grouped": ((4, 16, 9, 7), (8, 8, 3, 3), (4, 8, 9, 7)),
        "depthwise": ((4, 16, 9, 7), (16, 1, 3, 3), (4, 16, 9, 7)),
    }
    for direction in ("forward", "backward_data", "backward_filter"):
        for name, (x, w, y) in shapes.items():
            for layout in ("nchw", "nhwc"):
                CASES[f"convolution {direction} {name} {layout}"] = lambda d=direction, s=(x, w, y), lay=layout: (
                    convolution(d, *s, "float32", lay)
                )
        CASES[f"convolution {direction} strided"] = lambda d=direction: convolution(
            d, (4, 16, 9, 7), (8, 16, 3, 3), (4, 8, 5, 4), "float16", "nhwc", stride=2
        )
        CASES[f"convolution {direction} one-sided"] = lambda d=direction: convolution(
            d, (4, 16, 9, 7), (8, 16, 2, 2), (4, 8, 9, 8), "float16", "nhwc", padding=((0, 1), (1, 1))
        )
        CASES[f"convolution {direction} dilated float64"] = lambda d=direction: convolution(
            d, (4, 16, 9, 7), (8, 16, 3, 3), (4, 8, 9, 7), "float64", "nchw", padding=2, dilation=2
        )


def _pointwise() -> None:
    def build(mode: str) -> Graph:
        integers = mode == "gen_index"
        g = Graph("int32" if integers else "float32")
        truth = mode.startswith("logical")
        dtype = "boolean" if truth else "int32" if integers else "float32"
        x = g.tensor((4, 16, 8, 8), dtype, layout="nhwc", name="x", alignment=16)
        b = t = None
        if mode.endswith("_bwd") or mode in TWO:
            b = g.tensor((4, 16, 8, 8) if mode.endswith("_bwd") else (1, 16, 1, 1), dtype, layout="nhwc", name="b")
        if mode == "binary_select":
            b = g.tensor((4, 16, 8, 8), dtype, layout="nhwc", name="b")
            t = g.tensor((4, 16, 8, 8), "boolean", layout="nhwc", name="t")
        parameters = {"relu_fwd": {"lower_clip": 0.5, "upper_clip": 6.0, "lower_slope": 0.1}, "relu_bwd": {}}
        parameters |= {"elu_fwd": {"elu_alpha": 0.5}, "softplus_bwd": {"softplus_beta": 2.0}}
        parameters |= {"swish_fwd": {"swish_beta": 2.0}, "gen_index": {"axis": 1}}
        y = g.pointwise(mode, x, b, t, **parameters.get(mode, {}))
        g.output(y)
        return g

    for mode in POINTWISE_MODES:
        CASES[f"pointwise {mode}"] = lambda mode=mode: build(mode)


TWO = [mode for mode in POINTWISE_MODES if mode.startswith("cmp_") or mode in ("logical_and", "logical_or")]
TWO += ["add", "add_square", "div", "max", "min", "mod", "mul", "pow", "sub", "atan2", "floor_mod"]
_convolutions()
_pointwise()


@case("pointwise with a number, and factors")
def _number() -> Graph:
    g = Graph()
    x = image(g)
    g.output(g.pointwise("add", g.mul(x, 2.5), g.tensor((1, 16, 1, 1), "float16", layout="nhwc"), alpha1=0.5, alpha2=2))
    return g


@case("generate_statistics")
def _statistics() -> Graph:
    g = Graph()
    for total in g.generate_statistics(image(g)):
        g.output(total)
    return g


@case("batch_norm_finalize")
def _finalize() -> Graph:
    g = Graph()
    names = ("sum", "square_sum", "scale", "bias", "running_mean", "running_variance")
    t = {name: channels(g, name) for name in names}
    made = g.batch_norm_finalize(
        t["sum"],
        t["square_sum"],
        t["scale"],
        t["bias"],
        count=256,
        running_mean=t["running_mean"],
        running_variance=t["running_variance"],
    )
    for tensor in made:
        g.output(tensor)
    return g


def _norm_scale(mode: str) -> tuple[int, ...]:
    return (1, 16, 1, 1) if mode in ("batch", "instance") else (1, 16, 8, 8)


def _norms() -> None:
    def forward(mode: str, training: bool, running: bool = False) -> Graph:
        g = Graph()
        x = image(g)
        shape = _norm_scale(mode)
        scale, bias = (g.tensor(shape, "float32", layout="nhwc", name=name) for name in ("scale", "bias"))
        given = {}
        if not training:
            statistics = (4, 16, 1, 1) if mode == "instance" else (4, 1, 1, 1)
            names = ("inv_variance",) if mode == "rms" else ("mean", "inv_variance")
            given = {name: g.tensor(statistics, "float32", layout="nhwc", name=name) for name in names}
        if running:
            given = {name: channels(g, name) for name in ("running_mean", "running_variance")}
        made = g.norm_forward(mode, x, scale, bias, training=training, **given)
        for tensor in made:
            if tensor is not None:
                g.output(tensor)
        return g

    def backward(mode: str) -> Graph:
        g = Graph()
        dy, x = image(g, name="dy"), image(g)
        scale = g.tensor(_norm_scale(mode), "float32", layout="nhwc", name="scale")
        statistics = {"batch": (1, 16, 1, 1), "instance": (4, 16, 1, 1)}.get(mode, (4, 1, 1, 1))
        names = ("inv_variance",) if mode == "rms" else ("mean", "inv_variance")
        given = {name: g.tensor(statistics, "float32", layout="nhwc", name=name) for name in names}
        for tensor in g.norm_backward(mode, dy, x, scale, **given):
            if tensor is not None:
                g.output(tensor)
        return g

    for mode in NORM_MODES:
        CASES[f"norm_forward {mode} training"] = lambda mode=mode: forward(mode, True)
        if mode != "batch":
            CASES[f"norm_forward {mode} inference"] = lambda mode=mode: forward(mode, False)
        CASES[f"norm_backward {mode}"] = lambda mode=mode: backward(mode)
    CASES["norm_forward batch training, running"] = lambda: forward("batch", True, running=True)


_norms()


@case("norm_forward batch without its statistics")
def _unused_statistics() -> Graph:
    g = Graph()
    made = g.norm_forward("batch", image(g), channels(g, "scale"), channels(g, "bias"))
    g.output(g.relu(made.y))
    return g


@case("batch_norm_backward_weights")
def _backward_weights() -> Graph:
    g = Graph()
    dy, x = image(g, name="dy"), image(g)
    mean, inv_std, scale = (channels(g, name) for name in ("mean", "inv_std", "scale"))
    for tensor in g.batch_norm_backward_weights(dy, x, mean, inv_std, scale):
        g.output(tensor)
    return g


def _reductions() -> None:
    def build(mode: str) -> Graph:
        g = Graph()
        g.output(g.reduction(mode, image(g), (1, 16, 1, 1)), dtype="float32")
        return g

    for mode in REDUCTION_MODES:
        CASES[f"reduction {mode}"] = lambda mode=mode: build(mode)


_reductions()


@case("matmul")
def _matmul() -> Graph:
    g = Graph()
    g.output(g.matmul(g.tensor((3, 16, 32), "float16"), g.tensor((1, 32, 24), "float16")))
    return g


@case("matmul of a transposed matrix")
def _matmul_transposed() -> Graph:
    g = Graph()
    g.output(g.matmul(g.tensor((3, 16, 32), "float16"), g.tensor((3, 32, 24), "float16", strides=(768, 1, 32))))
    return g


def _resamples() -> None:
    geometry = {
        "nearest": {"window": 2, "stride": Fraction(1, 2), "padding": ((0, 1), (0, 1))},
        "bilinear": {"window": 2, "stride": Fraction(1, 2), "padding": ((0, 1), (0, 1))},
        "average_include_padding": {"window": 3, "stride": 2, "padding": 1},
        "average_exclude_padding": {"window": 3, "stride": 2, "padding": 1},
        "max": {"window": 3, "stride": 2, "padding": 1},
    }

    def forward(mode: str, index: bool) -> Graph:
        g = Graph()
        y, chosen = g.resample_forward(mode, image(g), index=index, **geometry[mode])
        g.output(y)
        if chosen is not None:
            g.output(chosen)
        return g

    def backward(mode: str, layout: str) -> Graph:
        g = Graph()
        probe = Graph()
        y, _ = probe.resample_forward(mode, image(probe), **geometry[mode])
        dy = g.tensor(y.shape, "float16", layout=layout, name="dy")
        given = {}
        if layout == "nchw":
            given = {"x": image(g, layout=layout), "y": g.tensor(y.shape, "float16", layout=layout, name="y")}
        elif mode in ("max", "nearest"):
            given = {"index": g.tensor(y.shape, "int8", layout=layout, name="index")}
        g.output(g.resample_backward(mode, dy, (4, 16, 8, 8), **given, **geometry[mode]))
        return g

    for mode in RESAMPLE_MODES:
        CASES[f"resample_forward {mode}"] = lambda mode=mode: forward(mode, False)
        CASES[f"resample_backward {mode}"] = lambda mode=mode: backward(mode, "nhwc")
    for mode in ("max", "nearest"):
        CASES[f"resample_forward {mode} with index"] = lambda mode=mode: forward(mode, True)
    CASES["resample_backward max nchw"] = lambda: backward("max", "nchw")


_resamples()


@case("reshape")
def _reshape() -> Graph:
    g = Graph()
    g.output(g.reshape(g.tensor((4, 16, 8, 8), "float16"), (4, 16, 64)))
    return g


@case("concatenate")
def _concatenate() -> Graph:
    g = Graph()
    g.output(g.concatenate([image(g, name="a"), image(g, 32, name="b")], axis=1))
    return g


# --- fusions ---------------------------------------------------------------------------------------------------------


def residual_shapes(n: int = 16, c: int = 64, size: int = 28) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (n, c, size, size), (c, c, 3, 3)


@case("fusion convolution, bias, activation")
def _conv_bias_relu() -> Graph:
    g = Graph()
    xs, ws = residual_shapes()
    x, w = (g.tensor(s, "float16", layout="nhwc", name=n) for s, n in ((xs, "x"), (ws, "w")))
    bias = channels(g, "bias", 64, "float16")
    g.output(g.relu(g.add(g.convolution_forward(x, w, padding=1), bias)))
    return g


@case("fusion convolution, statistics")
def _conv_statistics() -> Graph:
    g = Graph()
    xs, ws = residual_shapes()
    x, w = (g.tensor(s, "float16", layout="nhwc", name=n) for s, n in ((xs, "x"), (ws, "w")))
    y = g.output(g.convolution_forward(x, w, padding=1))
    for total in g.generate_statistics(y):
        g.output(total)
    return g


def _scale_bias_relu(g: Graph, x: Tensor) -> Tensor:
    scale, bias = (channels(g, name, 64, "float16") for name in ("scale", "bias"))
    return g.relu(g.add(g.mul(x, scale), bias))


@case("fusion scale, bias, relu, convolution, statistics")
def _full() -> Graph:
    g = Graph()
    xs, ws = residual_shapes()
    x, w = (g.tensor(s, "float16", layout="nhwc", name=n) for s, n in ((xs, "x"), (ws, "w")))
    y = g.output(g.convolution_forward(_scale_bias_relu(g, x), w, padding=1))
    for total in g.generate_statistics(y):
        g.output(total)
    return g


@case("fusion scale, bias, relu, filter gradient")
def _full_filter() -> Graph:
    g = Graph()
    xs, ws = residual_shapes()
    x, dy = (g.tensor(xs, "float16", layout="nhwc", name=n) for n in ("x", "dy"))
    g.output(g.convolution_backward_filter(_scale_bias_relu(g, x), dy, ws, padding=1))
    return g


@case("fusion data gradient, drelu")
def _dgrad_drelu() -> Graph:
    g = Graph()
    xs, ws = residual_shapes()
    dy, x = (g.tensor(xs, "float16", layout="nhwc", name=n) for n in ("dy", "x"))
    w = g.tensor(ws, "float16", layout="nhwc", name="w")
    g.output(g.relu_backward(g.convolution_backward_data(dy, w, xs, padding=1), x))
    return g


@case("fusion norm, add, relu")
def _norm_add_relu() -> Graph:
    g = Graph()
    xs, _ = residual_shapes()
    x, z = (g.tensor(xs, "float16", layout="nhwc", name=n) for n in ("x", "z"))
    t = {name: channels(g, name, 64) for name in ("scale", "bias", "running_mean", "running_variance")}
    made = g.norm_forward("batch", x, **t)
    g.output(g.relu(g.add(made.y, z)))
    for tensor in made[1:]:
        g.output(tensor)
    return g


@case("fusion data gradient, drelu, batch norm weight gradients")
def _dgrad_drelu_weights() -> Graph:
    g = Graph()
    xs, ws = residual_shapes()
    dy, x = (g.tensor(xs, "float16", layout="nhwc", name=n) for n in ("dy", "x"))
    w = g.tensor(ws, "float16", layout="nhwc", name="w")
    mean, inv_std, scale, bias = (channels(g, name, 64) for name in ("mean", "inv_std", "scale", "bias"))
    normalised = g.add(g.mul(g.mul(g.sub(x, mean), inv_std), scale), bias)
    masked = g.output(g.relu_backward(g.convolution_backward_data(dy, w, xs, padding=1), normalised))
    for tensor in g.batch_norm_backward_weights(masked, x, mean, inv_std, scale):
        g.output(tensor)
    return g


@case("fusion masked gradient, norm backward")
def _mask_norm_backward() -> Graph:
    g = Graph()
    xs, _ = residual_shapes()
    dy, x = (g.tensor(xs, "float16", layout="nhwc", name=n) for n in ("dy", "x"))
    mask = g.tensor(xs, "boolean", layout="nhwc", name="mask")
    mean, inv_variance, scale = (channels(g, name, 64) for name in ("mean", "inv_variance", "scale"))
    masked = g.output(g.mul(dy, mask))
    for tensor in g.norm_backward("batch", masked, x, scale, mean=mean, inv_variance=inv_variance):
        g.output(tensor)
    return g


@case("fusion norm, add, relu, mask")
def _norm_add_relu_mask() -> Graph:
    g = Graph()
    xs, _ = residual_shapes()
    x, z = (g.tensor(xs, "float16", layout="nhwc", name=n) for n in ("x", "z"))
    t = {name: channels(g, name, 64) for name in ("scale", "bias", "running_mean", "running_variance")}
    made = g.norm_forward("batch", x, **t)
    y = g.output(g.relu(g.add(made.y, z)))
    g.output(g.pointwise("cmp_gt", y, 0.0))
    for tensor in made[1:]:
        g.output(tensor)
    return g


# --- mis-built graphs -------------------------------------------------------------------------------------------------

# Each: what is wrong, how it is built, and what the error has to name: operation, tensor or argument, and remedy.
MISBUILT: list[tuple[str, Callable[[Graph], object], type[Exception], tuple[str, ...]]] = []


def misbuilt(kind: type[Exception], *names: str) -> Callable[[Callable[[Graph], object]], None]:
    def register(build: Callable[[Graph], object]) -> None:
        MISBUILT.append((build.__name__.removeprefix("_").replace("_", " "), build, kind, names))

    return register


def _x(g: Graph, shape: tuple[int, ...] = (4, 16, 8, 8), dtype: str = "float16", name: str = "x") -> Tensor:
    return g.tensor(shape, dtype, layout="nhwc", name=name)


def _w(g: Graph, shape: tuple[int, ...] = (8, 16, 3, 3), dtype: str = "float16", name: str = "w") -> Tensor:
    return _x(g, shape, dtype, name)


@misbuilt(ValueError, "tensor 'x'", "shape", "less than 1")
def _an_empty_dimension(g: Graph) -> object:
    return _x(g, (0, 16, 8, 8))


@misbuilt(ValueError, "tensor 'x'", "9 dimensions", "1 to 8")
def _nine_dimensions(g: Graph) -> object:
    return _x(g, (1,) * 9)


@misbuilt(ValueError, "tensor 'x'", "dtype", "complex64", "float16")
def _an_unknown_dtype(g: Graph) -> object:
    return _x(g, dtype="complex64")


@misbuilt(ValueError, "tensor 'x'", "overlap", "in elements")
def _overlapping_strides(g: Graph) -> object:
    return g.tensor((2, 3, 4, 4), "float32", strides=(16, 16, 4, 1), name="x")


@misbuilt(ValueError, "tensor 'x'", "strides", "for each dimension")
def _too_few_strides(g: Graph) -> object:
    return g.tensor((2, 3, 4, 4), "float32", strides=(4, 4, 1), name="x")


@misbuilt(TypeError, "tensor 'x'", "not both")
def _a_layout_and_strides(g: Graph) -> object:
    return g.tensor((2, 3), "float32", layout="nchw", strides=(3, 1), name="x")


@misbuilt(ValueError, "tensor 'x'", "alignment", "2 bytes of float16")
def _an_alignment_below_the_element(g: Graph) -> object:
    return g.tensor((2, 3), "float16", alignment=1, name="x")


@misbuilt(TypeError, "convolution_forward 'c'", "w", "ndarray", "tensor(shape, dtype)")
def _an_array_for_a_tensor(g: Graph) -> object:
    return g.convolution_forward(_x(g), np.zeros((8, 16, 3, 3)), name="c")


@misbuilt(ValueError, "convolution_forward 'c'", "'w'", "another graph")
def _a_tensor_of_another_graph(g: Graph) -> object:
    return g.convolution_forward(_x(g), _w(Graph()), name="c")


@misbuilt(ValueError, "convolution_forward 'c'", "'w'", "rank 3", "reshape")
def _a_filter_of_another_rank(g: Graph) -> object:
    return g.convolution_forward(_x(g), _w(g, (8, 16, 3)), name="c")


@misbuilt(ValueError, "convolution_forward 'c'", "'x'", "at least 3 dimensions")
def _a_convolution_of_a_matrix(g: Graph) -> object:
    return g.convolution_forward(_x(g, (4, 16)), _w(g), name="c")


@misbuilt(ValueError, "convolution_forward 'c'", "'w'", "5 channels", "C / groups")
def _channels_that_do_not_divide(g: Graph) -> object:
    return g.convolution_forward(_x(g), _w(g, (8, 5, 3, 3)), name="c")


@misbuilt(ValueError, "convolution_forward 'c'", "'w'", "5 filters", "2 groups")
def _filters_that_groups_do_not_divide(g: Graph) -> object:
    return g.convolution_forward(_x(g), _w(g, (5, 8, 3, 3)), name="c")


@misbuilt(ValueError, "convolution_forward 'c'", "window", "pad more")
def _a_window_larger_than_the_image(g: Graph) -> object:
    return g.convolution_forward(_x(g), _w(g, (8, 16, 3, 3)), dilation=4, name="c")


@misbuilt(TypeError, "convolution_forward 'c'", "'w'", "differ in dtype", "identity")
def _two_dtypes(g: Graph) -> object:
    return g.convolution_forward(_x(g), _w(g, dtype="bfloat16"), name="c")


@misbuilt(TypeError, "convolution_forward 'c'", "'x'", "Graph(compute='float64')")
def _float64_computed_in_float32(g: Graph) -> object:
    return g.convolution_forward(_x(g, dtype="float64"), _w(g, dtype="float64"), name="c")


@misbuilt(ValueError, "convolution_forward 'c'", "stride", "less than 1")
def _a_stride_of_zero(g: Graph) -> object:
    return g.convolution_forward(_x(g), _w(g), stride=0, name="c")


@misbuilt(ValueError, "convolution_forward 'c'", "padding", "for each of 2 spatial dimensions")
def _a_padding_of_three_numbers(g: Graph) -> object:
    return g.convolution_forward(_x(g), _w(g), padding=(1, 1, 1), name="c")


@misbuilt(TypeError, "convolution_forward 'c'", "dilation", "1.5", "no whole number")
def _a_broken_dilation(g: Graph) -> object:
    return g.convolution_forward(_x(g), _w(g), dilation=1.5, name="c")


@misbuilt(ValueError, "convolution_backward_data 'c'", "'dy'", "would be (8, 8)")
def _a_gradient_of_another_size(g: Graph) -> object:
    return g.convolution_backward_data(_x(g, (4, 8, 7, 8), name="dy"), _w(g), (4, 16, 8, 8), padding=1, name="c")


@misbuilt(ValueError, "convolution_backward_filter 'c'", "'dy'", "batch")
def _a_gradient_of_another_batch(g: Graph) -> object:
    return g.convolution_backward_filter(_x(g), _x(g, (3, 8, 8, 8), name="dy"), (8, 16, 3, 3), padding=1, name="c")


@misbuilt(ValueError, "convolution_backward_filter 'c'", "'dy'", "8 channels", "9 filters")
def _a_gradient_of_other_filters(g: Graph) -> object:
    return g.convolution_backward_filter(_x(g), _x(g, (4, 8, 8, 8), name="dy"), (9, 16, 3, 3), padding=1, name="c")


@misbuilt(ValueError, "pointwise", "'swishy'", "swish_fwd")
def _an_unknown_mode(g: Graph) -> object:
    return g.pointwise("swishy", _x(g))


@misbuilt(TypeError, "pointwise add 'p'", "b", "2 input(s)")
def _a_missing_operand(g: Graph) -> object:
    return g.pointwise("add", _x(g), name="p")


@misbuilt(ValueError, "pointwise add 'p'", "'b'", "or 1")
def _shapes_that_do_not_broadcast(g: Graph) -> object:
    return g.pointwise("add", _x(g), _x(g, (4, 8, 8, 8), name="b"), name="p")


@misbuilt(ValueError, "pointwise add 'p'", "'b'", "rank 1", "reshape")
def _a_bias_of_rank_one(g: Graph) -> object:
    return g.pointwise("add", _x(g), g.tensor((16,), "float16", name="b"), name="p")


@misbuilt(TypeError, "pointwise tanh_fwd 'p'", "lower_clip", "relu_fwd")
def _a_parameter_of_another_mode(g: Graph) -> object:
    return g.pointwise("tanh_fwd", _x(g), lower_clip=1.0, name="p")


@misbuilt(TypeError, "pointwise gen_index 'p'", "axis")
def _an_index_without_an_axis(g: Graph) -> object:
    return g.pointwise("gen_index", _x(g), name="p")


@misbuilt(TypeError, "pointwise add 'p'", "no scalar")
def _a_sum_of_scalars(g: Graph) -> object:
    return g.pointwise("add", 1.0, 2.0, name="p")


@misbuilt(ValueError, "norm_forward batch 'n'", "'scale'", "(1, 16, 1, 1)")
def _a_scale_of_other_channels(g: Graph) -> object:
    return g.norm_forward("batch", _x(g), _x(g, (1, 8, 1, 1), name="scale"), None, name="n")


@misbuilt(ValueError, "norm_forward batch 'n'", "training", "mul and add")
def _a_batch_norm_inference(g: Graph) -> object:
    scale, bias = (channels(g, name) for name in ("scale", "bias"))
    return g.norm_forward("batch", _x(g), scale, bias, training=False, name="n")


@misbuilt(TypeError, "norm_forward batch 'n'", "running_variance", "or none")
def _one_running_statistic(g: Graph) -> object:
    scale, bias, mean = (channels(g, name) for name in ("scale", "bias", "mean"))
    return g.norm_forward("batch", _x(g), scale, bias, running_mean=mean, name="n")


@misbuilt(TypeError, "norm_backward layer 'n'", "mean and inv_variance", "epsilon")
def _a_norm_gradient_without_statistics(g: Graph) -> object:
    return g.norm_backward("layer", _x(g, name="dy"), _x(g), _x(g, (1, 16, 8, 8), name="scale"), name="n")


@misbuilt(TypeError, "batch_norm_finalize 'f'", "count", "scalar(value)")
def _a_count_with_a_pointer(g: Graph) -> object:
    t = [channels(g, name) for name in ("sum", "square_sum", "scale", "bias", "count")]
    return g.batch_norm_finalize(*t[:4], count=t[4], name="f")


@misbuilt(ValueError, "batch_norm_backward_weights 'b'", "'dy'", "(4, 16, 8, 8)")
def _a_weight_gradient_of_another_size(g: Graph) -> object:
    rest = [channels(g, name) for name in ("mean", "inv_std", "scale")]
    return g.batch_norm_backward_weights(_x(g, (4, 16, 7, 7), name="dy"), _x(g), *rest, name="b")


@misbuilt(ValueError, "reduction add 'r'", "'x'", "some of its sizes 1")
def _a_reduction_to_half(g: Graph) -> object:
    return g.reduction("add", _x(g), (4, 8, 8, 8), name="r")


@misbuilt(ValueError, "matmul 'm'", "'b'", "5 rows", "4 columns")
def _matrices_that_do_not_fit(g: Graph) -> object:
    return g.matmul(g.tensor((1, 3, 4), "float16", name="a"), g.tensor((1, 5, 6), "float16", name="b"), name="m")


@misbuilt(ValueError, "matmul 'm'", "'a'", "at least 3 dimensions")
def _a_matmul_of_matrices(g: Graph) -> object:
    return g.matmul(g.tensor((3, 4), "float16", name="a"), g.tensor((4, 6), "float16", name="b"), name="m")


@misbuilt(ValueError, "resample_forward max 's'", "'x'", "window", "larger")
def _a_pooling_window_larger_than_the_image(g: Graph) -> object:
    return g.resample_forward("max", _x(g), window=9, name="s")


@misbuilt(TypeError, "resample_backward max 's'", "index", "x and y")
def _a_pooling_gradient_without_its_index(g: Graph) -> object:
    return g.resample_backward("max", _x(g, (4, 16, 4, 4), name="dy"), (4, 16, 8, 8), window=2, stride=2, name="s")


@misbuilt(ValueError, "reshape 'r'", "'x'", "elements")
def _a_reshape_to_fewer_elements(g: Graph) -> object:
    return g.reshape(_x(g), (4, 16, 63), name="r")


@misbuilt(ValueError, "concatenate 'c'", "'b'", "off axis 1")
def _a_concatenation_of_other_sizes(g: Graph) -> object:
    return g.concatenate([_x(g, name="a"), _x(g, (4, 16, 8, 7), name="b")], axis=1, name="c")


@misbuilt(ValueError, "output 'x'", "is an input")
def _an_input_as_output(g: Graph) -> object:
    return g.output(_x(g))


@misbuilt(ValueError, "output 'c.y'", "already", "once")
def _an_output_twice(g: Graph) -> object:
    y = g.convolution_forward(_x(g), _w(g), name="c")
    g.output(y)
    return g.output(y)


@misbuilt(ValueError, "graph", "no operation")
def _no_operation(g: Graph) -> object:
    _x(g)
    return g.build()


@misbuilt(ValueError, "convolution_forward 'c'", "'c.y'", "output(...)")
def _a_result_that_nothing_uses(g: Graph) -> object:
    g.convolution_forward(_x(g), _w(g), name="c")
    return g.build()


@misbuilt(ValueError, "generate_statistics 's'", "'s.square_sum'", "output(...)")
def _one_of_two_results_unused(g: Graph) -> object:
    g.output(g.generate_statistics(_x(g), name="s")[0])
    return g.build()


@misbuilt(ValueError, "graph", "'forgotten'", "no operation")
def _an_input_that_nothing_uses(g: Graph) -> object:
    g.output(g.convolution_forward(_x(g), _w(g)))
    _x(g, name="forgotten")
    return g.build()
