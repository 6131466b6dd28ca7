"""Layers: arguments, precision, modes, statistics without an optimizer, state dicts, copies."""

import copy
import math
import pickle

import ml_dtypes
import numpy as np
import pytest

from flcuda import device as devices
from flcuda import functional as F
from flcuda import nn, optim
from flcuda.autograd import Tensor
from flcuda.parameters import Parameter

CPU = {"device": "cpu"}


def network(precision: str = "float32", seed: int = 0) -> nn.Sequential:
    options = {"precision": precision, "device": "cpu"}
    draws = nn.Draws(seed)
    return nn.Sequential(
        nn.Conv2D(3, 4, 3, padding=1, seed=draws, **options),
        nn.BatchNorm2D(4, **options),
        nn.ReLU(),
        nn.Sequential(nn.ConvTranspose2D(4, 4, 2, 2, seed=draws, **options), nn.AvgPool2D(2)),
        nn.MaxPool2D(2),
        nn.Dropout(0.25, device="cpu", seed=draws),
        nn.Flatten(),
        nn.Linear(36, 5, seed=draws, **options),
    )


def test_any_seed_of_64_bits_is_one():
    for seed in (0, 2**63, 2**64 - 1):
        draws = nn.Draws(seed)
        assert draws.seed == seed
        nn.Dropout(0.25, device="cpu", seed=draws)


@pytest.mark.parametrize("precision", list(nn.PRECISIONS))
def test_a_network_in_every_precision(rng, precision):
    model = network(precision)
    kind = nn.PRECISIONS[precision]
    x = rng.standard_normal((2, 3, 6, 6)).astype(np.float32)
    y = model(x)
    assert (y.shape, y.dtype.name) == ((2, 5), kind.dtype)
    conv = model[0](x)
    assert (conv.dtype.name, devices.memory_layout(conv.data)) == (kind.dtype, kind.layout)
    assert devices.memory_layout(model[0].weight.data) == kind.layout
    assert model[0].weight.shape == (4, 3, 3, 3)
    assert model[1].weight.dtype.name == model[1].bn.running_mean.dtype.name == kind.master
    F.cross_entropy(y, np.array([1, 2])).backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == p.dtype, name
        assert p.grad.astype(np.float32).any() or name == "0.bias", name  # before a batch norm: 0 but for rounding
    for p, q in zip(model.parameters(), network("float64").parameters(), strict=True):
        np.testing.assert_allclose(p.values(), q.values(), rtol=1e-7)  # the same whatever the precision


def test_input_is_converted_once_and_integers_are_refused(rng, monkeypatch):
    converted = []
    original = F.Convert.forward
    monkeypatch.setattr(
        F.Convert, "forward", lambda self, *a, **k: converted.append(a[0].dtype) or original(self, *a, **k)
    )
    model = network("bfloat16")
    model(rng.standard_normal((2, 3, 6, 6)))
    assert converted == [np.float64]
    model(Tensor(devices.to_layout(rng.standard_normal((2, 3, 6, 6)).astype(ml_dtypes.bfloat16), "nhwc")))
    assert len(converted) == 1
    x = Tensor(rng.standard_normal((2, 3, 6, 6)).astype(np.float32), requires_grad=True)
    F.cross_entropy(model(x), np.array([1, 2])).backward()
    assert x.grad.dtype == np.float32
    with pytest.raises(TypeError, match=r"x: has dtype uint8; .*floating"):
        model(np.zeros((2, 3, 6, 6), np.uint8))
    with pytest.raises(TypeError, match="x: "):
        model([[1.0]])


