"""The profile of a training step: its parts, their costs and floors, and what it leaves behind: nothing."""

import json
import math
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from flcuda import Tensor, amp, finder, models, nn, no_grad, optim
from flcuda import device as devices
from flcuda import functional as F
from flcuda.autograd import Function
from flcuda.errors import FlcudaError
from flcuda.finder import sources
from flcuda.finder.peaks import Peaks
from flcuda.finder.sources.reference import ReferenceSource
from flcuda.ops import convolution as convolution_ops
from flcuda.ops.cost import Cost
from flcuda.training import step_profile
from flcuda.training.step_profile import Part, StepProfile, profile_step, step_regret

CPU = devices.resolve("cpu")


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    """The layers of this thread ask the store of the test, which is empty."""
    convolution_ops._remembered.mine.clear()


class Net(nn.Module):
    """One layer of each kind, a residual among them."""

    def __init__(self, precision: str = "float32") -> None:
        options = {"precision": precision, "device": "cpu"}
        self.stem = nn.Conv2D(3, 8, 3, 1, 1, seed=1, **options)
        self.bn = nn.BatchNorm2D(8, **options)
        self.blocks = nn.Sequential(nn.Conv2D(8, 8, 1, bias=False, seed=2, **options), nn.ReLU())
        self.pool = nn.MaxPool2D(2)
        self.fc = nn.Linear(8, 5, seed=3, **options)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.stem(x)))
        y = self.pool(F.add(self.blocks(y), y))
        return self.fc(F.global_avg_pool2d(y))


@pytest.fixture
def training(rng):
    model = Net()
    optimizer = optim.SGD(model, 0.1, momentum=0.9)
    x = rng.standard_normal((4, 3, 6, 10)).astype(np.float32)
    target = np.array([0, 1, 2, 4])

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()

    return step, model, optimizer


def of(profile: StepProfile, layer: str, direction: str) -> Part:
    (part,) = [part for part in profile.parts if (part.layer, part.direction) == (layer, direction)]
    return part


def test_every_part_is_there_once_under_its_layer(training):
    profile = profile_step(*training, steps=2, warmup=1, images=4)
    names = [(part.layer, part.name, part.direction) for part in profile.parts]
    forward = [
        ("stem", "Conv2D", "forward"),
        ("bn", "BatchNorm", "forward"),
        ("", "ReLU", "forward"),
        ("blocks.0", "Conv2D", "forward"),
        ("blocks.1", "ReLU", "forward"),
        ("", "Add", "forward"),
        ("pool", "MaxPool2D", "forward"),
        ("", "GlobalAvgPool2D", "forward"),
        ("fc", "Linear", "forward"),
        ("", "CrossEntropy", "forward"),
    ]
    assert names[: len(forward)] == forward
    assert Counter(names[len(forward) : -3]) == Counter(
        [
            ("stem", "Conv2D", "backward_filter"),
            ("stem", "Conv2D", "bias"),
            ("blocks.0", "Conv2D", "backward_data"),
            ("blocks.0", "Conv2D", "backward_filter"),
            ("", "SGD", "update"),
            *((layer, name, "backward") for layer, name, _ in forward if name != "Conv2D"),
        ]
    )
    assert {name for _, name, _ in names[-3:]} == {"other", "gradient sums", "check"}
    assert all(len(part.times_ms) == 2 and min(part.times_ms) >= 0 for part in profile.parts)
    assert profile.wall_ms > 0
    assert profile.host_ms > 0
    assert profile.bandwidth > 1e8
    assert sum(entry.ms for entry in profile.kinds) == pytest.approx(profile.ms)


def test_a_part_has_the_time_of_what_runs_in_it(training, monkeypatch):
    step, model, optimizer = training
    slow = F.BatchNorm.backward

    def backward(self, *grads):
        time.sleep(0.03)
        return slow(self, *grads)

    monkeypatch.setattr(F.BatchNorm, "backward", backward)
    profile = profile_step(step, model, optimizer, steps=2, warmup=1)
    assert of(profile, "bn", "backward").ms >= 30
    assert sum(part.ms for part in profile.parts if part.layer != "bn") < 30
    assert profile.wall_ms >= 30


