"""Trains a ResNet with PyTorch, as the benchmarks ask (see `steps.py`).

Modes:

    eager             as it is written; float16 and bfloat16 by autocast, float16 with GradScaler
    cuda-graph        the whole step as one CUDA graph; a batch is copied into its input
    compiled          torch.compile of model and loss
    compiled-graphs   the same, mode "reduce-overhead": with CUDA graphs
    max-autotune      the same, mode "max-autotune": with CUDA graphs, and kernels that are searched for

Options: "nchw" and "nhwc", the layout (by default nchw in float32 and nhwc, that is channels-last, otherwise);
"limit0": cuDNN's benchmark tries every plan, not ten; "legacy": the process was started with
TORCH_CUDNN_V8_API_DISABLED=1, so that PyTorch asks cuDNN's legacy API, and says so here to be held to it.

cuDNN's benchmark mode is always on, SGD is the fused one, and the model is torchvision's (its ReLU works in place).

Run: python bench/peers/torch_resnet.py < request.json
"""

import time

BEGAN = time.perf_counter()

import contextlib  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import steps  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

HOWS = ("eager", "cuda-graph", "compiled", "compiled-graphs", "max-autotune")
COMPILE_MODES = {"compiled": None, "compiled-graphs": "reduce-overhead", "max-autotune": "max-autotune"}
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LEGACY = "TORCH_CUDNN_V8_API_DISABLED"
GRAPH_WARMUP = 3


# --- torchvision's ResNets, for machines without torchvision ----------------------------------------------------------


def convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    """What the two kinds of block share: the shortcut, and what follows the addition."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.layers(in_channels, channels, stride)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels)
            )

    def layers(self, in_channels: int, channels: int, stride: int) -> None:
        raise NotImplementedError

    def main(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.main(x)
        y += x if self.downsample is None else self.downsample(x)
        return F.relu(y, inplace=True)


class BasicBlock(Block):
    def layers(self, in_channels: int, channels: int, stride: int) -> None:
        self.conv1 = convolution(in_channels, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = convolution(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)

    def main(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return self.bn2(self.conv2(y))


class BottleneckBlock(Block):
    expansion = 4

    def layers(self, in_channels: int, channels: int, stride: int) -> None:
        self.conv1 = convolution(in_channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = convolution(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = convolution(channels, channels * 4, 1)
        self.bn3 = nn.BatchNorm2d(channels * 4)

    def main(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return self.bn3(self.conv3(y))


class ResNet(nn.Module):
    """torchvision's network, with its keys and initial values.

    Args:
        blocks: how many in each stage.
        bottleneck: of which kind.
        classes: of the last layer.
        in_channels: of the images.
        stem: "imagenet", or "small" for images of some 32 pixels.
    """

    def __init__(self, blocks: tuple[int, ...], bottleneck: bool, classes: int, in_channels: int, stem: str) -> None:
        super().__init__()
        block = BottleneckBlock if bottleneck else BasicBlock
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = convolution(in_channels, 64, kernel, stride)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        channels = 64
        for stage, count in enumerate(blocks):
            parts = []
            for place in range(count):
                parts.append(block(channels, 64 << stage, 2 if stage and not place else 1))
                channels = (64 << stage) * block.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*parts))
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


# --- the step ---------------------------------------------------------------------------------------------------------


class Training:
    """A model in training; see `steps.Side`.

    Args:
        request: what is asked.

    Raises:
        ValueError: an unknown mode, or "legacy" without the variable.
    """

    def __init__(self, request: steps.Request) -> None:
        if request.how not in HOWS:
            raise ValueError(f"{request.how!r} is none of {', '.join(HOWS)}")
        self.legacy = os.environ.get(LEGACY) == "1"
        if self.legacy != ("legacy" in request.options):
            raise ValueError(f"{LEGACY} is {os.environ.get(LEGACY)!r} and the options are {request.options}")
        self.request = request
        self.cuda = request.device == "cuda"
        self.limit = 0 if "limit0" in request.options else 10
        by_precision = "nchw" if request.precision == "float32" else "nhwc"
        self.layout = next((word for word in request.options if word in ("nchw", "nhwc")), by_precision)
        self.format = torch.channels_last if self.layout == "nhwc" else torch.contiguous_format
        self.half = HALVES.get(request.precision)
        self._configure()
        torch.manual_seed(0)
        blocks, bottleneck = steps.BLOCKS[request.network], request.network in steps.BOTTLENECK
        self.model = ResNet(blocks, bottleneck, request.classes, request.in_channels, request.stem)
        self.model.to(device=request.device, memory_format=self.format).train()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), request.lr, steps.MOMENTUM, weight_decay=steps.WEIGHT_DECAY, fused=True
        )
        self.scaler = None
        if request.precision == "float16":
            self.scaler = torch.amp.GradScaler(request.device, init_scale=steps.INIT_SCALE)
        self.loss: Callable[..., torch.Tensor] = self._loss
        if request.how in COMPILE_MODES:
            self.loss = torch.compile(self._loss, mode=COMPILE_MODES[request.how])
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self.output: torch.Tensor | None = None
        self.peak_before = 0
        self.captured_peak = 0

    def _configure(self) -> None:
        tf32 = self.request.precision != "float32"
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        if self.cuda:
            torch.backends.cudnn.benchmark_limit = self.limit
            torch.cuda.reset_peak_memory_stats()

    def settings(self) -> steps.Answer:
        return {
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version() if self.cuda else None,
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name() if self.cuda else "cpu",
            "api": "legacy" if self.legacy else "graph",
            "benchmark": torch.backends.cudnn.benchmark,
            "benchmark_limit": self.limit,
            "allow_tf32": torch.backends.cudnn.allow_tf32,
            "layout": self.layout,
            "autocast": None if self.half is None else str(self.half).removeprefix("torch."),
            "scaler": self.scaler is not None,
            "compile": COMPILE_MODES.get(self.request.how, False),
        }

    def put(self, images: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.from_numpy(images).to(self.request.device).contiguous(memory_format=self.format)
        return x, torch.from_numpy(labels).to(self.request.device)

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.half is None:
            return contextlib.nullcontext()
        return torch.autocast(self.request.device, dtype=self.half)

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self.loss(x, y)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self.request.how == "cuda-graph":
            return self._replay(*batch)
        if self.request.how in ("compiled-graphs", "max-autotune"):
            torch.compiler.cudagraph_mark_step_begin()
        return self._step(*batch)

    def _replay(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.inputs = (x.clone(), y.clone())
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(GRAPH_WARMUP):
                    self._step(*self.inputs)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad(set_to_none=True)
            self.peak_before = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            with torch.cuda.graph(self.graph):
                self.output = self._step(*self.inputs)
            # The graph keeps this memory, and its replays ask the allocator for none.
            self.captured_peak = torch.cuda.max_memory_allocated()
        for target, source in zip(self.inputs, (x, y), strict=True):
            target.copy_(source)
        self.graph.replay()
        return self.output

    def value(self, loss: torch.Tensor) -> float:
        return float(loss)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict({key: torch.as_tensor(value) for key, value in state.items()})

    def scale(self) -> float | None:
        return None if self.scaler is None else self.scaler.get_scale()

    def settled(self) -> None:
        if self.cuda:
            self.peak_before = max(self.peak_before, torch.cuda.max_memory_allocated())
            # The search's workspaces lie in the pool and would be taken for what a step needs.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def warm(self) -> None:
        pass

    def memory(self) -> steps.Answer:
        if not self.cuda:
            return {"allocated_peak": None, "allocated_peak_all": None, "device_used": None}
        free, total = torch.cuda.mem_get_info()
        peak = max(self.captured_peak, torch.cuda.max_memory_allocated())
        return {
            "allocated_peak": peak,
            "allocated_peak_all": max(peak, self.peak_before),
            "reserved_peak": torch.cuda.max_memory_reserved(),
            "device_used": total - free,
        }

    def convolve(self, x: Any, w: Any) -> Any:
        images, _ = self.put(x, np.zeros(1, np.int64))
        filters = torch.from_numpy(w).to(self.request.device).contiguous(memory_format=self.format)
        with torch.no_grad(), self._autocast():
            return F.conv2d(images, filters).float().cpu().numpy()


if __name__ == "__main__":
    steps.serve(Training, BEGAN)