def test_one_channel_becomes_channels_last_too(rng):
    x = rng.standard_normal((2, 1, 6, 5)).astype(np.float32)
    layer = nn.Conv2D(1, 4, 3, precision="float16", seed=0, **CPU)
    y = layer(x)
    assert devices.memory_layout(y.data) == "nhwc"
    oracle = F.conv2d(x, layer.weight.master, layer.bias.master)
    np.testing.assert_allclose(y.data, oracle.data, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation"),
    [(7, 3, 1, 1), (8, 4, 1, 1), (9, 2, 1, 3), (7, 3, 2, 1), (8, 3, 2, 1), (10, 5, 3, 2)],
)
def test_same_padding(rng, size, kernel, stride, dilation):
    layer = nn.Conv2D(2, 3, kernel, stride, "same", dilation, seed=0, **CPU)
    x = Tensor(rng.standard_normal((1, 2, size, size)).astype(np.float32))
    y = layer(x)
    assert y.shape[2:] == (math.ceil(size / stride),) * 2
    reach = (kernel - 1) * dilation
    if stride == 1:
        padding = [(reach // 2, reach - reach // 2)] * 2
    else:
        padding = max(0, (reach - (size % stride or stride) + 2) // 2)
    explicit = F.conv2d(x, layer.weight, layer.bias, stride=stride, padding=padding, dilation=dilation)
    np.testing.assert_array_equal(y.data, explicit.data)


def test_padding_pairs(rng):
    layer = nn.Conv2D(2, 3, 3, padding=((0, 2), (1, 0)), seed=0, **CPU)
    x = rng.standard_normal((1, 2, 5, 6)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, 0), (0, 2), (1, 0)))
    np.testing.assert_allclose(layer(x).data, F.conv2d(padded, layer.weight, layer.bias).data, rtol=1e-5, atol=1e-6)


def test_conv_transpose_undoes_the_shape(rng):
    x = rng.standard_normal((1, 4, 9, 12)).astype(np.float32)
    y = nn.Conv2D(4, 6, 3, (2, 3), 1, groups=2, seed=0, **CPU)(x)
    layer = nn.ConvTranspose2D(6, 4, 3, (2, 3), 1, output_padding=(0, 2), groups=2, seed=0, **CPU)
    assert layer.weight.shape == (6, 2, 3, 3)
    assert layer(y).shape == x.shape


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: nn.Conv2D(0, 4, 3), ValueError, "in_channels: 0"),
        (lambda: nn.Conv2D(3, -1, 3), ValueError, "out_channels: -1"),
        (lambda: nn.Conv2D(3, 4.0, 3), TypeError, "out_channels: 4.0"),
        (lambda: nn.Conv2D(3, True, 3), TypeError, "out_channels: True"),
        (lambda: nn.Conv2D(3, 4, 0), ValueError, "kernel_size: 0"),
        (lambda: nn.Conv2D(3, 4, (3, 3, 3)), ValueError, r"kernel_size: \(3, 3, 3\)"),
        (lambda: nn.Conv2D(3, 4, "3"), TypeError, "kernel_size: '3'"),
        (lambda: nn.Conv2D(3, 4, 3, stride=0), ValueError, "stride: 0"),
        (lambda: nn.Conv2D(3, 4, 3, padding=-1), ValueError, "padding: -1"),
        (lambda: nn.Conv2D(3, 4, 3, padding=((1, 1), (1, -2))), ValueError, "padding: -2"),
        (lambda: nn.Conv2D(3, 4, 3, padding=(1, 1, 1)), ValueError, r"padding: \(1, 1, 1\)"),
        (lambda: nn.Conv2D(3, 4, 3, padding="valid"), ValueError, "padding: 'valid'"),
        (lambda: nn.Conv2D(3, 4, 3, padding=1.5), TypeError, "padding: 1.5"),
        (lambda: nn.Conv2D(3, 4, 3, dilation=(1, 0)), ValueError, "dilation: 0"),
        (lambda: nn.Conv2D(4, 6, 3, groups=0), ValueError, "groups: 0"),
        (lambda: nn.Conv2D(4, 6, 3, groups=3), ValueError, "groups: 3 .*in_channels 4"),
        (lambda: nn.Conv2D(6, 4, 3, groups=3), ValueError, "groups: 3 .*out_channels 4"),
        (lambda: nn.Conv2D(3, 4, 3, precision="fp16"), ValueError, "precision: 'fp16'"),
        (lambda: nn.Conv2D(3, 4, 3, device="gpu"), ValueError, "device: 'gpu'"),
        (lambda: nn.Conv2D(3, 4, 3, seed=-1), ValueError, "seed: -1"),
        (lambda: nn.Conv2D(3, 4, 3, seed=1 << 64), ValueError, "seed: "),
        (lambda: nn.ConvTranspose2D(4, 4, 3, 2, output_padding=2), ValueError, "output_padding"),
        (lambda: nn.ConvTranspose2D(4, 4, 3, padding="same"), TypeError, "padding: 'same'"),
        (lambda: nn.BatchNorm2D(0), ValueError, "num_features: 0"),
        (lambda: nn.BatchNorm2D(3, eps=-1e-5), ValueError, "eps: -1e-05"),
        (lambda: nn.BatchNorm2D(3, momentum=1.5), ValueError, "momentum: 1.5"),
        (lambda: nn.BatchNorm2D(3, momentum="0.1"), TypeError, "momentum: '0.1'"),
        (lambda: nn.Linear(0, 3), ValueError, "in_features: 0"),
        (lambda: nn.Linear(3, 0), ValueError, "out_features: 0"),
        (lambda: nn.MaxPool2D(2, 0), ValueError, "stride: 0"),
        (lambda: nn.MaxPool2D(2, padding=2), ValueError, r"padding: \(2, 2\)"),
        (lambda: nn.AvgPool2D(-1), ValueError, "kernel_size: -1"),
        (lambda: nn.Dropout(-0.1), ValueError, "p: -0.1"),
        (lambda: nn.Dropout(math.nan), ValueError, "p: nan"),
        (lambda: nn.Sequential(nn.ReLU(), F.relu), TypeError, "modules: entry 1"),
    ],
)
def test_bad_arguments(make, kind, match):
    with pytest.raises(kind, match=match):
        make()


