"""The own kernels of a training step at ResNet-34's shapes: time, bytes, and the share of a copy's bandwidth.

For each op of batch norm, pooling, loss and the last layer, forward and backward, at the shapes that a step has:

    ms       median of device events by flcuda.timing, with cold operands: sets of them take turns, more than L2 holds;
             what an op makes anew is kept until it makes the next
    bytes    that must be moved, each once a pass: what is read in two passes counts twice; see Note [passes] in
             flcuda/ops/batch_norm.py and Note [pooled batch norm] in flcuda/ops/pooling.py
    share    the time of a copy on the device of half as many bytes (it reads them and writes them), which takes turns
             with the op sample by sample, over the op's: 1 is a copy's bandwidth. The aim is 0.85
    torch    PyTorch's time for the same on the same memory over ours, where it is installed and has the like; its batch
             norm is cuDNN's or its own, as it chooses, its ReLU in place; error is the distance of the results over
             theirs. In 16 bits the stem's gradients differ by some per cent: of results that round to the
             same number, PyTorch's pool takes the first for the maximum, ours the larger one

The check of the gradients and the update are bench_scaler.py's, the convolutions bench_finder.py's.

Run: python bench/bench_kernels.py [--precision float16] [--layout nhwc] [--batch 128] [--only NAME] [--json]
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from record import machine, machine_line

from flcuda import device as devices
from flcuda import timing
from flcuda.device import Device
from flcuda.finder.problem import fill_normal
from flcuda.ops import batch_norm, elementwise, loss, pooling
from flcuda.ops import linear as linear_op
from flcuda.ops.batch_norm import Norm

STAGES = ((64, 4), (128, 8), (256, 16), (512, 32))
"""Channels, and how many times smaller than the image, of what goes through the blocks' batch norms."""

EPS = 1e-5
CLASSES = 1000

Run = Callable[[], Any]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An op at a shape.

    Attributes:
        name: what it does.
        shape: of the image that goes in.
        nbytes: that it must move.
        make: makes the operands anew, and gives our run and PyTorch's, or None where there is no like.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    make: Callable[[], tuple[Run, Run | None]]


class Bench:
    """Makes arrays, of random normal numbers, and PyTorch's tensors on the same memory.

    Args:
        device: where.
        precision: the dtype.
        layout: of images.
        torch: the module, or None.
    """

    def __init__(self, device: Device, precision: str, layout: str, torch: Any) -> None:
        self.device = device
        self.dtype = devices.DTYPES[precision]
        self.layout = layout
        self.torch = torch
        self.itemsize = int(self.dtype.itemsize)
        self._seed = 0

    def normal(self, shape: tuple[int, ...], *, wide: bool = False, mean: float = 0.0) -> Any:
        """Gives a new array; `wide` ones are float32, dense and of any rank."""
        self._seed += 1
        values = devices.empty(shape, np.float32, device=self.device)
        # Not by CuPy, which draws with cuRAND.
        fill_normal(values, self._seed, 0, self.device)
        values += np.float32(mean)
        if wide:
            return values
        out = devices.empty(shape, self.dtype, device=self.device, layout=self.layout if len(shape) > 2 else "nchw")
        return elementwise.cast(values, self.dtype, out=out)

    def norm(self, channels: int) -> Norm:
        """Gives what normalises numbers of mean 0 and deviation 1, nearly."""
        weight, bias, mean, inverse = (self.normal((channels,), wide=True) for _ in range(4))
        return Norm(1 + weight / 4, bias / 4, mean / 16, 1 + inverse / 16)

    def tensor(self, a: Any, *, grad: bool = False) -> Any:
        """Gives PyTorch's view of an array."""
        if a.dtype.name == "bfloat16":
            viewed = self.torch.from_dlpack(a.view(np.int16)).view(self.torch.bfloat16)
        else:
            viewed = self.torch.from_dlpack(a)
        return viewed.detach().requires_grad_(grad)


