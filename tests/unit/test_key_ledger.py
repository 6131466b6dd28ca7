"""The fields that keys of such stores have forgotten, each a fault that somebody shipped: a test a line.

Two keys that differ in one thing only are unequal, have files of other names, and the choice of one is no answer for
the other, neither from memory nor from the folder.
"""

import json
import os
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from finder_fakes import PROBLEM, Fake, choice, key, only
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_problems import random_problem

from flcuda.errors import FlcudaError
from flcuda.finder import default_store, find, plan
from flcuda.finder.choice import Choice, Key
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.policy import FIELDS, Policy
from flcuda.finder.problem import ConvolutionProblem, Problem
from flcuda.finder.store import ChoiceStore

GPU = (("memory", "140 GiB"), ("name", "NVIDIA H200"), ("sm", 90), ("sm_count", 132))
LINE = "forward n8 c16 14x14 k32 3x3 p1 s1 float16 nhwc"
GRAPH = "graph; x float16 8x16x14x14 nhwc; w float16 32x16x3x3 nhwc; t = convolution_forward(%x, %w, padding=1); "


def of_line(line: str, **changes: object) -> Key:
    values = {"device_model": GPU, "library_version": "cudnn 9.19.0", "sources": ("graph", "legacy")}
    return key(Problem.parse(line), **{**values, **changes})


def gpu(**changes: int | str) -> tuple[tuple[str, int | str], ...]:
    return tuple(sorted({**dict(GPU), **changes}.items()))


def assert_told_apart(one: Key, other: Key, folder: Path) -> None:
    assert one != other
    assert one.text != other.text
    assert one.file_name != other.file_name
    store = ChoiceStore(folder)
    store.put(choice(one))
    for reader in (store, ChoiceStore(folder)):
        assert reader.get(other) is None
        assert reader.get(one).key == one


# --- one a line of the ledger -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [gpu(name="NVIDIA H100"), gpu(sm=100), gpu(sm_count=114), gpu(memory="80 GiB")], ids=str
)
def test_device(tmp_path, other):
    """Another GPU's algorithm: BAD_PARAM."""
    assert_told_apart(of_line(LINE), of_line(LINE, device_model=other), tmp_path)


def test_determinism(tmp_path):
    """A winner that is not deterministic, for a caller who asked for one that is."""
    assert_told_apart(of_line(LINE), of_line(LINE, policy=Policy(deterministic=True)), tmp_path)


@pytest.mark.parametrize("strides", ["ws:144x9x3x1", "ws:160x1x48x16", "xs:3136x1x224x17", "ys:6272x196x14x1"])
def test_strides_of_each_operand(tmp_path, strides):
    """A wrong plan, errors on some GPUs; the weight's were forgotten, and then its layout."""
    line = LINE.replace("14x14", "14x13") if strides.startswith("xs") else LINE
    assert_told_apart(of_line(line), of_line(f"{line} {strides}"), tmp_path)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_strides_of_dimensions_of_size_1(tmp_path, layout):
    """A 1x1 filter of one channel has the same memory in both layouts; a library still chooses by its strides."""
    line = f"forward n8 c1 14x14 k8 1x1 float16 {layout}"
    other = replace(Problem.parse(line), w_strides=(1, 1, 7, 7))
    assert_told_apart(of_line(line), key(other, device_model=GPU), tmp_path)


@pytest.mark.parametrize("word", ["bfloat16", "float32", "tf32", "float64", "float16 out:float32", "float16 fma"])
def test_dtype_compute_precision_and_math(tmp_path, word):
    """Failures, a crash across dtypes, TF32 where it was not asked."""
    assert_told_apart(of_line(LINE), of_line(LINE.replace("float16", word)), tmp_path)


def test_tf32_is_not_float32(tmp_path):
    assert_told_apart(of_line(LINE.replace("float16", "float32")), of_line(LINE.replace("float16", "tf32")), tmp_path)


@pytest.mark.parametrize(
    "change", [("c16", "c16 g2"), ("c16", "c16 g16"), ("nhwc", "nchw"), ("forward", "backward_data"), ("c16", "c32 g2")]
)
def test_groups_format_and_direction(tmp_path, change):
    """Kernel failures. Of the last two filters have the same shape, and only the groups differ."""
    assert_told_apart(of_line(LINE), of_line(LINE.replace(*change)), tmp_path)


def test_equal_hashes_are_not_equal_keys(tmp_path):
    """A hash used as the key gave another convolution's algorithm."""
    one, other = of_line(LINE), of_line(f"{LINE} d2")
    object.__setattr__(other, "_hash", hash(one))
    assert hash(one) == hash(other)
    assert_told_apart(one, other, tmp_path)