def test_bad_input(rng):
    layer = nn.Conv2D(3, 4, 3, seed=0, **CPU)
    with pytest.raises(ValueError, match="x_shape"):
        layer(np.zeros((1, 2, 5, 5), np.float32))
    with pytest.raises(ValueError, match="larger than the padded input"):
        layer(np.zeros((1, 3, 2, 5), np.float32))
    with pytest.raises(ValueError, match=r"x: shape \(3, 5, 5\)"):
        layer(np.zeros((3, 5, 5), np.float32))
    with pytest.raises(ValueError, match=r"weight.*\(3,\)|\(4,\)"):
        nn.BatchNorm2D(4, **CPU)(np.zeros((2, 3, 2, 2), np.float32))


# --- initial values ---------------------------------------------------------------------------------------------------


def test_initial_values_follow_the_seed_and_pytorchs_bounds():
    a, b, c = (nn.Conv2D(64, 32, 3, groups=4, seed=s, **CPU) for s in (5, 5, 6))
    np.testing.assert_array_equal(a.weight.data, b.weight.data)
    assert (a.weight.data != c.weight.data).mean() > 0.99
    bound = 1 / math.sqrt(16 * 9)
    for p in (a.weight, a.bias):
        assert abs(p.data).max() <= bound
    assert abs(a.weight.data).max() > 0.99 * bound
    assert abs(a.weight.data.std() / (bound / math.sqrt(3)) - 1) < 0.02
    draws = nn.Draws(5)
    first, second = (nn.Linear(100, 50, seed=draws, **CPU) for _ in range(2))
    assert (first.weight.data != second.weight.data).mean() > 0.99
    w = nn.fan_out_normal(nn.Draws(1), (64, 32, 3, 3))
    assert abs(w.std() / math.sqrt(2 / (64 * 9)) - 1) < 0.02
    assert abs(w.mean()) < 0.002
    assert nn.Draws(None).seed != nn.Draws(None).seed


def test_dropouts_of_one_model_drop_differently():
    draws = nn.Draws(3)
    a, b = nn.Dropout(seed=draws, **CPU), nn.Dropout(seed=draws, **CPU)
    x = np.ones((50, 50), np.float32)
    first = a(x).data
    assert 0.3 < (first != b(x).data).mean() < 0.7
    assert (a(x).data != first).any()
    again = nn.Dropout(seed=nn.Draws(3), **CPU)
    np.testing.assert_array_equal(again(x).data, first)
    again.eval()
    np.testing.assert_array_equal(again(x).data, x)


# --- modes and statistics ---------------------------------------------------------------------------------------------


