"""cuDNN's C API: every public function, enum and struct of the headers, under C's own names.

``from flcuda import cudnn; cudnn.cudnnCreateTensorDescriptor(ctypes.byref(descriptor))``. Importing this package loads
nothing; cuDNN is found and loaded by the first call of a function, or by `load`. `flcuda.cudnn.bindings` says what
arguments may be, `flcuda.cudnn.resources` has owners of handles and descriptors. `log_to_python` sends what cuDNN logs
to Python's `logging`.
"""

from typing import TYPE_CHECKING, Any

from flcuda.cudnn.library import is_loaded as is_loaded
from flcuda.cudnn.library import load as load
from flcuda.cudnn.library import search_places as search_places

if TYPE_CHECKING:
    from flcuda.cudnn.bindings import *  # noqa: F403
    from flcuda.cudnn.log import log_to_python as log_to_python


# The few names that the headers take from CUDA's; all others begin with cudnn or CUDNN_.
_C_NAMES = ("cudaStream_t", "cudaGraph_t", "libraryPropertyType", "MAJOR_VERSION", "MINOR_VERSION", "PATCH_LEVEL")


def __getattr__(name: str) -> Any:
    """Imports bindings.py when a name of C's is first used, or the function that needs them.

    Not before: generate.py is in this package, and has to run when bindings.py is missing or broken.
    """
    if name == "log_to_python":
        from flcuda.cudnn.log import log_to_python

        globals()[name] = log_to_python
        return log_to_python
    if name == "__all__" or name in _C_NAMES or name.startswith(("cudnn", "CUDNN_")):
        from flcuda.cudnn import bindings

        globals().update({exported: getattr(bindings, exported) for exported in bindings.__all__})
        globals()["__all__"] = ["is_loaded", "load", "log_to_python", "search_places", *bindings.__all__]
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'flcuda.cudnn' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists C's names too."""
    exported: list[str] = __getattr__("__all__")
    return sorted({*globals(), *exported})
