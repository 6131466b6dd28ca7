"""Runs a command that prints JSON and writes its answer, with the machine and the commit, to bench/results/NAME.json.

Run: python bench/record.py NAME [--folder FOLDER] [--commit HASH] -- flcuda find "forward n128 ..." --json
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def output_of(command: list[str]) -> str:
    # `flcuda` is this interpreter's, installed or not.
    if command[0] == "flcuda":
        command = [sys.executable, "-m", *command]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def commit() -> str:
    return output_of(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]).strip()


def machine() -> dict[str, Any]:
    """What a figure depends on; not the folders of this machine."""
    info = json.loads(output_of(["flcuda", "info", "--json"]))
    return {
        **{name: info[name] for name in ("flcuda", "python", "numpy", "platform")},
        "cupy": info["cupy"].get("version"),
        "cudnn": info["cudnn"].get("version"),
        "cuda": info["cuda"],
        "gpus": info["gpus"].get("devices"),
        "cores": len(os.sched_getaffinity(0)),
    }


def machine_line(found: dict[str, Any]) -> str:
    """Says in one line what `machine` found, for print."""
    gpus = ", ".join(str(gpu["name"]) for gpu in found["gpus"] or []) or "no GPU"
    cuda = found["cuda"]
    driver = f", driver {cuda['nvidia_driver']}, CUDA {cuda['cuda_driver']}" if found["gpus"] else ""
    libraries = ", ".join(f"{name} {found[key]}" for name, key in (("CuPy", "cupy"), ("cuDNN", "cudnn")) if found[key])
    return f"{gpus}{driver}; {found['cores']} cores; Python {found['python']}{', ' if libraries else ''}{libraries}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="where the files came from, on a machine without git")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    result = json.loads(output_of(args.command))
    record = {
        "command": " ".join(f'"{word}"' if " " in word else word for word in args.command),
        "commit": args.commit or commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "result": result,
    }
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"{args.name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