def test_equal_file_names_are_not_equal_keys(tmp_path):
    one, other = of_line(LINE), of_line(f"{LINE} d2")
    choice(one).pin(tmp_path).rename(tmp_path / other.file_name)
    with pytest.warns(UserWarning, match="another key"):
        assert ChoiceStore(tmp_path).get(other) is None


@pytest.mark.parametrize(
    "change", [("n8", "n9"), ("c16", "c17"), ("14x14", "14x15"), ("14x14", "15x14"), ("k32", "k33"), ("3x3", "3x2")]
)
def test_every_dimension(tmp_path, change):
    """NOT_SUPPORTED for a later, larger input. Nothing is rounded to a bucket, which a graph would have to share."""
    one, other = of_line(LINE), of_line(LINE.replace(*change))
    assert_told_apart(one, other, tmp_path)
    assert Key.from_json(json.loads(other.text)).problem == other.problem


@pytest.mark.parametrize("word", ["d2", "d2x1", "d1x2", "nchw"])
def test_dilation_and_layout(tmp_path, word):
    """CuPy's collision."""
    other = LINE.replace("nhwc", "nchw") if word == "nchw" else f"{LINE} {word}"
    assert_told_apart(of_line(LINE), of_line(other), tmp_path)


@pytest.mark.parametrize("padding", ["p0", "p2", "p1x0", "p0x1", "p1:0", "p0:1", "p1:0x1", "p0:1x1"])
def test_padding_on_both_sides(tmp_path, padding):
    assert_told_apart(of_line(LINE), of_line(LINE.replace("p1", padding)), tmp_path)


def test_sides_of_the_padding_that_give_the_same_output(tmp_path):
    assert_told_apart(of_line(LINE.replace("p1", "p2:0")), of_line(LINE.replace("p1", "p0:2")), tmp_path)


@pytest.mark.parametrize("stride", ["s2", "s2x1", "s1x2"])
def test_stride(tmp_path, stride):
    assert_told_apart(of_line(LINE), of_line(LINE.replace("s1", stride)), tmp_path)


def test_beta(tmp_path):
    """An accumulating call."""
    assert_told_apart(of_line(LINE), of_line(f"{LINE} acc"), tmp_path)


@pytest.mark.parametrize("words", ["align:8", "align:8x16x16", "align:16x8x16", "align:16x16x8", "align:32"])
def test_alignment_of_each_operand(tmp_path, words):
    assert_told_apart(of_line(LINE), of_line(f"{LINE} {words}"), tmp_path)


@pytest.mark.parametrize("limit", [0, 1, 2**31, 2**31 + 1])
def test_workspace_limit(tmp_path, limit):
    assert_told_apart(of_line(LINE), of_line(LINE, policy=Policy(workspace_limit=limit)), tmp_path)