def norm_cases(bench: Bench, shape: tuple[int, ...]) -> Iterator[Case]:
    """The passes of batch norm in a block."""
    channels, a = shape[1], math.prod(shape) * bench.itemsize
    # One byte for each access of 16 bytes has its elements' bits.
    mask_bytes = a // 16

    def of(name: str, nbytes: int, make: Callable[[], tuple[Run, Run | None]]) -> Case:
        return Case(name, shape, nbytes, make)

    def statistics_of(x: Any, ticket: Any) -> tuple[Any, Any]:
        return batch_norm.statistics(x, None, None, None, 0.1, EPS, ticket=ticket)

    def ticket_of() -> Any:
        return batch_norm.new_ticket(channels, bench.device)

    def statistics() -> tuple[Run, Run | None]:
        x, ticket = bench.normal(shape), ticket_of()
        return lambda: statistics_of(x, ticket), None

    def apply() -> tuple[Run, Run | None]:
        x, norm = bench.normal(shape), bench.norm(channels)
        return lambda: batch_norm.apply(x, norm, relu=True)[0], None

    def forward() -> tuple[Run, Run | None]:
        x, norm, ticket = bench.normal(shape), bench.norm(channels), ticket_of()

        def own() -> Any:
            return batch_norm.apply(x, Norm(norm.weight, norm.bias, *statistics_of(x, ticket)), relu=True)[0]

        return own, None if bench.torch is None else lambda: torch_forward(bench, x, norm, None)[0]

    def apply_added(normalised: bool) -> tuple[Run, Run | None]:
        x, residual, norm = bench.normal(shape), bench.normal(shape), bench.norm(channels)
        other = bench.norm(channels) if normalised else None
        return lambda: batch_norm.apply(
            x, norm, residual=residual, residual_norm=other, relu=True, keep_mask=True
        ), None

    def forward_added() -> tuple[Run, Run | None]:
        x, residual, norm, ticket = bench.normal(shape), bench.normal(shape), bench.norm(channels), ticket_of()

        def own() -> Any:
            full = Norm(norm.weight, norm.bias, *statistics_of(x, ticket))
            return batch_norm.apply(x, full, residual=residual, relu=True, keep_mask=True)[0]

        return own, None if bench.torch is None else lambda: torch_forward(bench, x, norm, residual)[0]

    def backward() -> tuple[Run, Run | None]:
        x, dy, norm, ticket = bench.normal(shape), bench.normal(shape), bench.norm(channels), ticket_of()
        full = Norm(norm.weight, norm.bias, *statistics_of(x, ticket))
        torchs = torch_backward(bench, x, norm, None, [dy])
        return lambda: batch_norm.backward([dy], x, full, relu=True, ticket=ticket).dx, torchs

    def backward_added(count: int) -> tuple[Run, Run | None]:
        x, residual, norm, ticket = bench.normal(shape), bench.normal(shape), bench.norm(channels), ticket_of()
        dys = [bench.normal(shape) for _ in range(count)]
        full = Norm(norm.weight, norm.bias, *statistics_of(x, ticket))
        _, mask = batch_norm.apply(x, full, residual=residual, relu=True, keep_mask=True)
        torchs = torch_backward(bench, x, norm, residual, dys)
        return lambda: batch_norm.backward(dys, x, full, relu=True, adds=True, mask=mask, ticket=ticket).dx, torchs

    def backward_normalised() -> tuple[Run, Run | None]:
        x, residual, dy = (bench.normal(shape) for _ in range(3))
        norm, other, ticket = bench.norm(channels), bench.norm(channels), ticket_of()
        _, mask = batch_norm.apply(x, norm, residual=residual, residual_norm=other, relu=True, keep_mask=True)
        return (
            lambda: (
                batch_norm.backward(
                    [dy], x, norm, relu=True, residual=residual, residual_norm=other, mask=mask, ticket=ticket
                ).dx
            ),
            None,
        )

    yield of("batch norm: statistics", a, statistics)
    yield of("batch norm: apply, relu", 2 * a, apply)
    yield of("batch norm: statistics, apply, relu", 3 * a, forward)
    yield of("batch norm: apply, add, relu", 3 * a + mask_bytes, lambda: apply_added(False))
    yield of("batch norm: apply, add a normalised one, relu", 3 * a + mask_bytes, lambda: apply_added(True))
    yield of("batch norm: statistics, apply, add, relu", 4 * a + mask_bytes, forward_added)
    yield of("batch norm: backward, relu", 5 * a, backward)
    yield of("batch norm: backward, add, relu", 6 * a + mask_bytes, lambda: backward_added(1))
    yield of("batch norm: backward of two gradients, add, relu", 7 * a + mask_bytes, lambda: backward_added(2))
    yield of("batch norm: backward, add a normalised one, relu", 9 * a + mask_bytes, backward_normalised)


