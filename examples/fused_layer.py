"""A layer of three lines, convolution + bias + SiLU with all gradients, checked and timed against the unfused calls.

On a GPU: pip install 'flcuda[cuda12]', then python examples/fused_layer.py. On the CPU (--device cpu) it shows that the
results agree; what is fast there says nothing about a GPU.
"""

import argparse
import functools
import json
import sys

import numpy as np

import flcuda
from flcuda import device as devices
from flcuda import functional as F
from flcuda import timing


@flcuda.graph
def conv_bias_silu(x, w, b):
    return flcuda.graph.silu(flcuda.graph.conv(x, w, padding=1) + b)


@flcuda.graph
def silu(z):
    return flcuda.graph.silu(z)


def unfused(x, w, b, math):
    return silu(F.conv2d(x, w, b, padding=1, math=math))


# The largest difference that counts as the same result, relative to the largest value. Sums over a batch of 16-bit
# numbers that were rounded in between differ most.
TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "tf32": 5e-3, "float16": 2e-2, "bfloat16": 1e-1}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--shape", nargs=4, type=int, metavar=("N", "C", "H", "W"), help="default: 128 64 56 56")
    parser.add_argument("--filters", type=int, help="default: as many as channels")
    parser.add_argument("--precision", choices=("float16", "bfloat16", "tf32", "float32", "float64"))
    parser.add_argument("--layout", choices=("nhwc", "nchw"), default="nhwc")
    parser.add_argument("--repeats", type=int, default=50, help="how often each thing is timed (default 50)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_args()


def random_array(rng, shape, dtype, layout, device, scale=1.0):
    host = (scale * rng.standard_normal(shape)).astype(dtype)
    order = devices.memory_order(layout, len(shape))
    memory = device.xp.asarray(np.ascontiguousarray(host.transpose(order)))
    return memory.transpose(sorted(range(len(order)), key=order.__getitem__))


def on_host(a):
    if devices.is_cuda(a):
        a = a.view(f"u{a.itemsize}").get().view(a.dtype)
    return a.astype(np.float64)


def difference(a, b):
    """The largest difference, relative to the largest value."""
    a, b = on_host(a), on_host(b).reshape(a.shape)
    return float(np.abs(a - b).max() / np.abs(b).max())


def main():
    arguments = parse_arguments()
    device = devices.resolve(arguments.device)
    small = device.kind == "cpu"
    n, c, h, w = arguments.shape or ((4, 8, 12, 12) if small else (128, 64, 56, 56))
    k = arguments.filters or c
    precision = arguments.precision or ("float32" if small else "float16")
    # TF32 has to be asked for, here and there.
    math = "tensor_op" if precision == "tf32" else None
    dtype = devices.numpy_dtype("float32" if precision == "tf32" else precision)
    fused = flcuda.graph(conv_bias_silu.__wrapped__, math=math)
    rng = np.random.default_rng(0)
    with device.use():
        x = random_array(rng, (n, c, h, w), dtype, arguments.layout, device)
        filters = random_array(rng, (k, c, 3, 3), dtype, arguments.layout, device, (9 * c) ** -0.5)
        bias = random_array(rng, (1, k, 1, 1), dtype, arguments.layout, device)
        dy = random_array(rng, (n, k, h, w), dtype, arguments.layout, device)
        layers = {
            "fused": (fused, [flcuda.Tensor(a, requires_grad=True) for a in (x, filters, bias)]),
            "unfused": (
                functools.partial(unfused, math=math),
                [flcuda.Tensor(a, requires_grad=True) for a in (x, filters, bias.reshape(k))],
            ),
        }

        results = {}
        times = {}
        for name, (layer, tensors) in layers.items():

            def forward(layer=layer, tensors=tensors):
                with flcuda.no_grad():
                    return layer(*tensors)

            def both(layer=layer, tensors=tensors):
                for tensor in tensors:
                    tensor.grad = None
                y = layer(*tensors)
                y.backward(dy)
                return y

            y = both()
            results[name] = [y.data, *(tensor.grad for tensor in tensors)]
            options = {"warmup": 3, "repeats": arguments.repeats, "budget_s": 5.0}
            times[name] = {
                "forward": timing.measure(forward, device, **options),
                "forward + backward": timing.measure(both, device, **options),
            }
        differences = {
            what: difference(a, b)
            for what, a, b in zip(("y", "dx", "dw", "db"), results["fused"], results["unfused"], strict=True)
        }
        model = devices.device_model(device)
    tolerance = TOLERANCE[precision]
    agree = all(value <= tolerance for value in differences.values())
    version = "" if small else f", cuDNN {flcuda.cudnn.library.load().version_text}"
    report = {
        "layer": f"3x3 convolution + bias + SiLU, n{n} c{c} {h}x{w} k{k} {precision} {arguments.layout}",
        "machine": f"{device.kind}: {model['name']}{version}",
        "times": {
            what: {
                name: {"median_ms": t[what].median_ms, "spread_ms": t[what].spread_ms, "samples": t[what].samples}
                for name, t in times.items()
            }
            for what in ("forward", "forward + backward")
        },
        "differences": differences,
        "tolerance": tolerance,
        "agree": agree,
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    return 0 if agree else 1


def print_table(report):
    print(report["layer"])
    print(report["machine"])
    print(f"\n{'median ms':<20} {'fused':>10} {'unfused':>10} {'times faster':>14}")
    for what, t in report["times"].items():
        fused, other = t["fused"]["median_ms"], t["unfused"]["median_ms"]
        print(f"{what:<20} {fused:>10.4f} {other:>10.4f} {other / fused:>14.2f}")
    print("\nlargest difference of fused and unfused, relative to the largest value:")
    print("  " + "  ".join(f"{name} {value:.1e}" for name, value in report["differences"].items()))
    print(f"the results {'agree' if report['agree'] else 'DIFFER'} (tolerance {report['tolerance']:.0e})")


if __name__ == "__main__":
    sys.exit(main())