POLICY_CHANGES = {
    "mode": "heuristic",
    "deterministic": True,
    "workspace_limit": 0,
    "max_error": 1e-3,
    "time": "host",
    "effort": "wide",
    "l2": "warm",
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_the_policy(tmp_path, name):
    """Also one that is added later: it has no entry above then."""
    assert_told_apart(of_line(LINE), of_line(LINE, policy=Policy(**{name: POLICY_CHANGES[name]})), tmp_path)


KEY_CHANGES = {
    "problem": Problem.parse(f"{LINE} d2"),
    "policy": Policy(l2="warm"),
    "device_model": gpu(sm_count=1),
    "library_version": "cudnn 9.19.1",
    "sources": ("graph",),
}


@pytest.mark.parametrize("name", [entry.name for entry in fields(Key) if entry.init])
def test_every_field_of_the_key(tmp_path, name):
    assert_told_apart(of_line(LINE), replace(of_line(LINE), **{name: KEY_CHANGES[name]}), tmp_path)


@pytest.mark.parametrize("version", ["cudnn 9.19.1", "cudnn 9.2.0", "cudnn 9.190.0", "cudnn 91.9.0"])
def test_library_version(tmp_path, version):
    """Another engine after an update: also of the last number."""
    assert_told_apart(of_line(LINE), of_line(LINE, library_version=version), tmp_path)


def test_a_choice_is_no_index(monkeypatch):
    """Candidates in another order after an update: the same one is restored."""
    source = only(monkeypatch, Fake("a", delay=9), Fake("b", delay=1), Fake("c", delay=5))
    assert find(PROBLEM, device="cpu").best.algo == "b"
    source.fakes.reverse()
    source.fakes.insert(0, Fake("new", delay=7))
    default_store().clear_memory()
    assert plan(PROBLEM, device="cpu").choice.algo == "b"


def test_a_handle_is_in_no_choice(monkeypatch):
    """Plans belong to their thread and handle; what threads share is words and numbers."""
    only(monkeypatch, Fake("a"))
    mine = plan(PROBLEM, device="cpu")
    theirs = []
    thread = threading.Thread(target=lambda: theirs.append(plan(PROBLEM, device="cpu")))
    thread.start()
    thread.join()
    assert theirs[0] is not mine
    assert theirs[0].choice == mine.choice
    assert Choice.from_json(mine.choice.to_json()) == mine.choice
    with pytest.raises(FlcudaError, match="another thread"):
        theirs[0](**PROBLEM.random_arrays(device="cpu"))


GRAPHS = {
    "operation": (GRAPH + "y = silu(%t); out y", GRAPH + "y = relu(%t); out y"),
    "virtual tensors": (GRAPH + "y = silu(%t); out y", GRAPH + "y = silu(%t); out t; out y"),
    "order of the outputs": (GRAPH + "y = silu(%t); out t; out y", GRAPH + "y = silu(%t); out y; out t"),
    "order of the inputs": (
        "graph; a float16 8x16; b float16 8x16; y = sub(%a, %b); out y",
        "graph; a float16 8x16; b float16 8x16; y = sub(%b, %a); out y",
    ),
    "attribute": (GRAPH + "out t", GRAPH.replace("padding=1", "padding=2") + "out t"),
    "dtype of an output": (GRAPH + "out t", GRAPH + "out t float32"),
    "compute": (
        GRAPH.replace("graph;", "graph fma;") + "out t",
        GRAPH.replace("graph;", "graph float64 fma;") + "out t",
    ),
    "math": (GRAPH + "out t", GRAPH.replace("graph;", "graph fma;") + "out t"),
    "dtype inside": (
        GRAPH + "y = silu(%t); out y",
        GRAPH.replace("graph;", "graph intermediate:float16;") + "y = silu(%t); out y",
    ),
    "alignment": (GRAPH + "out t", GRAPH.replace("nhwc; w", "nhwc align:8; w") + "out t"),
    "layout of an input": (GRAPH + "out t", GRAPH.replace("8x16x14x14 nhwc", "8x16x14x14 nchw") + "out t"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_a_graph_adds(tmp_path, name):
    """Fused operations and which of their results leave the kernel."""
    one, other = GRAPHS[name]
    assert_told_apart(of_line(one), of_line(other), tmp_path)


def test_a_graph_of_one_convolution_is_not_the_convolution(tmp_path):
    assert_told_apart(of_line(LINE), of_line(GRAPH + "out t"), tmp_path)


def test_every_field_of_a_problem_is_in_its_line():
    """Fields whose change alone makes another valid Problem, and the two that follow from others."""
    problem = ConvolutionProblem.parse("forward n2 c4 6x6 k4 3x3 p1 float16 nhwc ys:2000x1x200x10")
    changes = {
        "direction": "backward_filter",
        "x_shape": (3, 4, 6, 6),
        "w_shape": (5, 4, 3, 3),
        "x_strides": (200, 1, 24, 4),
        "w_strides": (100, 1, 12, 4),
        "y_strides": (2000, 1, 210, 10),
        "y_dtype": "float32",
        "math": "fma",
        "padding_before": (2, 1),
        "padding_after": (1, 2),
        "stride": (6, 1),
        "dilation": (1, 2),
        "groups": 2,
        "accumulate": True,
        "x_alignment": 8,
        "w_alignment": 8,
        "y_alignment": 8,
    }
    follow = {"x_dtype", "w_dtype", "compute"}
    assert set(changes) | follow == {entry.name for entry in fields(ConvolutionProblem)}
    lines = {str(problem)}
    for name, value in changes.items():
        more = {"w_shape": (4, 2, 3, 3), "w_strides": (18, 1, 6, 2)} if name == "groups" else {}
        other = replace(problem, **{name: value, **more})
        assert ConvolutionProblem.parse(str(other)) == other
        lines.add(str(other))
    assert len(lines) == 1 + len(changes)


# --- any two ----------------------------------------------------------------------------------------------------------

SEEDS = st.integers(0, 2**32 - 1)
POLICIES = st.builds(
    Policy,
    mode=st.sampled_from(["find", "heuristic"]),
    deterministic=st.booleans(),
    workspace_limit=st.none() | st.integers(0, 2**40),
    max_error=st.none() | st.floats(1e-12, 1e3),
    time=st.sampled_from(["device", "host", "both"]),
    effort=st.sampled_from(["fast", "wide"]),
    l2=st.sampled_from(["cold", "warm"]),
)


def problem_of(seed: int) -> ConvolutionProblem:
    return random_problem(np.random.default_rng(seed))


def mutated(problem: ConvolutionProblem, seed: int) -> ConvolutionProblem:
    """A Problem that shares all but a field or so with another one, or the same."""
    rng = np.random.default_rng(seed)
    other = problem_of(seed + 1)
    for name in rng.permutation([entry.name for entry in fields(problem)]):
        try:
            return replace(problem, **{name: getattr(other, name)})
        except (ValueError, TypeError):
            continue
    return problem


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS, SEEDS, POLICIES, POLICIES)
def test_keys_are_equal_exactly_when_their_texts_are(first, second, policy, other_policy):
    problem = problem_of(first)
    keys = [
        key(one, under)
        for one in (problem, mutated(problem, second), problem_of(second))
        for under in (policy, other_policy)
    ]
    for a in keys:
        for b in keys:
            same = a.problem == b.problem and a.policy == b.policy
            assert (a == b) == (a.text == b.text) == (a.file_name == b.file_name) == same
            assert hash(a) == hash(b) or not same
        assert Key.from_json(json.loads(a.text)) == a


@given(st.integers(0, 2**40), st.floats(1e-12, 1e3))
def test_equal_values_of_other_types_give_the_same_text(limit, error):
    one = Policy(workspace_limit=limit, max_error=error)
    other = Policy(workspace_limit=np.int64(limit), max_error=np.float64(error))
    assert one == other
    assert key(policy=one).text == key(policy=other).text
    assert key(policy=Policy(max_error=1)).text == key(policy=Policy(max_error=1.0)).text
    assert key(policy=Policy(workspace_limit=True)).text == key(policy=Policy(workspace_limit=1)).text


def test_equal_problems_made_in_other_ways_give_the_same_text():
    """Stray bytes of a hashed struct gave random misses."""
    x = np.zeros((8, 14, 14, 16), np.float16).transpose(0, 3, 1, 2)
    w = np.zeros((32, 3, 3, 16), np.float16).transpose(0, 3, 1, 2)
    made = [
        ConvolutionProblem.parse(LINE),
        ConvolutionProblem.parse("nhwc float16 p1x1 forward k32 14x14 c16 3x3 n8 align:16 d1"),
        ConvolutionProblem.create(
            "forward", np.array([8, 16, 14, 14]), [32, 16, 3, 3], dtype=np.float16, layout="nhwc", padding=((1, 1), 1)
        ),
        ConvolutionProblem.from_arrays("forward", x=x, w=w, padding=np.int32(1), groups=np.int8(1)),
        replace(ConvolutionProblem.parse(LINE), groups=np.int64(1), x_strides=[3136, 1, 224, 16]),
    ]
    assert len({of_line(str(problem)).text for problem in made}) == 1
    assert len({key(problem) for problem in made}) == 1


def test_equal_in_every_process():
    """Processes hash words otherwise; the texts, names and order of the parts are the same."""
    script = (
        "import hashlib, sys\n"
        "from finder_fakes import key\n"
        "from test_key_ledger import GRAPHS, LINE, POLICY_CHANGES, of_line, problem_of\n"
        "from flcuda.device import CPU\n"
        "from flcuda.finder.choice import Key\n"
        "from flcuda.finder.policy import Policy\n"
        "keys = [key(problem_of(seed)) for seed in range(60)]\n"
        "keys += [of_line(line) for pair in GRAPHS.values() for line in pair]\n"
        "keys += [of_line(LINE, policy=Policy(**{name: value})) for name, value in POLICY_CHANGES.items()]\n"
        "keys += [Key.of(problem_of(0), Policy(), CPU, tuple({'a', 'b', 'c', 'd'}))]\n"
        "for each in keys: print(each.file_name, each.text)\n"
    )
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent), *filter(None, sys.path)])
    printed = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    lines = printed[0].splitlines()
    assert len(lines) > 80
    assert lines[0] == f"{key(problem_of(0)).file_name} {key(problem_of(0)).text}"


def test_graphs_are_equal_exactly_when_their_texts_are():
    problems = [GraphProblem.parse(line) for pair in GRAPHS.values() for line in pair]
    for one in problems:
        for other in problems:
            assert (one == other) == (key(one).text == key(other).text)
