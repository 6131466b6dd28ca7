"""The optimizer step, the commit of statistics and the scaler's rule on CUDA."""

import numpy as np
import pytest
from helpers import TOLERANCES, assert_close, bits, place, to_numpy
from step_cases import PlainScaler, Storage
from update_cases import RULES, Update, assert_updated, random_update

from flcuda import functional, nn, optim
from flcuda.device import DTYPES, cupy
from flcuda.ops import finite, optimizer


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_steps_as_on_the_cpu(dtype: str, nesterov: bool) -> None:
    host, card = Storage(dtype, "cpu"), Storage(dtype, "cuda")
    for _ in range(3):
        host.step(nesterov=nesterov)
        card.step(nesterov=nesterov)
    compute = "float64" if dtype == "float64" else "float32"
    names = ("master", "data", "velocity") if host.data is not host.master else ("master", "velocity")
    for name in names:
        wanted = getattr(host, name).astype(np.float64)
        assert_close(getattr(card, name), wanted, dtype if name == "data" else compute, name)
    if host.data is not host.master:
        np.testing.assert_array_equal(to_numpy(card.data), to_numpy(card.master).astype(card.data.dtype))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_plain_step_without_optional_arrays(dtype: str) -> None:
    host, card = Storage(dtype, "cpu", velocity=False), Storage(dtype, "cuda", velocity=False)
    for storage in (host, card):
        storage.step(momentum=0.0, weight_decay=0.0, inv_scale=None, flags=None)
    assert_close(card.master, host.master.astype(np.float64), "float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_an_invalid_step_writes_nothing_and_the_next_one_does(dtype: str) -> None:
    storage = Storage(dtype, "cuda")
    storage.grad[1302] = np.nan
    before = bits(storage.written())
    finite.find_invalid(storage.grad, storage.offsets, storage.flags)
    storage.step()
    assert bits(storage.written()) == before
    np.testing.assert_array_equal(storage.flags.get(), [1, 4, 0, 0, 0, 0, 1])
    storage.grad[1302] = 1
    finite.find_invalid(storage.grad, storage.offsets, storage.flags)
    storage.step()
    assert bits(storage.written()) != before


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_statistics_are_committed_or_taken_back(dtype: type) -> None:
    for flag in (None, 0, 1):
        running, pending = (place((start + np.arange(700)).astype(dtype), "cuda") for start in (0, 10))
        flags = None if flag is None else place(np.array([flag, 0], np.int32), "cuda")
        optimizer.commit_statistics(running, pending, flags)
        wanted = np.arange(700) + (0 if flag else 10)
        np.testing.assert_array_equal(running.get(), wanted)
        np.testing.assert_array_equal(pending.get(), wanted)


def test_scaler_against_a_plain_model() -> None:
    plain = PlainScaler(65536.0, 3, 1e-4, 65536.0)
    scale, inverse, counters = (
        place(a, "cuda") for a in (np.array(65536.0), np.array(2.0**-16), np.zeros(3, np.int64))
    )
    generator = np.random.default_rng(0)
    for phase in range(12):
        for invalid in generator.random(60) < (0.02, 0.5, 0.95)[phase % 3]:
            plain.update(bool(invalid))
            flags = place(np.array([invalid, 0], np.int32), "cuda")
            optimizer.scaler_update(scale, inverse, counters, flags, growth_interval=3)
            assert float(scale.get()) == plain.scale
            assert float(inverse.get()) == 1 / plain.scale
            assert counters.get().tolist() == plain.counters


def test_check_update_and_rule_are_captured_and_replayed() -> None:
    storage, expected = Storage("float16", "cuda"), Storage("float16", "cuda")
    scale, inverse, counters = (place(a, "cuda") for a in (np.array(1024.0), np.array(1 / 1024), np.zeros(3, np.int64)))
    storage.inv_scale = inverse

    def step() -> None:
        finite.find_invalid(storage.grad, storage.offsets, storage.flags)
        storage.step()
        optimizer.scaler_update(scale, inverse, counters, storage.flags)

    # compiles and loads everything before the capture, on a throw-away step
    Storage("float16", "cuda").step()
    finite.find_invalid(storage.grad, storage.offsets, storage.flags)
    optimizer.scaler_update(place(np.array(1.0), "cuda"), inverse.copy(), counters.copy(), storage.flags)
    stream = cupy().cuda.Stream(non_blocking=True)
    cupy().cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    expected.step()
    assert bits(storage.written()) == bits(expected.written())
    storage.grad[3] = np.inf
    cupy().cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    assert bits(storage.written()) == bits(expected.written())
    assert float(scale.get()) == 512
    assert counters.get().tolist() == [0, 1, 1]


# --- every rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_rule_at_any_shape_and_alignment(dtype: str, rule: str) -> None:
    generator = np.random.default_rng([6, RULES.index(rule), list(TOLERANCES).index(dtype)])
    updates = [random_update(generator, rule, dtype) for _ in range(40)]
    updates += [Update(rule, dtype, sizes, before=3, after=4) for sizes in ([], [0, 0])]
    updates += [Update(rule, dtype, [700] * 513), Update(rule, dtype, [1_500_000, 64, 64, 512, 777_777])]
    for update in updates:
        cards = [update.on("cuda") for _ in range(2)]
        for card in cards:
            card.run()
        assert_updated(cards[0], update)
        assert bits(cards[0].holders.values()) == bits(cards[1].holders.values())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_skipped_step_changes_no_bit(dtype: str, rule: str) -> None:
    update = Update(rule, dtype, [7, 0, 300_000, 64]).on("cuda")
    update.view("grad")[100] = np.nan
    before, steps = bits(update.holders.values()), update.small["steps"].get()
    finite.find_invalid(update.view("grad"), update.small["offsets"], update.small["flags"])
    update.run()
    optimizer.advance_steps(update.small["steps"], update.small["flags"])
    assert bits(update.holders.values()) == before
    np.testing.assert_array_equal(update.small["steps"].get(), steps)
    update.small["flags"][...] = 0
    update.run()
    optimizer.advance_steps(update.small["steps"], update.small["flags"])
    assert bits(update.holders.values()) != before
    np.testing.assert_array_equal(update.small["steps"].get(), steps + 1)


def test_more_elements_than_32_bits_count() -> None:
    size = 2**31 + 4097
    if cupy().cuda.runtime.memGetInfo()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    half = DTYPES["float16"]
    master, data, grad = (cupy().full(size, 1, dtype) for dtype in (np.float32, half, half))
    offsets = place(np.array([0, 2**31 + 5, size], np.int64), "cuda")
    decay = place(np.array([0, 1], np.float32), "cuda")
    optimizer.sgd_update(master, data, grad, None, offsets, decay, place(np.array(0.25), "cuda"), weight_decay=2.0)
    for a in (master, data):
        for part, wanted in ((slice(0, 2**31 + 5), 0.75), (slice(2**31 + 5, size), 0.25)):
            assert float(a[part].min()) == float(a[part].max()) == wanted


@pytest.mark.parametrize("count", [0, 1, 111, 1000])
def test_clip_factor(count: int, rng: np.random.Generator) -> None:
    sums = rng.random(count)
    norm = float(np.sqrt(sums.sum())) / 8
    for max_norm in (norm / 3 or 1.0, norm * 3 or 1.0, np.inf):
        for limit, valid in ((np.inf, True), (max(norm, 1e-300) / 2, norm == 0)):
            out, flags, inv_scale = (place(a, "cuda") for a in (np.zeros(1), np.zeros(3, np.int32), np.array(1 / 8)))
            optimizer.clip_factor(place(sums, "cuda"), inv_scale, max_norm, flags, out, limit=limit)
            assert flags.get().tolist() == [0 if valid else 1, 0, 0]
            np.testing.assert_allclose(out.get(), min(1.0, max_norm / norm) if valid and norm else 1.0, rtol=1e-14)
    for bad in (np.nan, np.inf):
        optimizer.clip_factor(place(np.array([1.0, bad]), "cuda"), None, 1.0, flags, out)
        assert (int(flags[0]), float(out[0])) == (1, 1.0)
        flags[...] = 0


# --- models -----------------------------------------------------------------------------------------------------------


MAKERS = {
    "sgd": lambda model: optim.SGD(model, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, max_norm=1.0),
    "dampened": lambda model: optim.SGD(model, 0.1, momentum=0.9, dampening=0.5, max_norm=1.0),
    "adam": lambda model: optim.Adam(model, 0.01, weight_decay=0.1, max_norm=1.0),
    "adamw": lambda model: optim.AdamW(model, 0.01, max_norm=1.0),
}


def network(precision: str, device: str) -> nn.Sequential:
    options = {"precision": precision, "device": device}
    draws = nn.Draws(1)
    return nn.Sequential(nn.Linear(17, 64, seed=draws, **options), nn.ReLU(), nn.Linear(64, 5, seed=draws, **options))


def set_gradients(model: nn.Module, seed: int) -> None:
    """The same on every device, which backwards would not give."""
    generator = np.random.default_rng(seed)
    for p in model.parameters():
        p.grad = place(generator.normal(size=p.shape).astype(p.dtype), p.device.kind)


def states(model: nn.Module, own: optim.Optimizer) -> list[np.ndarray]:
    arrays = [a for arena in model.arenas for a in (arena.master, arena.data)]
    return [to_numpy(a) for a in (*arrays, *(a for flats in own._states().values() for a in flats), own.steps)]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("precision", TOLERANCES)
def test_models_are_updated_as_on_the_cpu_and_resumed(precision: str, kind: str) -> None:
    models = [network(precision, device) for device in ("cpu", "cuda", "cuda")]
    owns = [MAKERS[kind](model) for model in models]
    for step in range(6):
        for model, own in zip(models[:2], owns[:2], strict=True):
            set_gradients(model, step)
            if step == 2:
                model.arenas[0].parameters[0].grad[0, 1] = np.inf
            own.step()
            own.zero_grad()
        if step == 3:
            models[2].load_state_dict(models[1].state_dict())
            owns[2].load_state_dict(owns[1].state_dict())
    for step in (4, 5):
        set_gradients(models[2], step)
        owns[2].step()
        owns[2].zero_grad()
    assert bits(states(models[1], owns[1])) == bits(states(models[2], owns[2]))
    tolerance = 1e-12 if precision == "float64" else 1e-5
    for p, q in zip(models[1].parameters(), models[0].parameters(), strict=True):
        np.testing.assert_allclose(p.values(), q.values(), rtol=tolerance, atol=tolerance)
    assert owns[1].steps.get().tolist() == owns[0].steps.tolist() == ([5] if owns[0].counts_steps else [0])


@pytest.mark.parametrize("kind", MAKERS)
def test_a_step_is_captured_and_replayed(kind: str) -> None:
    """Zero syncs: a captured stream refuses them. The learning rate and the step count change between replays."""
    captured, eager = network("float16", "cuda"), network("float16", "cuda")
    own, peer = MAKERS[kind](captured), MAKERS[kind](eager)
    for model, each in ((captured, own), (eager, peer)):
        set_gradients(model, 0)
        each.step()
    cupy().cuda.runtime.deviceSynchronize()
    stream = cupy().cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        own.step()
        graph = stream.end_capture()
    for step in range(1, 5):
        own.lr = peer.lr = 0.05 / step
        for model in (captured, eager):
            set_gradients(model, step)
            for p in model.parameters():
                p.target()  # copies the gradient to where the graph reads it
            if step == 3:
                model.arenas[0].grad[7] = np.nan
        peer.step()
        cupy().cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bits(states(captured, own)) == bits(states(eager, peer)), step


@pytest.mark.parametrize("kind", MAKERS)
def test_training_lowers_the_loss(kind: str, rng: np.random.Generator) -> None:
    model = network("float32", "cuda")
    own = MAKERS[kind](model)
    x, target = (place(a, "cuda") for a in (rng.normal(size=(64, 17)).astype(np.float32), rng.integers(0, 5, 64)))
    losses = []
    for _ in range(60):
        own.zero_grad()
        loss = functional.cross_entropy(model(x), target)
        loss.backward()
        own.step()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
