"""The wheel test: the sdist, the wheel made from it, and a fresh environment outside the checkout in which it works.

Run: python tests/wheel.py (needs the package `build`; takes about half a minute).
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = sorted(path.name for pattern in ("*.cu", "*.cuh") for path in (ROOT / "kernels").glob(pattern))
PROFILES = sorted(path.name for path in (ROOT / "flcuda" / "cudnn" / "profiles").glob("*.json"))
PROBE = """
import json, pathlib, sys
import flcuda
from flcuda import kernel_loader
from flcuda.finder import ConvolutionProblem
import flcuda.cudnn
folder = kernel_loader.kernel_dir()
print(json.dumps({
    "package": str(pathlib.Path(flcuda.__file__).parent),
    "profiles": sorted(p.name for p in (pathlib.Path(flcuda.__file__).parent / "cudnn" / "profiles").glob("*.json")),
    "typed": (pathlib.Path(flcuda.__file__).parent / "py.typed").is_file(),
    "kernels": sorted(p.name for pattern in ("*.cu", "*.cuh") for p in folder.glob(pattern)),
    "problem": str(ConvolutionProblem.parse("forward n2 c3 8x8 k4 3x3 p1 float32 nchw")),
    "functions": sum(name.startswith("cudnn") and callable(getattr(flcuda.cudnn, name)) for name in dir(flcuda.cudnn)),
    "cupy": "cupy" in sys.modules,
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\nexit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    assert KERNELS, "no kernels in the checkout"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # Without --sdist and --wheel, build makes the wheel from the sdist: what a release does.
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
        (sdist,) = (folder / "dist").glob("*.tar.gz")
        (wheel,) = (folder / "dist").glob("*.whl")
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, cwd=folder)
        found = json.loads(run(python, "-W", "error", "-c", PROBE, cwd=folder))
        assert str(folder) in found["package"], f"imported from {found['package']}, not from the wheel"
        assert found["typed"], "py.typed is missing from the wheel"
        assert found["kernels"] == KERNELS, f"kernels in the wheel {found['kernels']}, in the checkout {KERNELS}"
        assert found["profiles"] == PROFILES, f"profiles in the wheel {found['profiles']}, in the checkout {PROFILES}"
        assert found["problem"] == "forward n2 c3 8x8 k4 3x3 p1 s1 float32 nchw", found["problem"]
        assert found["functions"] >= 239, found["functions"]
        assert not found["cupy"], "importing flcuda imported CuPy"
        info = json.loads(run(folder / "env" / "bin" / "flcuda", "info", "--json", cwd=folder))
        assert info, "flcuda info --json printed nothing"
        print(f"{sdist.name} -> {wheel.name}: {len(KERNELS)} kernel files, the command works")


if __name__ == "__main__":
    main()