def test_the_step_trains_as_without_and_nothing_is_left_behind(training):
    step, model, optimizer = training
    before = {kind: vars(kind).get("forward") for kind in (F.Conv2D, F.ReLU, F.Scale, Function)}
    twin = Net()
    twin.load_state_dict(model.state_dict())
    count = []

    def counted() -> None:
        count.append(1)
        step()

    profile_step(counted, model, optimizer, steps=2, warmup=1)
    assert {kind: vars(kind).get("forward") for kind in before} == before
    assert not any("forward" in vars(module) for _, module in model.named_modules())
    assert "apply" not in vars(optimizer)
    peer = optim.SGD(twin, 0.1, momentum=0.9)
    x, target = step.__closure__, None
    cells = dict(zip(step.__code__.co_freevars, x, strict=True))
    x, target = cells["x"].cell_contents, cells["target"].cell_contents
    for _ in count:
        peer.zero_grad()
        F.cross_entropy(twin(x), target).backward()
        peer.step()
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, twin.state_dict()[key], key)


def test_costs_are_counted_by_hand(training):
    profile = profile_step(*training, steps=1, warmup=1)
    x, y, w = 4 * 3 * 60 * 4, 4 * 8 * 60 * 4, 8 * 27 * 4
    macs = 4 * 60 * 8 * 27
    for direction in ("forward", "backward_filter"):
        cost = of(profile, "stem", direction).cost
        assert (cost.bytes, cost.operations, cost.precision) == (x + y + w, 2 * macs, "float32")
    assert of(profile, "stem", "bias").cost == Cost("bias", y + 8 * 4)
    assert of(profile, "blocks.0", "backward_data").cost.bytes == 2 * y + 8 * 8 * 4
    assert of(profile, "pool", "forward").cost == Cost("pooling", y + y // 4 + y // 16)
    assert of(profile, "fc", "backward").cost.operations == 4 * 4 * 8 * 5
    (update,) = [part for part in profile.parts if part.kind == "optimizer"]
    # gradient, weight and velocity read, weight and velocity written; segments end at multiples of 256 bytes
    numbers = sum(p.data.size for p in training[1].parameters())
    assert 5 * 4 * numbers <= update.cost.bytes <= 5 * 4 * numbers + 9 * 3 * 256


def test_batch_norm_reads_its_input_twice_in_training_and_once_in_evaluation(training):
    _, model, _ = training
    a = 4 * 8 * 60 * 4
    profile = profile_step(*training, steps=1, warmup=1)
    assert of(profile, "bn", "forward").cost.bytes == 3 * a
    assert of(profile, "bn", "backward").cost.bytes == 5 * a
    model.eval()
    profile = profile_step(*training, steps=1, warmup=1)
    assert of(profile, "bn", "forward").cost.bytes == 2 * a


@pytest.mark.parametrize(("precision", "word"), [("tf32", "tf32"), ("float16", "float16"), ("bfloat16", "bfloat16")])
def test_operations_are_counted_in_the_models_precision(rng, precision, word):
    model = Net(precision)
    x = rng.standard_normal((2, 3, 4, 4)).astype(np.float32)
    profile = profile_step(lambda: F.cross_entropy(model(x), np.array([1, 2])).backward(), model, steps=1, warmup=1)
    assert {part.cost.precision for part in profile.parts if part.cost.operations} == {word}
    assert profile.parts[0].name == "Convert"
    assert profile.parts[0].kind == "conversion"


def test_a_forward_alone(training):
    _, model, _ = training
    x = np.zeros((1, 3, 4, 4), np.float32)

    def step() -> None:
        with no_grad():
            model(x)

    profile = profile_step(step, model, steps=1, warmup=1)
    assert {part.direction for part in profile.parts} == {"forward", ""}
    assert of(profile, "stem", "forward").cost.operations > 0


def test_gradients_that_the_engine_adds_are_a_part_and_so_is_the_check(rng):
    model = Net("float16")
    optimizer = optim.SGD(model, 0.1)
    scaler = amp.DynamicScaler()
    x = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    calls = []

    def step() -> None:
        calls.append(1)
        scaler.step(optimizer, F.cross_entropy(model(x), np.array([0, 1])))

    profile = profile_step(step, model, optimizer, steps=2, warmup=1)
    kinds = {entry.name: entry.ms for entry in profile.kinds}
    assert kinds["check"] > 0
    assert kinds["gradient sums"] > 0
    assert kinds["optimizer"] > 0
    assert scaler.state_dict()["steps"] == len(calls)


class Several(Function):
    """Takes the gradients of its users as they come."""

    def forward(self, x):
        return x * 2

    def backward(self, *grads):
        return (sum(grads) * 2,)


def test_functions_without_a_cost_move_their_arrays_and_each_gradient_counts(training):
    _, model, _ = training
    x = Tensor(np.ones((3, 5), np.float32), requires_grad=True)
    watch = step_profile._Watch(model, None, CPU)

    def step() -> None:
        node = Several.apply(x)._node
        grad = np.ones((3, 5), np.float32)
        node.backward(grad, grad, grad)

    watch.record(step)
    assert [found.cost for found in watch.found] == [Cost("Several", 2 * 60), Cost("Several", (3 + 2) * 60)]


def test_other_threads_are_left_alone(training):
    step, model, optimizer = training
    other = Net()
    stop = threading.Event()
    started = threading.Event()

    def work() -> None:
        while not stop.is_set():
            F.cross_entropy(other(np.ones((2, 3, 4, 4), np.float32)), np.array([0, 1])).backward()
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert started.wait(30)
        profile = profile_step(step, model, optimizer, steps=3, warmup=1)
    finally:
        stop.set()
        thread.join()
    assert sum(part.name == "Conv2D" and part.direction == "forward" for part in profile.parts) == 2


def test_a_step_that_changes_is_an_error_and_one_that_fails_leaves_nothing(training):
    step, model, optimizer = training
    count = iter(range(100))

    def changing() -> None:
        step()
        if next(count) > 8:
            F.relu(np.ones(3, np.float32))

    with pytest.raises(FlcudaError, match="does not do the same each time"):
        profile_step(changing, model, optimizer, steps=9, warmup=1)
    with pytest.raises(FlcudaError, match="runs no Function"):
        profile_step(lambda: None, model, steps=1, warmup=1)

    def failing() -> None:
        step()
        raise KeyError("mine")

    watch = step_profile._Watch(model, optimizer, CPU)
    with pytest.raises(KeyError, match="mine"):
        watch.record(failing)
    assert "apply" not in vars(optimizer)
    step()


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"warmup": 0}])
def test_bad_numbers_are_named(training, arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}: 0"):
        profile_step(*training, **arguments)
    with pytest.raises(ValueError, match="has no parameters"):
        profile_step(training[0], nn.ReLU())