def test_train_and_eval_reach_every_module():
    model = network()
    assert model.eval() is model
    assert not any(module.training for _, module in model.named_modules())
    assert model.train() is model
    assert all(module.training for _, module in model.named_modules())


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("built", [False, True])
def test_eval_does_not_drop_statistics_of_forwards_without_an_optimizer(rng, momentum, built):
    layer = nn.BatchNorm2D(3, momentum=momentum, **CPU)
    if built:
        assert layer.arenas
    batches = [rng.standard_normal((4, 3, 5, 5)).astype(np.float32) + 2 for _ in range(3)]
    mean = np.zeros(3)
    for k, x in enumerate(batches, 1):
        layer(x)
        f = momentum or 1 / k
        mean = (1 - f) * mean + f * x.mean(axis=(0, 2, 3))
    assert not layer.bn.running_mean.any()  # pending so far
    layer.eval()
    np.testing.assert_allclose(layer.bn.running_mean, mean, rtol=1e-5)
    assert layer.bn.num_batches_tracked.tolist() == [3]
    y = layer(batches[0])
    expected = (batches[0] - layer.bn.running_mean[:, None, None]) / np.sqrt(layer.bn.running_var + 1e-5)[:, None, None]
    np.testing.assert_allclose(y.data, expected, rtol=1e-4, atol=1e-5)
    assert layer.bn.num_batches_tracked.tolist() == [3]


def test_state_dict_commits_and_discard_forgets(rng):
    layer = nn.BatchNorm2D(3, **CPU)
    x = rng.standard_normal((4, 3, 5, 5)).astype(np.float32)
    layer(x)
    layer.discard_statistics()
    assert not layer.state_dict()["running_mean"].any()
    layer(x)
    state = layer.state_dict()
    np.testing.assert_allclose(state["running_mean"], 0.1 * x.mean(axis=(0, 2, 3)), rtol=1e-4, atol=1e-6)
    assert state["num_batches_tracked"] == 1
    assert state["num_batches_tracked"].shape == ()


# --- names and state dicts --------------------------------------------------------------------------------------------


def test_names():
    model = network()
    parameters = [name for name, _ in model.named_parameters()]
    assert parameters == [
        *("0.weight", "0.bias", "1.weight", "1.bias", "3.0.weight", "3.0.bias", "7.weight", "7.bias"),
    ]
    assert [name for name, _ in model.named_buffers()] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(model.state_dict())[2:7] == ["1.weight", "1.bias", *(name for name, _ in model.named_buffers())]
    assert len(model) == 8
    assert model[-1] is list(model)[7]
    assert len(list(model.parameters())) == 8


def test_shared_modules_have_one_parameter_and_both_keys():
    layer = nn.Linear(3, 3, seed=0, **CPU)
    model = nn.Sequential(layer, layer)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert len(model.arenas[0].parameters) == 2


def test_modules_in_a_list_are_an_error():
    class Lost(nn.Module):
        def __init__(self) -> None:
            self.layers = [nn.ReLU()]

    with pytest.raises(TypeError, match=r"Lost\.layers: .*Sequential"):
        list(Lost().named_parameters())


@pytest.mark.parametrize("kind", [dict, list, tuple])
@pytest.mark.parametrize("part", ["module", "parameter"])
def test_modules_and_parameters_in_containers_are_an_error(kind, part):
    value = nn.ReLU() if part == "module" else Parameter(np.ones(2), **CPU)
    model = nn.Sequential(nn.ReLU())
    model.lost = {"a": value} if kind is dict else kind([value])
    with pytest.raises(TypeError, match=rf"Sequential\.lost: .* in a {kind.__name__}"):
        list(model.named_parameters())
    model.lost = {"a": 1} if kind is dict else kind([1])
    assert list(model.named_parameters()) == []


def test_loading_a_part_keeps_the_pending_statistics_of_the_rest(rng):
    model = nn.Sequential(nn.BatchNorm2D(3, **CPU), nn.BatchNorm2D(3, **CPU))
    assert len(model.statistics) == 1
    model(rng.standard_normal((4, 3, 2, 2)).astype(np.float32) + 3)
    model[0].load_state_dict(nn.BatchNorm2D(3, **CPU).state_dict())
    model.eval()
    assert model[0].bn.num_batches_tracked.tolist() == [0]
    assert model[1].bn.num_batches_tracked.tolist() == [1]
    assert not model[0].bn.running_mean.any()
    assert model[1].bn.running_mean.all()


