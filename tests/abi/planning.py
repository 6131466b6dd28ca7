"""What tests that plan without a GPU need: they skip with the reason where it is missing.

Functions, to be called by fixtures, so that collecting tests loads no library.
"""

import ctypes

import pytest

from flcuda.cudnn import library
from flcuda.cudnn.device_properties import SINCE

CUDNN = pytest.mark.skipif(not any(place.usable for place in library.search_places()), reason="cuDNN is not installed")


def require_libcuda() -> None:
    """Loads libcuda, without which cuDNN finalizes no backend descriptor."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        pytest.skip(f"libcuda.so.1 cannot be loaded: {error}")


def require_device_properties() -> None:
    """Loads libcuda, and a cuDNN that plans for a GPU by its properties."""
    require_libcuda()
    if library.load().version < SINCE:
        pytest.skip(f"cuDNN {library.load().version_text} is older than device properties")