def example() -> StepProfile:
    gpu = Peaks({"float16": 1e15}, 5e12)
    parts = (
        Part(
            "layer1.0.conv1", "Conv2D", "forward", Cost("convolution forward", 4_000, 10**9, "float16"), (3.0, 1.0, 2.0)
        ),
        Part("layer1.0.downsample.1", "BatchNorm", "forward", Cost("batch norm", 8 * 10**6), (0.004,)),
        Part("fc", "Linear", "backward", Cost("linear", 4 * 10**6, 10**12, "float64"), (0.5,)),
        Part("", "check", "", Cost("check", 0), (0.25,)),
    )
    return StepProfile(CPU, parts, 3.0, 1.5, None, 4e12, gpu, 256)


def test_floors_and_sums():
    profile = example()
    assert profile.parts[0].ms == 2.0
    assert [profile.floor_ms(part) for part in profile.parts] == pytest.approx([1e-3, 2e-3, 1e-3, 0])
    # no peak is known for float64 there
    assert [profile.limit(part) for part in profile.parts] == ["operations", "bytes", "bytes", ""]
    assert [part.block for part in profile.parts] == ["layer1.0", "layer1.0", "fc", ""]
    assert [entry.name for entry in profile.kinds] == ["convolution forward", "linear", "check", "batch norm"]
    assert profile.kinds[0].times_floor == pytest.approx(2000)
    assert profile.kinds[2].times_floor is None
    assert profile.ms == pytest.approx(2.754)


def test_text_fits_a_terminal_and_says_what_it_says():
    profile = example()
    text = f"{profile}\n{profile.table()}"
    assert max(map(len, text.split("\n"))) <= 80
    assert "85,333 images/s" in text
    assert "4,000 GB/s" in text
    assert "1,000 TFLOP/s in float16" in text
    assert "captured" not in text
    assert "captured: 2.000 ms (128,000 images/s)" in str(replace(profile, captured_ms=2.0))
    assert "the host was too slow" in str(replace(profile, queued=False))


