"""The named lists of Problems, against what is published of the networks, and files of Problems."""

import math
from collections import Counter

import numpy as np
import pytest

import flcuda
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem, Problem
from flcuda.finder.problems import NAMES, parse_problems, problems, read_problems

IMAGE_NETWORKS = ("resnet18", "resnet34", "resnet50", "vgg16", "mobilenet-v2", "resnext50", "densenet121")


def forward(name: str) -> list[ConvolutionProblem]:
    """Every convolution of a network for one image, as often as it occurs."""
    return [p for p in problems(name, 1, distinct=False) if p.direction == "forward"]


def weights(name: str) -> int:
    return sum(math.prod(p.w_shape) for p in forward(name))


def filters(name: str) -> int:
    return sum(p.w_shape[0] for p in forward(name))


@pytest.mark.parametrize(
    ("name", "convolutions", "billions", "classifier"),
    [
        # torchvision's GFLOPS (multiply-adds) of each model, and those of its fully connected layers
        ("resnet18", 20, 1.814, 512 * 1000),
        ("resnet34", 36, 3.664, 512 * 1000),
        ("resnet50", 53, 4.089, 2048 * 1000),
        ("vgg16", 13, 15.47, 25088 * 4096 + 4096 * 4096 + 4096 * 1000),
        ("mobilenet-v2", 52, 0.301, 1280 * 1000),
        ("resnext50", 53, 4.23, 2048 * 1000),
        ("densenet121", 120, 2.834, 1024 * 1000),
        ("r3d-18", 20, 40.697, 512 * 400),
    ],
)
def test_multiply_adds_are_those_of_torchvision(name, convolutions, billions, classifier):
    found = forward(name)
    assert len(found) == convolutions
    macs = sum(p.flops // 2 for p in found) + classifier
    assert macs / 1e9 == pytest.approx(billions, rel=2e-3)


def test_parameters_are_those_of_torchvision():
    """The whole network's parameters, whose other parts are known: they hold each channel and kernel to be right."""
    # batch norm, with two numbers a channel, follows every convolution of these
    assert weights("resnet18") + 2 * filters("resnet18") + 513_000 == 11_689_512
    assert weights("resnet34") + 2 * filters("resnet34") + 513_000 == 21_797_672
    assert weights("resnet50") + 2 * filters("resnet50") + 2_049_000 == 25_557_032
    assert weights("resnext50") + 2 * filters("resnext50") + 2_049_000 == 25_028_904
    assert weights("mobilenet-v2") + 2 * filters("mobilenet-v2") + 1_281_000 == 3_504_872
    assert weights("r3d-18") + 2 * filters("r3d-18") + 513 * 400 == 33_371_472
    # it precedes all but the first here, and follows the first and the last
    norms = 2 * (sum(p.x_shape[1] for p in forward("densenet121")[1:]) + 64 + 1024)
    assert weights("densenet121") + norms + 1_025_000 == 7_978_856
    # these have biases instead
    assert weights("vgg16") + filters("vgg16") + 123_642_856 == 138_357_544


def test_unet():
    found = forward("unet")
    # the paper: "in total the network has 23 convolutional layers"
    assert len(found) == 23
    ups = [p for p in found if p.stride == (2, 2)]
    assert [p.w_shape for p in ups] == [(2 * k, k, 2, 2) for k in (512, 256, 128, 64)]
    # a transposed convolution's bias is that of its result, which is x here
    biases = filters("unet") + sum(p.x_shape[1] - p.w_shape[0] for p in ups)
    assert weights("unet") + biases == 31_030_658
    assert found[0].x_shape[1:] == (1, 256, 256)
    assert found[-1].y_shape[1:] == (2, 256, 256)
    # each convolution behind an up-convolution gets the skipped channels too
    assert [p.x_shape[1] for p in found if p.w_shape[1] == 2 * p.w_shape[0] and p.stride == (1, 1)] == [
        1024,
        512,
        256,
        128,
    ]


def test_one_and_three_dimensions():
    wave = forward("wav2letter")
    assert [len(p.x_shape) for p in wave] == [3] * 12
    assert wave[0].y_shape == (1, 250, 1000)
    assert wave[1].y_shape == (1, 250, 500)
    assert wave[-1].y_shape == (1, 40, 501)
    assert {p.x_shape[1] for p in wave} == {1, 250, 2000}
    clip = forward("r3d-18")
    assert clip[0].y_shape == (1, 64, 16, 56, 56)
    assert clip[-1].y_shape == (1, 512, 2, 7, 7)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("deepbench", "suite")])
