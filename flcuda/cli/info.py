"""``flcuda info``: what is installed, which cuDNN is used and why, and which GPUs there are."""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import flcuda
from flcuda import device
from flcuda.cudnn import library
from flcuda.errors import DeviceNotFoundError, FlcudaError, LibraryNotFoundError

CLOCK_RATE = 13  # cudaDevAttrClockRate, in kHz; CUDA 13 no longer has it among the properties.
WITHOUT_GPU = (
    "What works without: training, finding and storing on the CPU (--device cpu), cuDNN's descriptors and every "
    "function that takes no handle, and compiling the kernels."
)


def configure(subparsers: Any) -> None:
    """Adds the sub-command.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` gave.
    """
    about = "show versions, the cuDNN in use and why it is that one, and the GPUs"
    parser = subparsers.add_parser("info", help=about, description=f"{about[0].upper()}{about[1:]}.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="print one JSON object")
    what.add_argument(
        "--profile", metavar="FILE", help="write this GPU's profile, with which cuDNN plans for it where it is not"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the sub-command.

    Args:
        args: with ``json`` and ``profile``.

    Returns:
        0; a part that is missing is a fact, not a failure.

    Raises:
        FlcudaError: with ``profile``: there is no GPU, or no cuDNN that gives profiles.
        OSError: with ``profile``: the file cannot be written, or is another one already.
    """
    if args.profile is not None:
        print(write_profile(args.profile))
        return 0
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        Console().print(_table(facts))
    return 0


def write_profile(path: str) -> str:
    """Writes the profile of the current GPU.

    Args:
        path: the file.

    Returns:
        A line that says what was done.

    Raises:
        DeviceNotFoundError: there is no GPU.
        FileExistsError: the file is there and is not the same profile.
        FlcudaError: cuDNN is missing, or too old to give a profile.
        OSError: the file cannot be written.
    """
    try:
        device.resolve("cuda")
    except DeviceNotFoundError as error:
        error.add_note(f"A profile is read from the GPU of this machine. {_shipped_names()}")
        raise
    # Here, because the bindings take long to import.
    from flcuda.cudnn import resources
    from flcuda.cudnn.device_properties import DeviceProperties

    with DeviceProperties.of_handle(resources.handle()) as found:
        written = found.write_profile(path)
        return f"The profile of {found.name} {'is written to' if written else 'is already in'} {path}"


def _shipped_names() -> str:
    from flcuda.cudnn.device_properties import profiles

    return f"Shipped are those of: {', '.join(profiles())}"


def collect() -> dict[str, Any]:
    """Collects the facts.

    Returns:
        What ``flcuda info --json`` prints. A part that cannot be had has an "error" that says why.
    """
    return {
        "flcuda": flcuda.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "numpy": np.__version__,
        "cupy": _guard(_cupy),
        "cudnn": _guard(_cudnn),
        "cuda": _guard(_cuda),
        "nvrtc": _guard(_nvrtc),
        "gpus": _guard(_gpus),
        "profiles": _guard(_profiles),
    }


def _guard(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Calls a part; whatever goes wrong in it is a fact about this machine, to be shown and not to stop the rest."""
    try:
        return part()
    except Exception as error:  # See the docstring.
        kind = "" if isinstance(error, FlcudaError) else f"{type(error).__name__}: "
        message = error.message if hasattr(error, "message") else str(error)
        return {"error": f"{kind}{message}"}


def _cupy() -> dict[str, Any]:
    module = device.cupy()
    return {"version": module.__version__, "path": str(Path(str(module.__file__)).parent)}


def _cudnn() -> dict[str, Any]:
    # Before loading, because afterwards the first place is the one already loaded.
    places = [str(place) for place in library.search_places() if place.why != "argument"]
    try:
        loaded = library.load()
    except LibraryNotFoundError as error:
        return {"error": error.message, "places": places}
    return {
        "version": loaded.version_text,
        "number": loaded.version,
        "cuda": _cuda_version(loaded.cuda_version),
        "graph_only": loaded.graph_only,
        "path": loaded.path,
        "why": loaded.why,
        "files": [Path(file).name for file in loaded.files],
        "skipped": {Path(file).name: reason for file, reason in loaded.skipped.items()},
        "places": places,
    }


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _cuda() -> dict[str, Any]:
    reason = device.cuda_missing_reason()
    facts: dict[str, Any] = {"available": reason is None, "reason": reason}
    versions = device.driver()
    for name in ("cuda_runtime", "cuda_driver"):
        facts[name] = _cuda_version(int(versions.get(name, 0)))
    facts["nvidia_driver"] = versions.get("nvidia_driver", "")
    return facts


def _nvrtc() -> dict[str, Any]:
    device.cupy()
    from cupy_backends.cuda.libs import nvrtc

    major, minor = nvrtc.getVersion()
    return {"version": f"{major}.{minor}", "files": library.mapped_files("libnvrtc.so")}


def _gpus() -> dict[str, Any]:
    if not device.cuda_available():
        return {"devices": []}
    runtime = device.cupy().cuda.runtime
    found = []
    for index in range(runtime.getDeviceCount()):
        model = device.device_model(device.Device("cuda", index))
        clock = runtime.deviceGetAttribute(CLOCK_RATE, index) // 1000
        found.append({"index": index, **model, "clock_mhz": clock})
    return {"devices": found}


def _profiles() -> dict[str, Any]:
    from flcuda.cudnn.device_properties import profiles, read_profile

    shipped = {name: read_profile(name) for name in profiles()}
    return {
        "shipped": [
            {"name": name, "gpu": profile.name, "origin": profile.origin, "cudnn": profile.cudnn}
            for name, profile in shipped.items()
        ]
    }


# --- printing -------------------------------------------------------------------------------------------------------


def _table(facts: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")

    def row(name: str, text: str, style: str = "") -> None:
        table.add_row(name, Text(text, style=style))

    row("flcuda", f"{facts['flcuda']}, Python {facts['python']}, NumPy {facts['numpy']}")
    cupy = facts["cupy"]
    row("CuPy", cupy.get("version") or cupy["error"])
    _cudnn_rows(facts["cudnn"], row)
    cuda = facts["cuda"]
    if "error" in cuda:
        row("CUDA", cuda["error"])
    else:
        row(
            "CUDA",
            f"runtime {cuda['cuda_runtime'] or 'unknown'}, driver {cuda['cuda_driver'] or 'unknown'}"
            + (f" ({cuda['nvidia_driver']})" if cuda["nvidia_driver"] else ""),
        )
    nvrtc = facts["nvrtc"]
    row("NVRTC", nvrtc.get("error") or f"{nvrtc['version']}, {', '.join(nvrtc['files'])}")
    _gpu_rows(facts, row)
    shipped = facts["profiles"]
    row("profiles", shipped.get("error") or ", ".join(profile["name"] for profile in shipped["shipped"]))
    return table


def _cudnn_rows(cudnn: dict[str, Any], row: Callable[..., None]) -> None:
    if "error" in cudnn:
        row("cuDNN", cudnn["error"], "yellow")
    else:
        built = f", built with CUDA {cudnn['cuda']}" if cudnn["cuda"] else ""
        row("cuDNN", f"{cudnn['version']}{built}" + (", graph API only" if cudnn["graph_only"] else ""))
        row("", cudnn["path"])
        row("", f"chosen by: {cudnn['why']}")
        row("", f"files: {', '.join(cudnn['files'])}")
        for name, reason in cudnn["skipped"].items():
            row("", f"not opened: {name}: {reason}")
    row("", "places, in the order of the search:")
    for place in cudnn.get("places", ()):
        row("", f"- {place}")


def _gpu_rows(facts: dict[str, Any], row: Callable[..., None]) -> None:
    gpus = facts["gpus"]
    if "error" in gpus:
        row("GPU", gpus["error"], "yellow")
        return
    for gpu in gpus["devices"]:
        sm = f"{gpu['sm'] // 10}.{gpu['sm'] % 10}"
        row(
            f"GPU {gpu['index']}",
            f"{gpu['name']}, SM {sm}, {gpu['sm_count']} SMs, {gpu['memory']}, {gpu['clock_mhz']} MHz",
        )
    if not gpus["devices"]:
        row("GPU", f"No GPU here: {facts['cuda'].get('reason')}", "yellow")
        row("", WITHOUT_GPU)
