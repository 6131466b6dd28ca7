"""Trains a ResNet with flcuda, as the benchmarks ask (see `steps.py`): its own side, in a process like its peers'.

Modes: "captured", the step in one CUDA graph by `flcuda.capture`; "eager", the same step as it is.

Options: "wide", the finder's effort; "lean", at most so much workspace for a convolution as LEAN_BYTES says;
"deterministic".

Run: PYTHONPATH=. python bench/peers/flcuda_resnet.py < request.json
"""

import time

BEGAN = time.perf_counter()

import contextlib  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import steps  # noqa: E402

import flcuda  # noqa: E402
from flcuda import device as devices  # noqa: E402
from flcuda import functional as F  # noqa: E402
from flcuda import models, nn  # noqa: E402
from flcuda.amp import DynamicScaler  # noqa: E402
from flcuda.autograd import Tensor, no_grad  # noqa: E402
from flcuda.optim import SGD  # noqa: E402

LEAN_BYTES = 32 << 20


def policy_of(options: tuple[str, ...]) -> dict[str, Any]:
    """Gives what the options change in the finder's policy."""
    changes: dict[str, Any] = {}
    if "wide" in options:
        changes["effort"] = "wide"
    if "lean" in options:
        changes["workspace_limit"] = LEAN_BYTES
    if "deterministic" in options:
        changes["deterministic"] = True
    return changes


def model_of(request: steps.Request, seed: int = 0) -> nn.Module:
    """Makes the network, in training mode, with the initial values of a seed."""
    arguments: dict[str, Any] = {"precision": request.precision, "device": request.device, "seed": seed}
    common = (request.classes, request.in_channels, request.stem)
    if request.network == "resnet10":
        return models.ResNet(steps.BLOCKS["resnet10"], *common, **arguments)
    make = getattr(models, request.network)
    return make(*common, **arguments)


class Peak:
    """Counts the bytes in use of CuPy's pools, whichever they are, and their peak; of this thread alone."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0
        self.peak_all = 0

    def malloc(self, nbytes: int, address: int) -> None:
        # CuPy tells what failed too, with the address 0.
        if not address:
            return
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        self.peak_all = max(self.peak_all, self.used)

    def free(self, nbytes: int) -> None:
        self.used -= nbytes

    def restart(self) -> None:
        self.peak = self.used

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Counts inside a `with` statement; only one can be open at a time."""
        peak = self

        class Hook(devices.cupy().cuda.MemoryHook):
            name = "peak"

            def malloc_postprocess(self, *, mem_size: int, mem_ptr: int, **_: Any) -> None:
                peak.malloc(mem_size, mem_ptr)

            def free_postprocess(self, *, mem_size: int, **_: Any) -> None:
                peak.free(mem_size)

        with Hook():
            yield


class Training:
    """A model in training; see `steps.Side`.

    Args:
        request: what is asked.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, request: steps.Request) -> None:
        if request.how not in ("captured", "eager"):
            raise ValueError(f"{request.how!r} is neither captured nor eager")
        self.request = request
        self.device = devices.resolve(request.device)
        self.peak = Peak()
        self.watch = contextlib.ExitStack()
        if self.device.kind == "cuda" and request.curve is None:
            self.watch.enter_context(self.peak.watching())
        self.changes = policy_of(request.options)
        self.model = model_of(request)
        self.optimizer = SGD(self.model, request.lr, momentum=steps.MOMENTUM, weight_decay=steps.WEIGHT_DECAY)
        self.scaler = DynamicScaler(init_scale=steps.INIT_SCALE) if request.precision == "float16" else None
        self.run = flcuda.capture(self._step) if request.how == "captured" else self._step

    def settings(self) -> steps.Answer:
        with flcuda.policy(**self.changes) as policy:
            told = policy.to_json()
        cuda = self.device.kind == "cuda"
        return {
            "flcuda": flcuda.__version__,
            "cupy": devices.cupy().__version__ if cuda else None,
            "cudnn": flcuda.cudnn.load().version if cuda else None,
            "device": devices.device_model(self.device)["name"],
            "policy": told,
            "layout": nn.precision_of(self.request.precision).layout,
            "scaler": self.scaler is not None,
        }

    def put(self, images: Any, labels: Any) -> tuple[Any, Any]:
        layout = nn.precision_of(self.request.precision).layout
        return devices.to_layout(self.device.xp.asarray(images), layout), self.device.xp.asarray(labels)

    def _step(self, x: Any, y: Any) -> Tensor:
        loss = F.cross_entropy(self.model(x), y)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.scaler.step(self.optimizer, loss)
        return loss

    def step(self, batch: tuple[Any, Any]) -> Any:
        with flcuda.policy(**self.changes):
            return self.run(*batch)

    def value(self, loss: Any) -> float:
        return float(loss.data if isinstance(loss, Tensor) else loss)

    def wait(self) -> None:
        devices.synchronize(self.device)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)

    def scale(self) -> float | None:
        return None if self.scaler is None else float(self.scaler.state_dict()["scale"])

    def settled(self) -> None:
        if self.device.kind == "cuda":
            # What the searches used lies in the pool.
            devices.cupy().get_default_memory_pool().free_all_blocks()
        self.peak.restart()

    def warm(self) -> None:
        self.watch.close()

    def memory(self) -> steps.Answer:
        if self.device.kind != "cuda":
            return {"allocated_peak": None, "allocated_peak_all": None, "device_used": None}
        free, total = devices.cupy().cuda.runtime.memGetInfo()
        return {
            "allocated_peak": self.peak.peak,
            "allocated_peak_all": self.peak.peak_all,
            "device_used": total - free,
        }

    def convolve(self, x: Any, w: Any) -> Any:
        precision = nn.precision_of(self.request.precision)
        operands = (precision.enter(F.as_tensor(self.device.xp.asarray(a))) for a in (x, w))
        with flcuda.policy(**self.changes), no_grad():
            y = F.conv2d(*operands, math=precision.math).data
        y = y.astype(np.float32)
        return y.get() if self.device.kind == "cuda" else y


if __name__ == "__main__":
    steps.serve(Training, BEGAN)