def stem_cases(bench: Bench, shape: tuple[int, ...]) -> Iterator[Case]:
    """Batch norm, ReLU and max pooling of the stem, in one and apart."""
    n, channels, h, w = shape
    pooled = (n, channels, (h + 1) // 2, (w + 1) // 2)
    a, p, places = math.prod(shape) * bench.itemsize, math.prod(pooled) * bench.itemsize, math.prod(pooled)

    def statistics_of(x: Any, ticket: Any) -> tuple[Any, Any]:
        return batch_norm.statistics(x, None, None, None, 0.1, EPS, ticket=ticket)

    def statistics() -> tuple[Run, Run | None]:
        x, ticket = bench.normal(shape), batch_norm.new_ticket(channels, bench.device)
        return lambda: statistics_of(x, ticket), None

    def apply() -> tuple[Run, Run | None]:
        x, norm = bench.normal(shape), bench.norm(channels)
        return lambda: pooling.batch_norm_relu_max_pool_forward(x, norm, 3, 2, 1)[0], None

    def forward() -> tuple[Run, Run | None]:
        x, norm, ticket = bench.normal(shape), bench.norm(channels), batch_norm.new_ticket(channels, bench.device)

        def own() -> Any:
            full = Norm(norm.weight, norm.bias, *statistics_of(x, ticket))
            return pooling.batch_norm_relu_max_pool_forward(x, full, 3, 2, 1)[0]

        def torchs() -> Any:
            return bench.torch.nn.functional.max_pool2d(torch_forward(bench, x, norm, None)[0], 3, 2, 1)

        return own, None if bench.torch is None else torchs

    def backward(count: int) -> tuple[Run, Run | None]:
        x, norm, ticket = bench.normal(shape), bench.norm(channels), batch_norm.new_ticket(channels, bench.device)
        dys = [bench.normal(pooled) for _ in range(count)]
        full = Norm(norm.weight, norm.bias, *statistics_of(x, ticket))
        _, saved = pooling.batch_norm_relu_max_pool_forward(x, full, 3, 2, 1)
        torchs = torch_backward(bench, x, norm, None, dys, pool=True)
        return lambda: pooling.batch_norm_relu_max_pool_backward(dys, saved, ticket=ticket)[0], torchs

    def pool_forward() -> tuple[Run, Run | None]:
        x = bench.normal(shape)
        torchs = None
        if bench.torch is not None:
            tensor = bench.tensor(x)
            torchs = lambda: bench.torch.nn.functional.max_pool2d(tensor, 3, 2, 1)  # noqa: E731
        return lambda: pooling.max_pool_forward(x, 3, 2, 1)[0], torchs

    def pool_backward() -> tuple[Run, Run | None]:
        x, dy = bench.normal(shape), bench.normal(pooled)
        _, indices = pooling.max_pool_forward(x, 3, 2, 1)
        torchs = None
        if bench.torch is not None:
            tensor, gradient = bench.tensor(x, grad=True), bench.tensor(dy)
            y = bench.torch.nn.functional.max_pool2d(tensor, 3, 2, 1)
            torchs = lambda: bench.torch.autograd.grad(y, tensor, gradient, retain_graph=True)[0]  # noqa: E731
        return lambda: pooling.max_pool_backward(dy, indices, shape, 3, 2, 1), torchs

    yield Case("stem: statistics", shape, a, statistics)
    yield Case("stem: apply, relu, max pool", shape, a + 2 * p + places, apply)
    yield Case("stem: statistics, apply, relu, max pool", shape, 2 * a + 2 * p + places, forward)
    yield Case("stem: backward of all", shape, 2 * a + 3 * p + places, lambda: backward(1))
    yield Case("stem: backward of all, two gradients", shape, 2 * a + 5 * p + places, lambda: backward(2))
    yield Case("max pool: forward", shape, a + p + places, pool_forward)
    yield Case("max pool: backward", shape, a + p + places, pool_backward)


def head_cases(bench: Bench, shape: tuple[int, ...]) -> Iterator[Case]:
    """The global pool, the last layer and the loss."""
    n, channels = shape[:2]
    a, item = math.prod(shape) * bench.itemsize, bench.itemsize
    features, logits_bytes = n * channels * item, n * CLASSES * item
    weight_bytes = CLASSES * channels * item

    def pool_forward() -> tuple[Run, Run | None]:
        x = bench.normal(shape)
        tensor = None if bench.torch is None else bench.tensor(x)
        return lambda: pooling.global_avg_pool_forward(x), None if tensor is None else lambda: tensor.mean((2, 3))

    def pool_backward() -> tuple[Run, Run | None]:
        dy = bench.normal(shape[:2])
        return lambda: pooling.global_avg_pool_backward(dy, shape, bench.layout), None

    def targets() -> Any:
        return bench.device.xp.arange(n, dtype=np.int64) * 7 % CLASSES

    def loss_forward() -> tuple[Run, Run | None]:
        logits, target, correct = bench.normal((n, CLASSES)), targets(), bench.device.xp.zeros(2, np.int64)
        torchs = None
        if bench.torch is not None:
            tensor, labels = bench.tensor(logits), bench.torch.from_dlpack(target)
            torchs = lambda: bench.torch.nn.functional.cross_entropy(tensor.float(), labels)  # noqa: E731
        return lambda: loss.cross_entropy_forward(logits, target, correct=correct)[0], torchs

    def loss_backward() -> tuple[Run, Run | None]:
        logits, target = bench.normal((n, CLASSES)), targets()
        value, saved = loss.cross_entropy_forward(logits, target)
        dloss = bench.device.xp.full(value.shape, 1024, value.dtype)
        torchs = None
        if bench.torch is not None:
            tensor, labels = bench.tensor(logits, grad=True), bench.torch.from_dlpack(target)
            scaled = bench.torch.nn.functional.cross_entropy(tensor.float(), labels) * 1024
            torchs = lambda: bench.torch.autograd.grad(scaled, tensor, retain_graph=True)[0]  # noqa: E731
        return lambda: loss.cross_entropy_backward(dloss, saved), torchs

    def linear(which: int) -> tuple[Run, Run | None]:
        x, w, dy = bench.normal((n, channels)), bench.normal((CLASSES, channels)), bench.normal((n, CLASSES))
        runs = (
            lambda: linear_op.linear_forward(x, w),
            lambda: linear_op.linear_backward_data(dy, w),
            lambda: linear_op.linear_backward_weight(x, dy),
        )
        if bench.torch is None:
            return runs[which], None
        tx, tw, tdy = (bench.tensor(each) for each in (x, w, dy))
        torchs = (lambda: tx @ tw.T, lambda: tdy @ tw, lambda: tdy.T @ tx)
        return runs[which], torchs[which]

    linear_bytes = features + weight_bytes + logits_bytes
    yield Case("global pool: forward", shape, a + features, pool_forward)
    yield Case("global pool: backward", shape, a + features, pool_backward)
    yield Case("linear: forward", (n, channels), linear_bytes, lambda: linear(0))
    yield Case("linear: backward data", (n, channels), linear_bytes, lambda: linear(1))
    yield Case("linear: backward weight", (n, channels), linear_bytes, lambda: linear(2))
    # The probabilities are float32.
    yield Case("loss: forward and counts", (n, CLASSES), logits_bytes + 4 * n * CLASSES, loss_forward)
    yield Case("loss: backward", (n, CLASSES), logits_bytes + 4 * n * CLASSES, loss_backward)


def torch_forward(bench: Bench, x: Any, norm: Norm, residual: Any, *, grad: bool = False) -> tuple[Any, list[Any]]:
    """PyTorch's batch norm of a training step, addition and ReLU; gives the result and what has gradients."""
    functional = bench.torch.nn.functional
    inputs = [bench.tensor(each, grad=grad) for each in (x, *norm[:2])]
    y = functional.batch_norm(inputs[0], None, None, *inputs[1:], True, 0.1, EPS)
    if residual is not None:
        inputs.append(bench.tensor(residual, grad=grad))
        y = y + inputs[-1]
    return functional.relu(y, inplace=True), inputs


def torch_backward(
    bench: Bench, x: Any, norm: Norm, residual: Any, dys: Sequence[Any], *, pool: bool = False
) -> Run | None:
    """PyTorch's gradients by its own graph, of which the run gives that of x; it adds two gradients before."""
    if bench.torch is None:
        return None
    y, inputs = torch_forward(bench, x, norm, residual, grad=True)
    if pool:
        y = bench.torch.nn.functional.max_pool2d(y, 3, 2, 1)
    gradients = [bench.tensor(dy) for dy in dys]

    def run() -> Any:
        gradient = gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1]
        return bench.torch.autograd.grad(y, inputs, gradient, retain_graph=True)[0]

    return run


