"""The exceptions of flcuda.

::

    FlcudaError
    ├── LibraryNotFoundError       places searched
    ├── DeviceNotFoundError        CUDA was asked for and is not here
    ├── CudnnError                 function, status, text
    │   └── CudnnNotSupportedError    status 3xxx
    ├── KernelCompileError         file, log
    ├── CaptureError               a step cannot be captured in a CUDA graph
    └── DecodeError                name, reason, unread; a ValueError too

A class exists only where somebody catches it. A mistake in an argument is a plain ``ValueError`` or ``TypeError``.
Callers add shapes, dtypes and parameters with ``add_note``. Every one of them pickles, fields and notes included, so
that an exception of a worker process arrives whole.
"""


class FlcudaError(Exception):
    """Anything that flcuda itself reports."""


class LibraryNotFoundError(FlcudaError):
    """cuDNN is missing, incomplete, mixed from several copies, or too old.

    Args:
        message: what is wrong and what to do about it.
        places: the places searched, in order, each a path or a word with what was found there.
    """

    def __init__(self, message: str, places: tuple[str, ...] = ()) -> None:
        super().__init__(message, places)
        self.message = message
        self.places = places

    def __str__(self) -> str:
        if not self.places:
            return self.message
        return "\n  ".join([f"{self.message}\nPlaces searched, in this order:", *self.places])


class DeviceNotFoundError(FlcudaError):
    """CUDA was asked for and there is none here: CuPy, the driver or the device is missing.

    Args:
        message: which of these it is and what to do about it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class CudnnError(FlcudaError):
    """A cuDNN function returned a status other than success.

    Args:
        function: the C function's name.
        status: the status as a number; one newer than the headers is no special case.
        text: cuDNN's last-error text, or what flcuda knows; may be empty.
        name: the status's name, such as ``CUDNN_STATUS_BAD_PARAM``; empty when nobody knows it.
    """

    def __init__(self, function: str, status: int, text: str = "", name: str = "") -> None:
        super().__init__(function, status, text, name)
        self.function = function
        self.status = status
        self.text = text
        self.name = name

    def __str__(self) -> str:
        status = f"{self.name} ({self.status})" if self.name else f"status {self.status}"
        text = self.text or "cuDNN gives no further text"
        return f"{self.function}: {status}: {text}"


class CudnnNotSupportedError(CudnnError):
    """The status is one of the 3000s: what was asked for is valid and this cuDNN, device or source cannot do it."""


class KernelCompileError(FlcudaError):
    """NVRTC refused a kernel file.

    Args:
        file: the kernel's file, such as ``kernels/finite.cu``.
        log: the compiler's log.
    """

    def __init__(self, file: str, log: str) -> None:
        super().__init__(file, log)
        self.file = file
        self.log = log

    def __str__(self) -> str:
        return f"{self.file} does not compile:\n{self.log}"


class CaptureError(FlcudaError):
    """A step cannot be captured in a CUDA graph; nothing of it has happened on the device.

    The message says what stood in the way and what to do; the original error, if any, is the cause.
    """


class DecodeError(FlcudaError, ValueError):
    """An image file is broken, or is none.

    Args:
        name: the file, or what the caller called the bytes.
        reason: what is wrong with it, such as "is empty".
        unread: the file could not be read, which may pass; what is in it is not known.
    """

    def __init__(self, name: str, reason: str, *, unread: bool = False) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason
        self.unread = unread

    def __str__(self) -> str:
        return f"{self.name} {self.reason}; {self._remedy}"

    @property
    def _remedy(self) -> str:
        if self.unread:
            return "see that it is there and may be read, or leave such files out by on_error='skip'"
        return "replace or remove it, or leave such files out by on_error='skip' (`flcuda data check` lists them all)"

    def fresh(self) -> "DecodeError":
        """Returns an error like it, to be raised: one that was raised keeps its traceback and notes."""
        return DecodeError(self.name, self.reason, unread=self.unread)


NOT_SUPPORTED = 3000
"""The first status of cuDNN's "not supported" thousand; the whole thousand is one error class."""


def cudnn_error(function: str, status: int, text: str = "", name: str = "") -> CudnnError:
    """Makes the error for a failed cuDNN call, of the class that the status's thousand chooses.

    Args:
        function: the C function's name.
        status: its return value.
        text: cuDNN's last-error text for that call.
        name: the status's name, when known.

    Returns:
        A CudnnError, or a CudnnNotSupportedError for 3000 to 3999; not raised yet.
    """
    kind = CudnnNotSupportedError if status // 1000 * 1000 == NOT_SUPPORTED else CudnnError
    return kind(function, status, text, name)
