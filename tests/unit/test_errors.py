import pickle

import pytest

from flcuda import errors

EXAMPLES = [
    errors.FlcudaError("something"),
    errors.LibraryNotFoundError("no cuDNN", ("wheel: none", "system: none")),
    errors.DeviceNotFoundError("no driver"),
    errors.CudnnError("cudnnCreate", 1001, "no GPU", "CUDNN_STATUS_NOT_INITIALIZED"),
    errors.cudnn_error("cudnnFindConvolutionForwardAlgorithmEx", 3007, "engine"),
    errors.KernelCompileError("kernels/finite.cu", "line 3: error"),
    errors.DecodeError("cat/1.jpg", "is empty"),
    errors.DecodeError("cat/2.jpg", "cannot be read: Permission denied", unread=True),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_fields_and_notes_survive_pickling(error: errors.FlcudaError, protocol: int) -> None:
    noted = pickle.loads(pickle.dumps(error))
    noted.add_note("forward n128 c64 56x56")
    copy = pickle.loads(pickle.dumps(noted, protocol))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__notes__ == ["forward n128 c64 56x56"]
    assert {name: value for name, value in vars(copy).items() if name != "__notes__"} == vars(error)
    assert vars(error) or type(error) is errors.FlcudaError


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (1001, errors.CudnnError),
        (2000, errors.CudnnError),
        (2999, errors.CudnnError),
        (3000, errors.CudnnNotSupportedError),
        (3014, errors.CudnnNotSupportedError),
        (3999, errors.CudnnNotSupportedError),
        (4000, errors.CudnnError),
        (5003, errors.CudnnError),
        (9999, errors.CudnnError),
    ],
)
def test_class_is_chosen_by_the_thousand(status: int, kind: type[errors.CudnnError]) -> None:
    error = errors.cudnn_error("f", status)
    assert type(error) is kind
    assert error.status == status


def test_message_names_function_status_and_text() -> None:
    known = errors.cudnn_error("cudnnSetStream", 2000, "stream is on device 1", "CUDNN_STATUS_BAD_PARAM")
    assert str(known) == "cudnnSetStream: CUDNN_STATUS_BAD_PARAM (2000): stream is on device 1"
    unknown = errors.cudnn_error("cudnnSetStream", 2099)
    assert str(unknown) == "cudnnSetStream: status 2099: cuDNN gives no further text"


def test_places_are_listed_in_order() -> None:
    text = str(errors.LibraryNotFoundError("no cuDNN", ("wheel: none", "system: none")))
    assert text.splitlines() == ["no cuDNN", "Places searched, in this order:", "  wheel: none", "  system: none"]


def test_tree() -> None:
    assert issubclass(errors.CudnnNotSupportedError, errors.CudnnError)
    for error in EXAMPLES:
        assert isinstance(error, errors.FlcudaError)
