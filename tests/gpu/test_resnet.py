"""ResNet-34 on CUDA against PyTorch: exact in float64, and in the other precisions at most twice PyTorch's own error.

The oracle of all precisions is torchvision's ResNet-34 in float64 on the same GPU, on the same weights and images. With
FLCUDA_RESULTS set to a folder, the figures are also written there.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch_resnet  # noqa: E402

from flcuda import device, models, optim  # noqa: E402
from flcuda import functional as F  # noqa: E402

# PyTorch warns of its own switches and choices.
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore::UserWarning")]

# Large enough that every implementation has dozens of ReLUs that rounding flips: one flip decides no comparison.
SIZE = 128
BATCH = 32
BATCHES = 3
CLASSES = 1000
LOSS_SCALE = 1024.0
LIMIT = 2.0

try:
    from torchvision.models import resnet34 as torch_resnet34
except ImportError:
    torch_resnet34 = torch_resnet.resnet34


def record(name: str, figures: dict[str, Any]) -> None:
    print(f"\n{name}: {json.dumps(figures)}")
    folder = os.environ.get("FLCUDA_RESULTS")
    if folder:
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "torch_cudnn": torch.backends.cudnn.version(),
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"resnet34_{name}.json").write_text(json.dumps({**figures, **about}, indent=1) + "\n")


def batch(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((n, 3, SIZE, SIZE)).astype(np.float32), rng.integers(0, CLASSES, n)


def relative(ours: np.ndarray, oracle: np.ndarray) -> float:
    scale = float(np.linalg.norm(oracle))
    return float(np.linalg.norm(ours.astype(np.float64) - oracle)) / (scale or 1.0)


@contextlib.contextmanager
def torch_math(tf32: bool):
    """PyTorch's global switches, put back afterwards."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    saved = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32, matmul.allow_tf32 = tf32, tf32
    yield
    cudnn.allow_tf32, matmul.allow_tf32 = saved


def peer(state: dict[str, np.ndarray], dtype: "torch.dtype") -> "torch.nn.Module":
    return torch_resnet.load(torch_resnet34(num_classes=CLASSES).to(dtype), state).cuda()


def peer_gradients(model: "torch.nn.Module") -> dict[str, np.ndarray]:
    return {name: p.grad.double().cpu().numpy() for name, p in model.named_parameters()}


def test_float64_equals_pytorch_in_logits_loss_gradients_and_three_steps(rng):
    xp = device.cupy()
    ours = models.resnet34(precision="float64", device="cuda", seed=1)
    theirs = peer(ours.state_dict(), torch.float64)
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    optimizer = optim.SGD(ours, 0.01, **options)
    torch_optimizer = torch.optim.SGD(theirs.parameters(), 0.01, **options)
    errors: dict[str, float] = {}
    with torch_math(tf32=False):
        for step in range(3):
            x, target = batch(rng, 4)
            optimizer.zero_grad()
            torch_optimizer.zero_grad()
            logits = ours(xp.asarray(x))
            loss = F.cross_entropy(logits, xp.asarray(target), label_smoothing=0.1)
            loss.backward()
            their_logits = theirs(torch.from_numpy(x).cuda().double())
            their_loss = torch.nn.functional.cross_entropy(
                their_logits, torch.from_numpy(target).cuda(), label_smoothing=0.1
            )
            their_loss.backward()
            errors[f"logits {step}"] = relative(logits.numpy(), their_logits.detach().cpu().numpy())
            errors[f"loss {step}"] = relative(loss.numpy(), their_loss.detach().cpu().numpy())
            oracle = peer_gradients(theirs)
            errors[f"gradients {step}"] = max(relative(p.grad.get(), oracle[n]) for n, p in ours.named_parameters())
            optimizer.step()
            torch_optimizer.step()
    expected = theirs.state_dict()
    state = ours.state_dict()
    assert list(state) == list(expected)
    errors["state after 3 steps"] = max(relative(state[key], expected[key].cpu().numpy()) for key in state)
    record("float64", errors)
    assert max(errors.values()) < 1e-9


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    """Weights that all precisions share, and for each of a few batches the images and float64 gradients."""
    state = models.resnet34(device="cpu", seed=2).state_dict()
    batches = [oracle_of(state, *batch(np.random.default_rng(seed), BATCH)) for seed in range(BATCHES)]
    return {"state": state, "batches": batches}


def oracle_of(state: dict[str, np.ndarray], x: np.ndarray, target: np.ndarray) -> dict[str, Any]:
    model = peer(state, torch.float64)
    loss = torch.nn.functional.cross_entropy(
        model(torch.from_numpy(x).cuda().double()), torch.from_numpy(target).cuda()
    )
    loss.backward()
    return {"x": x, "target": target, "loss": float(loss.detach()), "gradients": peer_gradients(model)}


def pytorchs(
    state: dict[str, np.ndarray], given: dict[str, Any], precision: str
) -> tuple[float, dict[str, np.ndarray]]:
    """One backward in PyTorch's usual way: autocast over float32 weights and channels-last for 16 bits."""
    model = peer(state, torch.float32)
    x, target = torch.from_numpy(given["x"]).cuda(), torch.from_numpy(given["target"]).cuda()
    autocast: Any = contextlib.nullcontext()
    if precision != "float32":
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    if precision in ("float16", "bfloat16"):
        autocast = torch.autocast("cuda", getattr(torch, precision))
    with torch_math(tf32=precision == "tf32"):
        with autocast:
            loss = torch.nn.functional.cross_entropy(model(x), target)
        scale = LOSS_SCALE if precision == "float16" else 1.0
        (loss * scale).backward()
    return float(loss.detach()), {name: g / scale for name, g in peer_gradients(model).items()}


def flcudas(state: dict[str, np.ndarray], given: dict[str, Any], precision: str) -> tuple[float, dict[str, np.ndarray]]:
    xp = device.cupy()
    model = models.resnet34(precision=precision, device="cuda", seed=9)
    model.load_state_dict(state)
    loss = F.cross_entropy(model(xp.asarray(given["x"])), xp.asarray(given["target"]))
    scale = LOSS_SCALE if precision == "float16" else 1.0
    (loss * scale).backward()
    return float(loss), {n: p.grad.get().astype(np.float64) / scale for n, p in model.named_parameters()}


@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16"])
def test_gradient_errors_are_at_most_twice_pytorchs(oracle, precision):
    figures: dict[str, Any] = {}
    for name, run in (("flcuda", flcudas), ("pytorch", pytorchs)):
        squares: dict[str, list[float]] = {}
        losses = []
        for given in oracle["batches"]:
            loss, gradients = run(oracle["state"], given, precision)
            losses.append(abs(loss - given["loss"]) / given["loss"])
            for key, value in given["gradients"].items():
                squares.setdefault(key, []).append(relative(gradients[key], value) ** 2)
        errors = {key: float(np.sqrt(np.mean(value))) for key, value in squares.items()}
        worst = max(errors, key=errors.__getitem__)
        figures[name] = {
            "median": float(np.median(list(errors.values()))),
            "largest": errors[worst],
            "where": worst,
            "loss": max(losses),
        }
    figures["ratio"] = {key: figures["flcuda"][key] / figures["pytorch"][key] for key in ("median", "largest")}
    figures["what"] = (
        f"relative L2 error of a parameter's gradient against float64, rms of {BATCHES} batches of {BATCH}"
    )
    record(precision, figures)
    assert np.isfinite(list(figures["ratio"].values())).all()
    assert figures["ratio"]["median"] <= LIMIT
    assert figures["ratio"]["largest"] <= LIMIT