class Kept:
    """A run whose result lives until the next one is there, so that it is not made in the same memory again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.result: Any = None

    def __call__(self) -> None:
        self.result = self._run()


def copies(device: Device, nbytes: int, count: int) -> list[Run]:
    """Copies of half as many bytes, between as many pairs of buffers."""
    xp = device.xp
    half = max(1, nbytes // 2)
    pairs = [(xp.ones(half, np.uint8), xp.ones(half, np.uint8)) for _ in range(count)]
    if device.kind == "cpu":
        return [lambda to=to, source=source: np.copyto(to, source) for to, source in pairs]
    return [lambda to=to, source=source: to.data.copy_from_device_async(source.data, half) for to, source in pairs]


def error_of(bench: Bench, own: Any, other: Any) -> float:
    """The distance of the results over the length of theirs."""
    found = bench.tensor(own).float()
    wanted = other.detach().float()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def free(device: Device, torch: Any) -> None:
    """Gives back the memory of a case."""
    if device.kind == "cuda":
        devices.cupy().get_default_memory_pool().free_all_blocks()
        if torch is not None:
            torch.cuda.empty_cache()


def measured(bench: Bench, case: Case, *, repeats: int, budget_s: float) -> Answer:
    """Times a case, the copy and PyTorch's like, which take turns."""
    count = timing.buffer_sets(case.nbytes, timing.l2_bytes(bench.device))
    made = [case.make() for _ in range(count)]
    own = [Kept(run) for run, _ in made]
    peers = [Kept(run) for _, run in made if run is not None]
    works: list[Sequence[Run]] = [own, copies(bench.device, case.nbytes, count)]
    if peers:
        works.append(peers)
    times = timing.in_turn(works, bench.device, warmup=count, repeats=repeats, budget_s=budget_s)
    row: Answer = {
        "name": case.name,
        "shape": list(case.shape),
        "bytes": case.nbytes,
        "sets": count,
        "ms": times[0].median_ms,
        "low_ms": times[0].low_ms,
        "high_ms": times[0].high_ms,
        "samples": times[0].samples,
        "queued": times[0].queued,
        "host_us": times[0].host_us,
        "gb_per_s": case.nbytes / times[0].median_ms / 1e6,
        "copy_ms": times[1].median_ms,
        "share": times[1].median_ms / times[0].median_ms,
    }
    if peers:
        result = own[0].result
        row |= {
            "torch_ms": times[2].median_ms,
            "torch_over_ours": times[2].median_ms / times[0].median_ms,
            "error": error_of(bench, result, peers[0].result),
        }
    return row