def test_a_batch_norm_uses_the_parameters_that_it_is_given(rng):
    first, second = nn.BatchNorm2D(3, **CPU), nn.BatchNorm2D(3, **CPU)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert len(list(model.parameters())) == 3
    first.weight.write(np.full(3, 2.0))
    x = rng.standard_normal((64, 3)).astype(np.float32)
    np.testing.assert_allclose(model(x).data.std(0), 2.0, rtol=1e-3)
    optimizer = optim.SGD(model, 0.1)
    F.cross_entropy(model(x), np.zeros(64, np.int64)).backward()
    before = second.bias.values()
    optimizer.step()
    assert (second.bias.values() != before).all()


def test_frozen_parameters_stay_frozen_in_a_copy():
    model = nn.Linear(3, 2, **CPU)
    model.bias.requires_grad = False
    twin = copy.deepcopy(model)
    assert twin.weight.requires_grad
    assert not twin.bias.requires_grad


@pytest.mark.parametrize("precision", list(nn.PRECISIONS))
@pytest.mark.parametrize("built", [False, True])
def test_state_dicts_go_round(rng, precision, built):
    model, other = network(precision, seed=1), network(precision, seed=2)
    if built:
        arenas = other.arenas
        data = [p.data for p in other.parameters()]
    model(rng.standard_normal((4, 3, 6, 6)))
    state = model.state_dict()
    for key, value in state.items():
        if key.endswith("num_batches_tracked"):
            assert value.dtype == np.int64
        else:
            assert value.dtype.name == nn.PRECISIONS[precision].master
            assert value.flags.c_contiguous
    assert other.load_state_dict(state) == ((), ())
    for key, value in other.state_dict().items():
        np.testing.assert_array_equal(value, state[key])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(p.data, q.data)
    if built:
        assert other.arenas is arenas
        assert all(p.data is d for p, d in zip(other.parameters(), data, strict=True))
    np.testing.assert_array_equal(other[1].bn.pending_mean, other[1].bn.running_mean)
    state["0.weight"][...] = 0  # a copy
    assert model.state_dict()["0.weight"].any()


def test_loading_lists_all_faults_and_writes_nothing(rng):
    model = network()
    before = model.state_dict()
    state = {key: value + 1 for key, value in before.items()}
    del state["0.bias"], state["1.running_var"]
    state["head.weight"] = np.zeros(3)
    state["7.weight"] = np.zeros((36, 5))
    with pytest.raises(ValueError, match="state: ") as error:
        model.load_state_dict(state)
    message = str(error.value)
    assert "missing keys: 0.bias, 1.running_var" in message
    assert "unexpected keys: head.weight" in message
    assert "7.weight: shape (36, 5) where the model has (5, 36)" in message
    state["7.weight"] = before["7.weight"]
    for bad in (["a"], np.array(["a"]), None):
        with pytest.raises(TypeError, match=r"3\.0\.weight"):
            model.load_state_dict({**state, "3.0.weight": bad}, strict=False)
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, before[key])
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (("0.bias", "1.running_var"), ("head.weight",))
    after = model.state_dict()
    np.testing.assert_array_equal(after["0.bias"], before["0.bias"])
    np.testing.assert_array_equal(after["0.weight"], before["0.weight"] + 1)


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("built", [False, True])
def test_a_copy_is_whole_and_independent(rng, precision, copied, built):
    model = network(precision)
    x = rng.standard_normal((4, 3, 6, 6)).astype(np.float32)
    if built:
        assert model.arenas
    model(x)  # pending statistics and a dropout counter travel too
    twin = copied(model)
    assert twin[1].weight is twin[1].bn.weight
    assert isinstance(twin[1].weight, Parameter)
    np.testing.assert_array_equal(twin(x).data, model(x).data)
    expected = model.state_dict()
    for key, value in twin.state_dict().items():
        np.testing.assert_array_equal(value, expected[key])
    for arena in twin.arenas:
        arena.master[...] = 0
        arena.data[...] = 0
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, expected[key])
    for a, b in zip(model.arenas, twin.arenas, strict=True):
        assert [s.name for s in a.segments] == [s.name for s in b.segments]


def test_a_shared_module_stays_shared_in_a_copy():
    layer = nn.Linear(3, 3, seed=0, **CPU)
    twin = copy.deepcopy(nn.Sequential(layer, layer))
    assert twin[0] is twin[1]
