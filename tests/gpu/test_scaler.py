"""The loss scaler on CUDA: a whole step in a CUDA graph, news without waiting, the same as on the CPU device."""

import copy
import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import place, to_numpy
from scaler_cases import TRANSITIONS, checked, random_steps

import flcuda
from flcuda import amp, device, nn, optim
from flcuda import functional as F
from flcuda.autograd import Function, Tensor
from flcuda.device import Device
from flcuda.errors import FlcudaError
from flcuda.ops import elementwise, finite
from flcuda.parameters import Parameter

CUDA = Device("cuda")
OPTIMIZERS = {
    "sgd": lambda model: optim.SGD(model, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "dampened": lambda model: optim.SGD(model, 0.05, momentum=0.9, dampening=0.1),
    "clipped": lambda model: optim.SGD(model, 0.05, momentum=0.9, max_norm=0.5),
    "adam": lambda model: optim.Adam(model, 1e-2),
    "adamw": lambda model: optim.AdamW(model, 1e-2, weight_decay=0.1, max_norm=0.5),
}


@pytest.fixture
def cupy():
    return device.cupy()


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Runs of one batch are compared to the bit."""
    with flcuda.policy(deterministic=True):
        yield


class Spoiled(Function):
    """Passes x; multiplies its gradient by a factor on the device, 1 or NaN."""

    def forward(self, x: Any, factor: Any) -> Any:
        self.factor = factor
        return x.copy()

    def backward(self, grad: Any) -> tuple[Any, ...]:
        return (elementwise.scale(grad, self.factor),)


class Given(Function):
    """A loss whose gradient with respect to x is a given array, whatever the scale."""

    def forward(self, x: Any, grad: Any) -> Any:
        self.grad = grad
        return device.zeros((), np.float32, device=device.device_of(x))

    def backward(self, grad: Any) -> tuple[Any, ...]:
        return (self.grad,)


class Case:
    """A small network with its step; batch and factor are in fixed arrays."""

    def __init__(self, precision: str, where: str, optimizer: str = "sgd", **options: Any) -> None:
        draws = nn.Draws(5)
        places = {"precision": precision, "device": where}
        self.model = nn.Sequential(
            nn.Conv2D(3, 8, 3, padding=1, seed=draws, **places),
            nn.BatchNorm2D(8, **places),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 4 * 4, 10, seed=draws, **places),
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scaler = amp.DynamicScaler(**options)
        self.where = where
        self.x = place(np.zeros((8, 3, 4, 4), np.float32), where)
        self.target = place(np.zeros(8, np.int64), where)
        self.factor = place(np.ones(1), where)
        if where == "cuda":
            # Made on this stream; the tests go on with it on another one, which does not wait for this one.
            device.cupy().cuda.get_current_stream().synchronize()

    def batch(self, seed: int, invalid: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.x[...] = place(rng.standard_normal(self.x.shape).astype(np.float32), self.where)
        self.target[...] = place(rng.integers(0, 10, 8), self.where)
        self.factor[...] = np.nan if invalid else 1.0

    def loss(self) -> Tensor:
        return F.cross_entropy(Spoiled.apply(self.model(self.x), factor=self.factor), self.target)

    def step(self) -> None:
        self.scaler.step(self.optimizer, self.loss())

    def done(self, way: str) -> bool:
        """Does a step in one of the two ways; says whether it was valid."""
        if way == "step":
            self.step()
            return int(self.scaler.is_invalid_array[0]) == 0
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale(self.optimizer)
        valid = self.scaler.adjust_scale_factor()
        self.optimizer.step()
        return valid

    def written(self) -> list[np.ndarray]:
        arrays = [a for arena in self.optimizer.arenas for a in (arena.master, arena.data)]
        arrays += [a for flats in self.optimizer._states().values() for a in flats]
        arrays += [a for s in self.optimizer.statistics for a in (s.running, s.running_counts)]
        return [to_numpy(a).copy() for a in (*arrays, self.optimizer.steps)]


def spin(clocks: int) -> None:
    """Keeps the device busy for so many clocks of a multiprocessor, on the current stream."""
    source = 'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n) {} }'
    device.cupy().RawKernel(source, "spin")((1,), (1,), (np.int64(clocks),))


@contextmanager
def capture(stream: Any, graphs: list[Any]) -> Iterator[None]:
    """Captures what is done inside on the stream; ends the capture also when that fails."""
    cupy = device.cupy()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            yield
        finally:
            graphs.append(stream.end_capture())


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_a_captured_step_has_no_sync_and_replays_as_the_step_does(precision, optimizer, cupy):
    """A sync, or a copy from pageable memory that needs one, would make the capture fail.

    Forward, backward, check, unscale, update and the scaler's rule are one graph. Its replays, one of them invalid,
    give what as many plain steps give.
    """
    options = {"init_scale": 1024.0, "growth_interval": 3, "max_scale": 4096.0}
    ours, theirs = (Case(precision, "cuda", optimizer, **options) for _ in range(2))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for case in (ours, theirs):
            for seed in range(2):
                case.batch(seed)
                case.step()
        stream.synchronize()
        graphs: list[Any] = []
        with capture(stream, graphs):
            ours.step()
        for seed in range(2, 9):
            for case in (ours, theirs):
                case.batch(seed, invalid=seed == 4)
            graphs[0].launch(stream)
            theirs.step()
        stream.synchronize()
        state = ours.scaler.state_dict()
        assert state == theirs.scaler.state_dict()
        assert (state["steps"], state["skipped_steps"]) == (9, 1)
        for a, b in zip(ours.written(), theirs.written(), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(ours.scaler.is_invalid_array.get(), theirs.scaler.is_invalid_array.get())


def test_accumulation_is_captured_too(cupy):
    ours, theirs = (Case("float16", "cuda", init_scale=256.0) for _ in range(2))

    def accumulated(case: Case) -> None:
        case.scaler.scale(case.loss() * 0.5).backward()
        case.scaler.step(case.optimizer, case.loss() * 0.5)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for case in (ours, theirs):
            case.batch(0)
            accumulated(case)
        stream.synchronize()
        graphs: list[Any] = []
        with capture(stream, graphs):
            accumulated(ours)
        for seed in range(1, 4):
            for case in (ours, theirs):
                case.batch(seed, invalid=seed == 2)
            graphs[0].launch(stream)
            accumulated(theirs)
        stream.synchronize()
        for a, b in zip(ours.written(), theirs.written(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert ours.scaler.state_dict() == theirs.scaler.state_dict()


def test_too_many_skips_in_replays_are_told_by_poll(cupy):
    case = Case("float16", "cuda", max_consecutive_skips=5)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        case.batch(0)
        case.step()
        stream.synchronize()
        graphs: list[Any] = []
        with capture(stream, graphs):
            case.step()
            case.scaler.poll()
        case.batch(1, invalid=True)
        for _ in range(4):
            graphs[0].launch(stream)
            case.scaler.poll()
        stream.synchronize()
        case.scaler.poll()
        for _ in range(2):
            graphs[0].launch(stream)
        case.scaler.poll()
        stream.synchronize()
        with pytest.raises(FlcudaError, match=r"6 steps in a row up to step 7 .*invalid in '0\.weight'"):
            case.scaler.poll()


def test_a_first_step_cannot_be_captured(cupy):
    case = Case("float32", "cuda")
    case.batch(0)
    case.loss().backward()  # what else a first step does: searches, compiles
    case.optimizer.zero_grad()
    stream = cupy.cuda.Stream(non_blocking=True)
    graphs: list[Any] = []
    cupy.cuda.Device().synchronize()
    with pytest.raises(FlcudaError, match="the scaler's first use cannot be captured"), capture(stream, graphs):
        case.step()
    case.optimizer.zero_grad()
    case.model.discard_statistics()
    case.step()
    assert case.scaler.state_dict()["steps"] == 1


def test_the_host_is_told_while_the_device_is_behind(cupy):
    """Steps are queued behind a busy device; nothing waits, and the error comes once the device has caught up."""
    case = Case("float32", "cuda", max_consecutive_skips=3)
    case.batch(0)
    for _ in range(3):
        case.step()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.cuda.Device().synchronize()
        case.step()
        case.batch(1, invalid=True)
        stream.synchronize()
        spin(3_000_000_000)
        for _ in range(6):
            case.step()
        end = cupy.cuda.Event()
        end.record()
        assert not end.done
        stream.synchronize()
        # Every third step is looked at: 3, 6 and 9.
        with pytest.raises(FlcudaError, match="5 steps in a row up to step 9 "):
            case.step()
        # The step that raised was done all the same. Read on its stream: nothing else waits for it.
        assert case.scaler.state_dict()["consecutive_skips"] == 7


def test_the_ring_brings_what_was_sent(cupy, rng):
    ring = amp.Ring()
    names = tuple(f"p{i}" for i in range(700))
    for round_ in range(3):
        sent = []
        for i in range(amp.NEWS_SLOTS):
            flags = np.concatenate([[1, 0], rng.random(700) < 0.01]).astype(np.int32)
            numbers = np.array([2.0**i, 2.0**-i]).view(np.int64)
            state = np.concatenate([numbers, [round_, i, 5, 6]]).astype(np.int64)
            assert ring.send(cupy.asarray(state), [checked(names, cupy.asarray(flags))])
            invalid = tuple(names[k] for k in np.flatnonzero(flags[2:]))
            sent.append(amp.News(2.0**i, (round_, i, 5, 6), True, invalid))
        cupy.cuda.Device().synchronize()
        assert [ring.receive() for _ in range(amp.NEWS_SLOTS + 1)] == [*sent, None]


def test_100_000_random_steps_follow_a_plain_model(rng):
    """The rule alone; a tenth with each set of options."""
    for _ in range(10):
        random_steps("cuda", rng, 10_000)


@pytest.mark.parametrize("way", ["step", "synchronous"])
@pytest.mark.parametrize("name", TRANSITIONS)
def test_transitions(name, way):
    options, pattern, scales = TRANSITIONS[name]
    case = Case("float32", "cuda", init_scale=4.0, **options)
    found = []
    for seed, kind in enumerate(pattern):
        case.batch(seed, invalid=kind == "x")
        assert case.done(way) == (kind == ".")
        found.append(case.scaler.scale_factor)
    assert found == scales


@pytest.mark.parametrize("way", ["step", "synchronous"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("layer", ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"])
def test_nan_in_one_layer_is_found_there_and_named(layer, precision, way):
    """In the gradient of one parameter, by a first micro-batch; the step is skipped to the bit."""
    case = Case(precision, "cuda", init_scale=64.0, max_consecutive_skips=1)
    case.batch(0)
    case.step()
    before = case.written()
    case.scaler.scale(case.loss() * 0.5).backward()
    grad = dict(case.model.named_parameters())[layer].grad
    grad[(-1,) * grad.ndim] = np.nan
    match = rf"1 steps in a row up to step 2 .*were invalid in '{layer}'\."
    if way == "step":
        case.scaler.step(case.optimizer, case.loss() * 0.5)
        with pytest.raises(FlcudaError, match=match):
            case.scaler.check()
    else:
        case.scaler.scale(case.loss() * 0.5).backward()
        case.scaler.unscale(case.optimizer)
        with pytest.raises(FlcudaError, match=match):
            case.scaler.adjust_scale_factor()
        case.optimizer.step()
    names = [segment.name for arena in case.optimizer.arenas for segment in arena.segments]
    place_ = names.index(layer)
    expected = [1, place_, *(int(i == place_) for i in range(len(names)))]
    assert case.scaler.is_invalid_array.get().tolist() == expected
    for a, b in zip(before, case.written(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert case.scaler.scale_factor == 32.0


def test_a_captured_step_outlives_another_optimizers_steps_with_its_scaler(cupy):
    """What the graph writes is still the scaler's, and the names are those of the optimizer that was replayed."""
    ours, theirs = (Case("float16", "cuda", init_scale=64.0, max_consecutive_skips=3) for _ in range(2))
    model = nn.Module()
    model.w = Parameter(np.ones(3), device="cuda")
    optimizer = optim.SGD(model, 0.5)
    cupy.cuda.get_current_stream().synchronize()
    pool = cupy.cuda.MemoryPool()
    graphs: list[Any] = []
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for case in (ours, theirs):
            for seed in range(2):
                case.batch(seed)
                case.step()
        stream.synchronize()
        with capture(stream, graphs), cupy.cuda.using_allocator(pool.malloc):
            ours.step()
        for _ in range(2):
            ours.scaler.step(optimizer, Given.apply(model.w, grad=cupy.ones(3, np.float32)))
        ours.scaler.scale(Tensor(cupy.ones(()), True))
        ours.scaler.unscale([Tensor(cupy.ones(5, np.float32), True)])
        assert ours.scaler.adjust_scale_factor()
        gc.collect()
        # Whoever takes memory now would be written to, had the scaler given any of it back.
        strangers = [cupy.full(size, 7, np.int32) for size in (2, 4, 6, 8, 16, 64, 128) for _ in range(32)]
        for seed in range(2, 7):
            for case in (ours, theirs):
                case.batch(seed, invalid=seed == 3)
            graphs[0].launch(stream)
            theirs.step()
        stream.synchronize()
        assert all(bool((a == 7).all()) for a in strangers)
        for a, b in zip(ours.written(), theirs.written(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert ours.scaler.scale_factor == theirs.scaler.scale_factor == 32.0
        ours.batch(9, invalid=True)
        for _ in range(3):
            graphs[0].launch(stream)
        ours.scaler.poll()
        stream.synchronize()
        for look in (ours.scaler.poll, ours.scaler.check):
            with pytest.raises(FlcudaError, match=r"3 steps in a row .* invalid in '0\.weight'") as error:
                look()
            assert "'w'" not in str(error.value)


def test_slots_are_not_made_behind_a_busy_device(cupy):
    """Pinned memory is taken at the first step: later ones must not wait for it, nor for what is freed."""
    case = Case("float32", "cuda")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        case.batch(0)
        for _ in range(4):
            case.step()
        stream.synchronize()
        slots = case.scaler._ring._slots
        assert len(slots) == amp.NEWS_SLOTS
        spin(3_000_000_000)
        for _ in range(amp.NEWS_INTERVAL):
            case.step()
        case.scaler.poll()
        end = cupy.cuda.Event()
        end.record()
        assert not end.done
        assert case.scaler._ring._slots is slots
        stream.synchronize()
        case.scaler.poll()


def test_tensors_with_invalid_gradients_can_be_tried_again():
    runs = []
    for invalid in (True, False):
        case = Case("float32", "cuda", init_scale=64.0)
        case.batch(0)
        case.step()
        before = case.written()
        if invalid:
            case.batch(1, invalid=True)
            case.scaler.scale(case.loss()).backward()
            case.scaler.unscale(case.model.parameters())
            assert not case.scaler.adjust_scale_factor()
            assert not case.optimizer.has_gradients()
            case.model.discard_statistics()
            for a, b in zip(before, case.written(), strict=True):
                np.testing.assert_array_equal(a, b)
        case.batch(1)
        case.scaler.scale(case.loss()).backward()
        case.scaler.unscale(case.model.parameters())
        assert case.scaler.adjust_scale_factor()
        case.optimizer.step()
        runs.append(case.written())
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_clipping_is_by_the_gradients_that_the_step_sees():
    """Changed by hand after unscale, down and up, and to NaN."""
    for factor in (1e-4, 1e4, np.nan):
        case = Case("float32", "cuda", "clipped", init_scale=64.0)
        case.batch(0)
        case.scaler.scale(case.loss()).backward()
        case.scaler.unscale(case.optimizer)
        assert case.scaler.adjust_scale_factor()
        gradients = [p.grad for p in case.model.parameters()]
        norm = np.sqrt(sum(np.square(g.get().astype(np.float64)).sum() for g in gradients)) / 64 * factor
        for g in gradients:
            g *= np.float32(factor)
        before = [p.values() for p in case.model.parameters()]
        case.optimizer.step()
        after = [p.values() for p in case.model.parameters()]
        moved = np.sqrt(sum(np.square(p.astype(np.float64) - q).sum() for p, q in zip(after, before, strict=True)))
        # Of rate 0.05 and largest norm 0.5; small moves are rounded in the parameters.
        assert moved == pytest.approx(0.0 if np.isnan(factor) else 0.05 * min(norm, 0.5), rel=0.05)


def test_a_backward_between_unscale_and_step_is_an_error():
    case = Case("float32", "cuda", init_scale=64.0)
    case.batch(0)
    case.scaler.scale(case.loss()).backward()
    case.scaler.unscale(case.optimizer)
    assert case.scaler.adjust_scale_factor()
    before = case.written()
    case.batch(1, invalid=True)
    case.loss().backward()
    with pytest.raises(FlcudaError, match="step: a backward has added to the gradients after unscale"):
        case.optimizer.step()
    for a, b in zip(before, case.written(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_has_a_state_of_its_own(copied):
    case = Case("float32", "cuda", init_scale=64.0)
    case.batch(0)
    case.step()
    kept, case.scaler = case.scaler, copied(case.scaler)
    case.batch(1, invalid=True)
    for _ in range(2):
        case.step()
    assert (case.scaler.scale_factor, kept.scale_factor) == (16.0, 64.0)
    assert (case.scaler.state_dict()["steps"], kept.state_dict()["steps"]) == (3, 1)


@pytest.mark.parametrize("optimizer", ["sgd", "clipped", "adamw"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("way", ["step", "synchronous"])
def test_both_devices_agree_over_random_steps_of_a_network(precision, optimizer, way, rng):
    invalid = rng.random(40) < 0.3
    cases = [
        Case(precision, where, optimizer, init_scale=64.0, max_scale=256.0, growth_interval=3)
        for where in ("cpu", "cuda")
    ]
    for seed, bad in enumerate(invalid):
        before = cases[1].written()
        for case in cases:
            case.batch(seed, invalid=bool(bad))
            assert case.done(way) == (not bad)
        if bad:
            for a, b in zip(before, cases[1].written(), strict=True):
                np.testing.assert_array_equal(a, b)
        flags = [to_numpy(case.scaler.is_invalid_array) for case in cases]
        np.testing.assert_array_equal(*flags)
    cpu, cuda = (case.scaler.state_dict() for case in cases)
    assert cpu == cuda
    assert cpu["skipped_steps"] == invalid.sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("way", ["step", "synchronous"])
def test_overflow_that_appears_only_in_the_update_counts(way, dtype):
    largest = float(ml_dtypes.finfo(device.DTYPES[dtype]).max)
    for where in ("cpu", "cuda"):
        for values, valid in (([0.0, largest / 2.1, -1.0], True), ([1.0, -largest, 0.0], False)):
            model = nn.Module()
            model.w = Parameter(np.ones(3), dtype, device=where, name="w")
            optimizer, scaler = optim.SGD(model, 0.5), amp.DynamicScaler(0.5, min_scale=0.25)
            loss = Given.apply(model.w, grad=place(np.array(values).astype(device.DTYPES[dtype]), where))
            if way == "step":
                scaler.step(optimizer, loss)
            else:
                scaler.scale(loss).backward()
                scaler.unscale(optimizer)
                assert scaler.adjust_scale_factor() == valid
                optimizer.step()
            assert to_numpy(scaler.is_invalid_array).tolist() == ([0, 1, 0] if valid else [1, 0, 1])
            assert (model.w.values() == 1).all() != valid
            assert scaler.scale_factor == (0.5 if valid else 0.25)


def test_find_invalid_of_cupy_and_dlpack_arrays(cupy):
    half = cupy.zeros((3, 5), np.float16)
    strided = cupy.zeros((4, 6), np.float64)
    strided[1, 1] = np.nan
    shifted = cupy.zeros(1001, np.float32)[1:]
    shifted[999] = np.inf
    last = cupy.zeros((2, 3, 4, 5), np.float32).transpose(0, 3, 1, 2)
    last[1, 4, 2, 3] = -np.inf

    class Dlpack:
        def __dlpack__(self, **options: Any) -> Any:
            return shifted.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return shifted.__dlpack_device__()

    arrays = [half, None, cupy.zeros((0, 3), np.float32), strided[::2, ::2], shifted, Dlpack(), last]
    flags = amp.find_invalid(arrays)
    assert device.is_cuda(flags)
    assert flags.get().tolist() == [1, 4, 0, 0, 0, 0, 1, 1, 1]
    assert amp.find_invalid(arrays[:4]).get().tolist() == [0, 4, 0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"arrays\[0\].*arrays\[1\]|cpu"):
        amp.find_invalid([half, np.zeros(3, np.float32)])


def test_find_invalid_of_torch_tensors():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    tensors = [torch.zeros(5, 7, device="cuda", dtype=kind) for kind in (torch.float32, torch.bfloat16, torch.float16)]
    tensors.append(torch.zeros(2, 3, 4, 4, device="cuda").to(memory_format=torch.channels_last))
    tensors[1][2, 3] = float("nan")
    tensors[3][1, 2, 3, 0] = float("-inf")
    assert amp.find_invalid(tensors).get().tolist() == [1, 1, 0, 1, 0, 1]
    parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
    (parameter * float("inf")).sum().backward()
    assert amp.find_invalid([parameter.grad, None]).get().tolist() == [1, 0, 1, 0]


def test_the_check_of_an_arena_is_one_launch_in_a_captured_graph(cupy):
    """The flags are right after every replay: the ticket is back at zero."""
    flat = cupy.zeros(100_000, np.float32)
    offsets = cupy.asarray(np.array([0, 5, 5, 70_000, 100_000], np.int64))
    flags, ticket = cupy.zeros(6, np.int32), finite.new_ticket(CUDA)
    stream = cupy.cuda.Stream(non_blocking=True)
    graphs: list[Any] = []
    with stream:
        finite.find_invalid(flat, offsets, flags, ticket=ticket)
        stream.synchronize()
        with capture(stream, graphs):
            finite.find_invalid(flat, offsets, flags, ticket=ticket)
        for place_, expected in ((None, [0, 4, 0, 0, 0, 0]), (69_999, [1, 2, 0, 0, 1, 0]), (None, [0, 4, 0, 0, 0, 0])):
            flat[...] = 0
            if place_ is not None:
                flat[place_] = np.inf
            graphs[0].launch(stream)
            stream.synchronize()
            assert flags.get().tolist() == expected