def test_long_names_and_long_times_fit_too():
    profile = example()
    long = replace(profile.parts[0], layer="backbone.stages.11.blocks.10.convolution", times_ms=(123456.7,))
    assert max(map(len, str(replace(profile, parts=(long, *profile.parts))).split("\n"))) <= 80


def test_json_has_every_part_and_no_number_that_json_lacks(training):
    profile = profile_step(*training, steps=2, warmup=1, images=4)
    found = json.loads(json.dumps(profile.to_json(), allow_nan=False))
    assert len(found["parts"]) == len(profile.parts)
    assert found["parts"][0]["problem"] == "forward n4 c3 6x10 k8 3x3 p1 s1 float32 nchw"
    assert found["kinds"][0]["ms"] == pytest.approx(profile.kinds[0].ms)
    assert found["images"] == 4


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.svg"
    example().plot(path, "a title")
    text = path.read_text()
    assert "a title" in text
    assert "layer1.0" in text


def test_predictions_are_the_stored_choices(training):
    with finder.policy(mode="find"):
        profile = profile_step(*training, steps=1, warmup=1)
        convolutions = [part for part in profile.parts if part.problem is not None]
        assert len(convolutions) == 5
        for part in convolutions:
            assert part.predicted_ms == finder.plan(part.problem, device="cpu").choice.median_ms
    took, predicted = profile.convolutions
    assert took == sum(part.ms for part in convolutions)
    assert predicted == sum(part.predicted_ms for part in convolutions)
    assert "the finder measured them alone" in str(profile)
    with finder.policy(mode="heuristic", deterministic=True):
        assert profile_step(*training, steps=1, warmup=1).convolutions[1] is None


class Zeros:
    """Takes as long as it is told to, alone and in a step."""

    workspace = 0

    def __init__(self, alone_s: float, in_step_s: float, in_step: list[int]) -> None:
        self.alone_s = alone_s
        self.in_step_s = in_step_s
        self.in_step = in_step

    def __call__(self, *operands, **named) -> None:
        time.sleep(self.in_step_s if self.in_step else self.alone_s)
        operands[-1][...] = 0


def test_regret_is_that_of_the_candidate_that_is_used(training, monkeypatch):
    step, model, optimizer = training
    in_step: list[int] = []
    others = ReferenceSource.candidates

    def filters_left_out(self, problem, policy, device):
        return () if problem.direction == "backward_filter" else others(self, problem, policy, device)

    monkeypatch.setattr(ReferenceSource, "candidates", filters_left_out)
    monkeypatch.setattr(sources, "_registered", {})

    @finder.source("timed", devices=("cpu",))
    def timed(problem):
        if problem.direction == "backward_filter":
            for algo, times in {"steady": (0.006, 0.006), "traitor": (0.002, 0.03)}.items():
                yield finder.Candidate("timed", algo, problem.math, 0, True, lambda times=times: Zeros(*times, in_step))

    def watched() -> None:
        in_step.append(1)
        try:
            step()
        finally:
            in_step.pop()

    # A plan that the step itself makes measures within it.
    for part in profile_step(step, model, optimizer, steps=1, warmup=1).parts:
        assert part.problem is None or part.predicted_ms is not None
    regret = step_regret(watched, model, optimizer, dearest=2, best=3, rounds=2)
    for entry in regret.retried:
        assert entry.problem.direction == "backward_filter"
        assert entry.count == 1
        assert entry.labels == ("timed:traitor", "timed:steady")
        assert entry.alone_ms[0] < entry.alone_ms[1]
        assert 20 < entry.regret_ms < 60
    assert len(regret.retried) == 2
    assert regret.ms == pytest.approx(sum(entry.regret_ms for entry in regret.retried))
    assert 0.5 < regret.share < 1
    # The store and the layers still have their own.
    assert finder.plan(regret.retried[0].problem, device="cpu").choice.id == "timed:traitor"
    text = str(regret)
    assert "(used)" in text
    assert max(map(len, text.split("\n"))) <= 80
    json.dumps(regret.to_json(), allow_nan=False)