def test_each_layer_takes_what_one_before_it_gives(name):
    """Sizes of a network follow each other; a dense block's channels and a U-Net's are checked by the counts."""
    found = forward(name)
    given = [found[0].x_shape[2:]]
    for problem in found:
        larger, smaller = problem.x_shape[2:], problem.y_shape[2:]
        if name == "unet" and problem.stride == (2, 2):
            larger, smaller = smaller, larger
        halves = {tuple((size + 1) // 2 for size in each) for each in given}
        assert larger in given or larger in halves, problem
        given.append(smaller)
    if name in IMAGE_NETWORKS:
        assert given[-1] == ((14, 14) if name == "vgg16" else (7, 7))


@pytest.mark.parametrize("name", NAMES)
def test_directions_and_occurrences(name):
    found = problems(name)
    assert len(found) == len(set(found))
    all_of_them = problems(name, distinct=False)
    assert tuple(dict.fromkeys(all_of_them)) == found
    counts = Counter(p.direction for p in all_of_them)
    lists = {"deepbench": (94, 94, 94), "suite": (103, 94, 103)}
    layers = counts["forward"]
    assert tuple(counts[d] for d in DIRECTIONS) == lists.get(name, (layers, layers - 1, layers))
    assert [Problem.parse(str(p)) for p in found] == list(found)
    if name in lists:
        return
    first = all_of_them[0]
    assert first.direction == "forward"
    assert first.with_direction("backward_data") not in found
    assert {p.x_shape[0] for p in found} == {128}
    changed = problems(name, 3, dtype="float16", layout="nhwc")
    assert {p.x_shape[0] for p in changed} == {3}
    assert {p.precision for p in changed} == {"float16"}
    assert {p.layout_of("x") for p in changed} == {"nhwc"}
    assert len(changed) == len(found)


def test_resnets():
    assert len(problems("resnet18")) == len(problems("resnet34")) == 32
    assert set(problems("resnet18")) == set(problems("resnet34"))
    assert str(problems("resnet34", 4, dtype="tf32")[0]) == "forward n4 c3 224x224 k64 7x7 p3 s2 tf32 nchw"
    counts = Counter(problems("resnet34", distinct=False))
    line = "forward n128 c{} {}x{} k{} 3x3 p1"
    times = [counts[ConvolutionProblem.parse(line.format(c, s, s, c))] for c, s in ((64, 56), (128, 28), (256, 14))]
    assert times == [6, 7, 11]


def test_resnext_is_grouped_and_mobilenet_depthwise():
    assert {p.groups for p in problems("resnext50") if p.w_shape[2] == 3} == {32}
    deep = [p for p in forward("mobilenet-v2") if p.groups > 1]
    assert len(deep) == 17
    assert all(p.groups == p.x_shape[1] == p.w_shape[0] for p in deep)


def test_deepbench_is_the_training_set():
    found = problems("deepbench", distinct=False)
    assert len(found) == 3 * 94
    assert len(problems("deepbench")) == 3 * 90
    lines = {str(p) for p in found}
    # the first of DeepSpeech: width 700, height 161, a filter 20 wide and 5 high
    for batch in (4, 8, 16, 32):
        assert f"backward_data n{batch} c1 161x700 k32 5x20 p0 s2 float32 nchw" in lines
    assert "forward n8 c2048 7x7 k512 1x1 p3 s2 float32 nchw" in lines
    # the second takes what the first gives
    first, second = (
        ConvolutionProblem.parse(line)
        for line in ("forward n4 c1 161x700 k32 5x20 s2", "forward n4 c32 79x341 k32 5x10 s2")
    )
    assert {first, second} <= set(found)
    assert first.y_shape == second.x_shape
    assert Counter(p.x_shape[0] for p in found if p.direction == "forward") == {4: 2, 8: 38, 16: 52, 32: 2}
    given = problems("deepbench", 64)
    assert {p.x_shape[0] for p in given} == {64}
    assert len(given) < len(problems("deepbench"))


def test_the_suite():
    found = problems("suite")
    assert len(found) == len(set(found)) == 300
    for problem in found:
        assert 4 * sum(math.prod(problem.shape_of(name)) for name in problem.operands) < 300e6, problem
        # by arithmetic alone, at 45 TFLOP/s, none takes longer than 2 ms
        assert problem.flops / 45e9 < 2, problem
    kinds = {
        "depthwise": [p for p in found if p.groups == p.x_shape[1] > 1],
        "grouped": [p for p in found if 1 < p.groups < p.x_shape[1]],
        "dilated": [p for p in found if p.dilation[0] > 1],
        "stems": [p for p in found if p.x_shape[1] in (1, 3)],
        "1x1": [p for p in found if math.prod(p.w_shape[2:]) == 1],
        "strided backward data": [p for p in found if p.direction == "backward_data" and p.stride[0] > 1],
        "odd": [p for p in found if p.x_shape[1] % 8 and p.x_shape[1] > 4],
        "1-D": [p for p in found if len(p.x_shape) == 3],
        "3-D": [p for p in found if len(p.x_shape) == 5],
        "padded on one side": [p for p in found if p.padding_before != p.padding_after],
        "not square": [p for p in found if len(set(p.w_shape[2:])) > 1],
    }
    least = {"depthwise": 36, "stems": 18, "1x1": 45, "strided backward data": 20, "grouped": 18, "odd": 18}
    for kind, some in kinds.items():
        assert len(some) >= least.get(kind, 3), kind
    assert problems("suite") == found
    half = problems("suite", dtype="bfloat16", layout="nhwc")
    assert {p.precision for p in half} == {"bfloat16"}
    assert {p.layout_of("x") for p in half} <= {"nhwc", "nchw"}
    assert [p.x_shape for p in half] == [p.x_shape for p in found]


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"'resnet51' must be one of resnet18, .*deepbench, suite"):
        problems("resnet51")
    with pytest.raises(ValueError, match="batch 4: the problems of 'suite'"):
        problems("suite", 4)
    with pytest.raises(ValueError, match="batch 0"):
        problems("unet", 0)
    with pytest.raises(TypeError, match=r"batch must be an integer, not 1\.5"):
        problems("unet", 1.5)
    with pytest.raises(TypeError, match="int32"):
        problems("suite", dtype="int32")
    with pytest.raises(ValueError, match="hwcn"):
        problems("deepbench", layout="hwcn")
    assert problems("unet", np.int64(2))[0].x_shape[0] == 2
    assert flcuda.problems is problems


def test_all_means_three_directions():
    three = parse_problems("all n2 c3 6x5 k4 3x3 p1 float16 nhwc")
    assert [p.direction for p in three] == list(DIRECTIONS)
    assert {p.precision for p in three} == {"float16"}
    assert parse_problems(str(three[1])) == three[1:2]
    graph = "graph; all float32 2x3x4x5 ; y = tanh( %all ); out y"
    assert parse_problems(graph) == (Problem.parse(graph),)


def test_a_file_reads_back(tmp_path):
    graph = Problem.parse("graph; x float32 2x3x4x5; y = tanh(%x); out y")
    path = tmp_path / "mine.txt"
    path.write_text(
        f"# what we train\n\nall n2 c3 6x5 k4 3x3 p1   # the first\r\n  forward n2 c3 6x5 k4 3x3 p1\n{graph}\n",
        encoding="utf-8",
    )
    found = read_problems(path)
    assert found == (*parse_problems("all n2 c3 6x5 k4 3x3 p1"), found[0], graph)
    whole = tmp_path / "suite.txt"
    whole.write_text("\n".join(map(str, problems("suite", dtype="float16"))), encoding="utf-8-sig")
    assert read_problems(str(whole)) == problems("suite", dtype="float16")


def test_a_bad_file_names_the_line(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_text("# one\nall n2 c3 6x5 k4 3x3 p1\nforward n2 c3 6x5 k4 3x3x p1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.txt, line 3: '3x3x'"):
        read_problems(path)
    path.write_text("forward n2 c4 6x5 k4 3x3 g3\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.txt, line 1: .*groups 3"):
        read_problems(path)
    path.write_text("# nothing\n\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.txt has no problem"):
        read_problems(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="no text in UTF-8"):
        read_problems(path)
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        read_problems(tmp_path / "absent.txt")
