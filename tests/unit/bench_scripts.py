"""Scripts of bench/ as modules."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).parents[2] / "bench"
MACHINE = {"gpus": None, "cuda": {}, "cores": 2, "python": "3", "cupy": None, "cudnn": None}


def load(path: Path) -> ModuleType:
    """Loads a script under its own name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for the names of annotations
    spec.loader.exec_module(module)
    return module


@contextmanager
def loading() -> Iterator[Callable[[str], ModuleType]]:
    """Yields what loads a script as it is run: with its own folder in the path, for the modules beside it."""

    def loaded(name: str) -> ModuleType:
        module = load(BENCH / f"{name}.py")
        module.machine = lambda: MACHINE
        return module

    sys.path.insert(0, str(BENCH))
    try:
        yield loaded
    finally:
        sys.path.remove(str(BENCH))