def test_a_step_with_other_plans_runs_them_and_times_nothing(training):
    step, model, optimizer = training
    watch = step_profile._Watch(model, optimizer, CPU)
    watch.record(step)
    place = next(place for place, found in enumerate(watch.found) if found.problem is not None)
    problem = watch.found[place].problem
    plan = finder.plan(problem, device="cpu")
    runs = []

    def other(*arrays, out=None):
        runs.append(arrays)
        return plan(*arrays, out=out)

    watch.substituted(step, {place: other})()
    assert len(runs) == 1
    step()
    watch.substituted(step, {})()
    assert len(runs) == 1


def test_whole_steps_are_timed_in_turns_and_all_are_closed(training, monkeypatch):
    """On the CPU device, where a captured step just runs."""
    made = []

    class Captured(step_profile.CapturedStep):
        def __init__(self, function):
            super().__init__(function)
            made.append(self)

    monkeypatch.setattr(step_profile, "CapturedStep", Captured)
    monkeypatch.setattr(step_profile, "_REPLAYS", 2)
    step, model, optimizer = training
    watch = step_profile._Watch(model, optimizer, CPU)
    watch.record(step)
    place = next(place for place, found in enumerate(watch.found) if found.problem is not None)
    plan = finder.plan(watch.found[place].problem, device="cpu")

    def full(*arrays, out=None):
        raise MemoryError("no room")

    begun = []

    def first(*arrays, out=None):
        begun.append("used")
        return plan(*arrays, out=out)

    def late(*arrays, out=None):
        begun.append("late")
        time.sleep(0.01)
        return plan(*arrays, out=out)

    used, slower, failed, absent = step_profile._captured_ms(watch, step, [place], [first, late, full, None], CPU, 3)
    # Few of each at a time, and either begins as often.
    burst = ["used"] * 2 + ["late"] * 2 + ["late"] * 2 + ["used"] * 2
    assert begun[2 * step_profile._WARM_REPLAYS :] == 3 * 2 * burst
    assert len(used) == len(slower) == 3
    assert min(used) > 0
    assert sum(slower) > sum(used) + 3 * 5
    assert failed == absent == ()
    assert len(made) == 3
    for each in made:
        with pytest.raises(FlcudaError, match="closed"):
            each()
    with pytest.raises(MemoryError, match="no room"):
        step_profile._captured_ms(watch, step, [place], [full], CPU, 1)


def test_regret_of_the_captured_step_is_that_of_the_whole_step():
    problem = finder.problems("resnet18", 1)[0]
    turns = ((9.0, 9.02, 9.01), (8.99, 9.01, 9.005), (8.9, 8.9, 9.03), ())
    entry = step_profile.Retried(problem, 2, tuple("abcd"), (1.0, 1.1, 1.2, 1.3), (2.5, 2.4, 2.3, math.nan), turns)
    # c gains more by the median, but not in every turn; d failed.
    assert entry.regret_ms == pytest.approx(0.01)
    regret = step_profile.Regret((entry,), 9.0)
    text = str(regret)
    assert "the captured step takes -10.0 us\n" in text
    assert "the captured step takes -100.0 us, not in every turn" in text
    assert regret.to_json()["convolutions"][0]["candidates"][1]["captured_step_ms"] == [8.99, 9.01, 9.005]
    json.dumps(regret.to_json(), allow_nan=False)
    alone = step_profile.Retried(problem, 2, ("a",), (1.0,), (2.5,), ((9.0, 9.1),))
    assert alone.regret_ms == 0


def test_a_failed_candidate_is_no_best_one():
    problem = finder.problems("resnet18", 1)[0]
    entry = step_profile.Retried(problem, 2, ("a", "b", "c"), (1.0, 1.1, 1.2), (2.5, math.nan, 2.25))
    assert entry.regret_ms == pytest.approx(0.25)
    regret = step_profile.Regret((entry,), 100.0)
    assert regret.share == pytest.approx(0.0025)
    assert "failed" in str(regret)
    assert regret.to_json()["convolutions"][0]["candidates"][1]["in_step_ms"] is None


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_networks_convolutions_are_those_of_its_list(name):
    model = getattr(models, name)(device="cpu")
    watch = step_profile._Watch(model, None, CPU)
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
    with finder.policy(mode="heuristic"):
        watch.record(lambda: F.cross_entropy(model(x), np.array([3])).backward())
    found = Counter(str(entry.problem) for entry in watch.found if entry.problem is not None)
    assert found == Counter(map(str, finder.problems(name, 1, distinct=False)))