def table(rows: Sequence[Answer]) -> Iterator[str]:
    yield f"{'us':>8} {'GB/s':>6} {'share':>6} {'torch':>6} {'error':>8}"
    for row in rows:
        peer = f"{row['torch_over_ours']:6.2f} {row['error']:8.1e}" if "torch_ms" in row else f"{'':15}"
        shape = "x".join(map(str, row["shape"]))
        held = "" if row["queued"] else "  (the host's time)"
        yield f"{1e3 * row['ms']:8.1f} {row['gb_per_s']:6.0f} {row['share']:6.2f} {peer}  {row['name']}, {shape}{held}"


def cases_of(bench: Bench, batch: int, size: int) -> Iterator[Case]:
    """All cases, as a step has them."""
    half = -(-size // 2)
    yield from stem_cases(bench, (batch, 64, half, half))
    for channels, reduction in STAGES:
        side = -(-size // reduction)
        yield from norm_cases(bench, (batch, channels, side, side))
    last = -(-size // STAGES[-1][1])
    yield from head_cases(bench, (batch, STAGES[-1][0], last, last))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--precision", choices=("float32", "float16", "bfloat16"), default="float16")
    made.add_argument("--layout", choices=devices.LAYOUTS, default="nhwc")
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--size", type=int, default=224, help="height and width of the images")
    made.add_argument("--only", default="", help="of the names, those with this in them")
    made.add_argument("--repeats", type=int, default=20, help="samples of each")
    made.add_argument("--budget", type=float, default=0.15, help="seconds for each one's samples")
    made.add_argument("--device", help="cuda or cpu; default: cuda when there is one")
    made.add_argument("--no-torch", dest="torch", action="store_false", help="without PyTorch")
    made.add_argument("--json", action="store_true")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    device = devices.resolve(args.device)
    torch: Any = None
    if args.torch:
        try:
            import torch
        except ImportError:
            print("PyTorch is not installed", file=sys.stderr)
    rows = []
    with device.use():
        if torch is not None and device.kind == "cuda":
            assert torch.cuda.current_stream().cuda_stream == devices.current_stream()
        bench = Bench(device, args.precision, args.layout, torch)
        cases = [case for case in cases_of(bench, args.batch, args.size) if args.only in case.name]
        if not cases:
            sys.exit(f"--only {args.only!r} is in the name of no kernel")
        for case in cases:
            rows.append(measured(bench, case, repeats=args.repeats, budget_s=args.budget))
            free(device, torch)
    answer = {
        "precision": args.precision,
        "layout": args.layout,
        "batch": args.batch,
        "size": args.size,
        "torch": None if torch is None else str(torch.__version__),
        "rows": rows,
    }
    if args.json:
        json.dump(answer, sys.stdout, indent=1)
        print()
        return
    print(machine_line(machine()))
    print(f"{args.precision} {args.layout}, batch {args.batch}")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
