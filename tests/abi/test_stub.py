"""Every function called through a stub cuDNN that echoes its arguments; the status check, and the conversions.

Each test runs in a process of its own, because a process can have only one cuDNN; the code in ``run`` strings has the
stub's own side as ``stub`` and reports with ``report``.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stub_cudnn

import flcuda

HERE = Path(__file__).parent
WITHOUT = ("cudnnGetExecutionPlanWorkspaceSize", "cudnnGnnAggSimpleForward", "cudnnCausalConv1dForward")


def python(*arguments: str) -> Any:
    """Runs Python beside this file, with this flcuda whether it is installed or not; gives back the JSON printed."""
    paths = [str(Path(flcuda.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environment.pop("FLCUDA_CUDNN_PATH", None)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def built(folder: Path, *arguments: Any) -> Path:
    try:
        stub_cudnn.include_folders()
    except LookupError as error:
        pytest.skip(f"no stub can be compiled from cuDNN's headers: {error}")
    return stub_cudnn.build_stub(folder, *arguments)


@pytest.fixture(scope="module")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("stub"))


Run = Callable[[str], Any]


def runner(folder: Path) -> Run:
    def run(code: str) -> Any:
        head = f"""
            import ctypes, gc, json, pickle, struct, sys
            from ctypes import byref, c_double, c_float, c_int, c_int64, c_size_t, c_void_p
            import ml_dtypes
            import numpy as np
            import stub_cudnn
            from flcuda import cudnn, errors
            stub = stub_cudnn.Stub({str(folder)!r})
            def report(value): print(json.dumps(value))
            def failure(call):
                before = stub.calls.value
                try:
                    call()
                except Exception as error:
                    return [type(error).__name__, str(error), stub.calls.value - before]
                return ["no error", "", stub.calls.value - before]
            def opaque(kind, address=0x7FED_CBA9_8765_4320): return ctypes.cast(address, getattr(cudnn, kind))
        """
        return python("-c", textwrap.dedent(head) + textwrap.dedent(code))

    return run


@pytest.fixture(scope="module")
def run(stub_folder: Path) -> Run:
    return runner(stub_folder)


def test_every_argument_of_every_function_arrives(stub_folder: Path) -> None:
    calls = python("stub_cudnn.py", str(stub_folder))
    assert len(calls) == len(stub_cudnn.prototypes(stub_cudnn.include_folders()[0])) >= 239
    results = {}
    for call in calls:
        assert call["arrived_at"] == call["name"]
        assert call["calls"] == 1, call["name"]
        assert call["got"] == call["sent"], call["name"]
        if call["result"] is not None:
            results[call["name"]] = call["result"]
    version = results.pop("cudnnGetVersion")
    assert version >= 90000
    assert results.pop("cudnnGetMaxDeviceVersion") >= 900
    assert results == {"cudnnGetCudartVersion": 12090, "cudnnGetErrorString": "STUB_STATUS_1001"}
    # The echo proves nothing if what was sent is all alike.
    sent = [argument for call in calls for argument in call["sent"] if len(argument) == 16]
    assert len(set(sent)) == len(sent) > 800


def test_a_status_becomes_the_right_exception(run: Run) -> None:
    found = run(
        """
        def attempt(status):
            stub.status.value = status
            try:
                cudnn.cudnnSetStream(opaque("cudnnHandle_t"), 0)
            except errors.CudnnError as error:
                error = pickle.loads(pickle.dumps(error))
                return [type(error).__name__, error.function, error.status, error.text, str(error)]
        statuses = [1, 1001, 1008, 2000, 2012, 3000, 3014, 3999, 4000, 4004, 5000, 5004, 6001, 6123]
        report([[status, *attempt(status)] for status in statuses])
        """
    )
    assert len(found) == 14
    for status, kind, function, number, text, message in found:
        assert kind == ("CudnnNotSupportedError" if 3000 <= status < 4000 else "CudnnError")
        assert (function, number, text) == ("cudnnSetStream", status, "the stub was told to")
        assert all(word in message for word in ("cudnnSetStream", str(status), text))


def test_every_status_function_is_checked_and_the_others_are_not(run: Run) -> None:
    unchecked = run(
        """
        chooser = stub_cudnn.Chooser(stub_cudnn.enums(stub_cudnn.include_folders()[0]))
        unchecked = []
        for prototype in stub_cudnn.prototypes(stub_cudnn.include_folders()[0]).values():
            chosen = [chooser.choose(kind)[0] for kind, _ in prototype.parameters]
            stub.status.value = 2000
            try:
                getattr(cudnn, prototype.name)(*chosen)
                unchecked.append(prototype.name)
            except errors.CudnnError as error:
                assert error.function == prototype.name and error.status == 2000
        report(unchecked)
        """
    )
    checks = {f"cudnn{part}VersionCheck" for part in ("Graph", "Ops", "Cnn", "Adv", "SubquadraticOps")}
    plain = {"cudnnGetVersion", "cudnnGetMaxDeviceVersion", "cudnnGetCudartVersion", "cudnnGetErrorString"}
    # The stub's version checks always succeed, as loading needs them.
    assert set(unchecked) == checks | plain | {"cudnnGetLastErrorString"}


def test_a_missing_function_fails_when_called(tmp_path: Path) -> None:
    found = runner(built(tmp_path, WITHOUT, "-DSTUB_VERSION=90000"))(
        """
        size = c_size_t()
        handle = opaque("cudnnHandle_t")
        plan = opaque("cudnnBackendDescriptor_t")
        cudnn.cudnnSetStream(handle, 5)
        report([
            cudnn.cudnnGetVersion(),
            failure(lambda: cudnn.cudnnGetExecutionPlanWorkspaceSize(handle, plan, plan, byref(size))),
            failure(lambda: cudnn.cudnnCausalConv1dForward(0, 0, 0, 0, 0, 1, 1, 1, 2, 0, 0)),
            failure(lambda: cudnn.cudnnGnnAggSimpleForward(0, None, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0)),
        ])
        """
    )
    assert found[0] == 90000
    for name, since, (kind, message, calls) in zip(
        WITHOUT, ("9.23.0", "", "9.22.0"), found[1:2] + found[3:] + found[2:3], strict=True
    ):
        assert kind == "CudnnNotSupportedError"
        assert name in message
        assert since in message
        assert "9.0.0" in message
        assert calls == 0


def test_numbers_become_the_scaling_type_in_every_function(run: Run) -> None:
    """alpha=1.5 is a double for double tensors and a float for all others, wherever there is an alpha."""
    seen = run(
        """
        import inspect
        from flcuda.cudnn import bindings, library
        headers = stub_cudnn.include_folders()[0]
        chooser = stub_cudnn.Chooser(stub_cudnn.enums(headers))
        seen = []
        for prototype in stub_cudnn.prototypes(headers).values():
            argtypes = inspect.getclosurevars(getattr(bindings, prototype.name)).nonlocals["argtypes"]
            places = [index for index, argtype in enumerate(argtypes) if isinstance(argtype, library.Scaling)]
            for data_type in (cudnn.CUDNN_DATA_FLOAT, cudnn.CUDNN_DATA_DOUBLE, cudnn.CUDNN_DATA_HALF) if places else ():
                if prototype.name == "cudnnSetTensor":
                    continue
                for offset, make in ((1.5, float), (3, int)):
                    chosen = [chooser.choose(kind)[0] for kind, _ in prototype.parameters]
                    for place in places:
                        chosen[place] = make(place + offset)
                    stub.data_type.value = data_type
                    stub.see.value = 8
                    getattr(cudnn, prototype.name)(*chosen)
                    for place in places:
                        double = data_type == cudnn.CUDNN_DATA_DOUBLE
                        expected = struct.pack("d" if double else "f", place + offset)
                        assert stub.seen(place, len(expected)) == expected, (prototype.name, data_type, place)
                        seen.append(prototype.name)
        report(sorted(set(seen)))
        """
    )
    assert {"cudnnConvolutionForward", "cudnnTransformFilter", "cudnnOpTensor", "cudnnScaleTensor"} <= set(seen)
    assert len(seen) >= 30


def test_typed_numbers_are_checked_and_pointers_are_not(run: Run) -> None:
    found = run(
        """
        handle, y_desc = opaque("cudnnHandle_t"), opaque("cudnnTensorDescriptor_t")
        def scale(alpha, data_type):
            stub.data_type.value = data_type
            stub.see.value = 8
            cudnn.cudnnScaleTensor(handle, y_desc, 64, alpha)
            return stub.seen(3, 8)
        f, d, h = cudnn.CUDNN_DATA_FLOAT, cudnn.CUDNN_DATA_DOUBLE, cudnn.CUDNN_DATA_HALF
        for alpha in (np.float32(0.1), c_float(0.1), np.array(0.1, np.float32), np.array([0.1], np.float32)):
            for data_type in (f, h):
                assert scale(alpha, data_type)[:4] == struct.pack("f", 0.1)
        for alpha in (np.float64(0.1), c_double(0.1), np.array(0.1)):
            assert scale(alpha, d) == struct.pack("d", 0.1)
        # An explicit pointer is C's affair.
        assert scale(byref(c_double(0.1)), f) == struct.pack("d", 0.1)
        assert scale(ctypes.pointer(c_float(0.1)), d)[:4] == struct.pack("f", 0.1)
        assert scale((c_double * 1)(0.1), f) == struct.pack("d", 0.1)
        assert scale(float("inf"), f)[:4] == struct.pack("f", float("inf"))
        assert scale(True, d) == struct.pack("d", 1.0)
        mistakes = [(np.float64(0.1), f), (np.float32(0.1), d), (c_double(0.1), h), (c_float(0.1), d), (np.ones(2), d),
                    (np.float16(0.1), h), (np.int32(1), f), (np.array(0.1), f), (1j, f), ("1", f), ([1.0], f)]
        too_large = [(1e39, f), (10**400, d)]
        def attempt(alpha, data_type):
            try:
                scale(alpha, data_type)
            except (TypeError, ValueError) as error:
                return [type(error).__name__, str(error), stub.name]
        report([[attempt(*m) for m in mistakes], [attempt(*m) for m in too_large]])
        """
    )
    for kind, message, last in found[0]:
        assert kind == "TypeError"
        assert message.startswith("cudnnScaleTensor: alpha: expected ")
        assert last in ("cudnnGetTensorNdDescriptor", "cudnnScaleTensor")
    for kind, message, _ in found[1]:
        assert kind == "ValueError"
        assert "does not fit" in message


def test_a_fill_value_has_the_tensor_s_own_type(run: Run) -> None:
    run(
        """
        handle, y_desc = opaque("cudnnHandle_t"), opaque("cudnnTensorDescriptor_t")
        stub.see.value = 8
        types = {"FLOAT": np.float32, "DOUBLE": np.float64, "HALF": np.float16, "BFLOAT16": ml_dtypes.bfloat16,
                 "INT8": np.int8, "INT32": np.int32, "UINT8": np.uint8, "INT64": np.int64}
        for name, dtype in types.items():
            stub.data_type.value = getattr(cudnn, f"CUDNN_DATA_{name}")
            for value in (3, dtype(3), np.array(3, dtype)):
                cudnn.cudnnSetTensor(handle, y_desc, 64, value)
                expected = np.array(3, dtype).tobytes()
                assert stub.seen(3, len(expected)) == expected, (name, value)
        stub.data_type.value = cudnn.CUDNN_DATA_INT8
        assert failure(lambda: cudnn.cudnnSetTensor(handle, y_desc, 64, 128))[0] == "ValueError"
        assert failure(lambda: cudnn.cudnnSetTensor(handle, y_desc, 64, 0.5))[0] == "ValueError"
        assert failure(lambda: cudnn.cudnnSetTensor(handle, y_desc, 64, np.float32(3)))[0] == "TypeError"
        stub.data_type.value = cudnn.CUDNN_DATA_INT8x32
        assert failure(lambda: cudnn.cudnnSetTensor(handle, y_desc, 64, 3))[0] == "TypeError"
        report(None)
        """
    )


def test_sequences_become_arrays(run: Run) -> None:
    run(
        """
        desc = opaque("cudnnTensorDescriptor_t")
        dims, strides = [2, -3, 2**31 - 1, -(2**31)], (5, 6, 7, 8)
        stub.see.value = 16
        def seen(index, code): return list(struct.unpack("4" + code, stub.seen(index, 16)))
        for made in (list, tuple, lambda values: np.array(values, np.int32), lambda values: (c_int * 4)(*values),
                     lambda values: [np.int64(value) for value in values]):
            cudnn.cudnnSetTensorNdDescriptor(desc, cudnn.CUDNN_DATA_HALF, 4, made(dims), made(strides))
            assert (seen(3, "i"), seen(4, "i")) == (dims, list(strides))
        cudnn.cudnnSetTensorNdDescriptor(desc, cudnn.CUDNN_DATA_HALF, 4, range(4), None)
        assert seen(3, "i") == [0, 1, 2, 3] and stub.argument(4) == bytes(8)
        transform = opaque("cudnnTensorTransformDescriptor_t")
        fold = [0, 1, 2**32 - 1, 2**31]
        cudnn.cudnnSetTensorTransformDescriptor(transform, 4, cudnn.CUDNN_TENSOR_NHWC, dims, strides, fold, 1)
        assert seen(5, "I") == fold
        axes = [cudnn.CUDNN_SEQDATA_VECT_DIM, cudnn.CUDNN_SEQDATA_BATCH_DIM, 0, 2]
        sequence = opaque("cudnnSeqDataDescriptor_t")
        cudnn.cudnnSetSeqDataDescriptor(sequence, 0, 4, dims, axes, 4, dims, None)
        assert seen(4, "i") == [int(axis) for axis in axes]
        report(None)
        """
    )


def test_python_objects_become_pointers(run: Run) -> None:
    run(
        """
        class Memory:
            ptr = 0x7F12_3456_789A_BC00
        class Array:  # what of CuPy's array the binding uses
            data = Memory()
        class Owner:
            _as_parameter_ = opaque("cudnnTensorDescriptor_t", 0x7F00_1111_2222_3330)
        handle, numbers = opaque("cudnnHandle_t"), np.arange(6.0).reshape(2, 3)
        stub.see.value = 0
        def arrived(index): return struct.unpack("Q", stub.argument(index))[0]
        for made in (Array(), Memory(), Memory.ptr, np.uint64(Memory.ptr), c_void_p(Memory.ptr)):
            cudnn.cudnnScaleTensor(handle, Owner(), made, byref(c_double(1)))
            assert (arrived(1), arrived(2)) == (0x7F00_1111_2222_3330, Memory.ptr)
        cudnn.cudnnScaleTensor(handle, None, None, None)
        assert (arrived(1), arrived(2), arrived(3)) == (0, 0, 0)
        for stream in (Memory(), Memory.ptr, cudnn.cudaStream_t(Memory.ptr)):
            cudnn.cudnnSetStream(handle, stream)
            assert arrived(1) == Memory.ptr
        cudnn.cudnnSetStream(handle, None)
        assert arrived(1) == 0
        descriptor = opaque("cudnnBackendDescriptor_t")
        def attribute(elements): cudnn.cudnnBackendSetAttribute(descriptor, 0, cudnn.CUDNN_TYPE_INT64, 2**40, elements)
        attribute(numbers)
        assert arrived(4) == numbers.ctypes.data and struct.unpack("q", stub.argument(3))[0] == 2**40
        one = c_int64(7)
        for made in (one, byref(one), ctypes.pointer(one)):
            attribute(made)
            assert arrived(4) == ctypes.addressof(one)
        for made in (byref(descriptor), (cudnn.cudnnBackendDescriptor_t * 2)(descriptor)):
            attribute(made)
        pack = opaque("cudnnFusedOpsConstParamPack_t")
        cudnn.cudnnSetFusedOpsConstParamPackAttribute(pack, cudnn.CUDNN_PARAM_XDESC, Owner())  # the descriptor itself
        assert arrived(2) == 0x7F00_1111_2222_3330
        outputs, size = np.zeros(8, np.int32), np.zeros((), np.uint64)
        number, code = c_int(), ctypes.c_uint()
        cudnn.cudnnGetTensorNdDescriptor(Owner(), 8, byref(code), number, outputs, outputs[4:])
        assert [arrived(2), arrived(3)] == [ctypes.addressof(code), ctypes.addressof(number)]
        assert [arrived(4), arrived(5)] == [outputs.ctypes.data, outputs.ctypes.data + 16]
        cudnn.cudnnGetTensorSizeInBytes(Owner(), size)
        assert arrived(1) == size.ctypes.data
        cudnn.cudnnScaleTensor(yDesc=Owner(), handle=handle, alpha=None, y=5)
        assert [arrived(index) for index in range(1, 4)] == [0x7F00_1111_2222_3330, 5, 0]
        report(None)
        """
    )


def test_mistakes_are_named_before_anything_is_called(run: Run) -> None:
    found = run(
        """
        desc, filt = opaque("cudnnTensorDescriptor_t"), opaque("cudnnFilterDescriptor_t")
        handle, backend = opaque("cudnnHandle_t"), opaque("cudnnBackendDescriptor_t")
        frozen = np.zeros(8, np.int32)
        frozen.flags.writeable = False
        int4 = [1, 2, 3, 4]
        conv, seq = opaque("cudnnConvolutionDescriptor_t"), opaque("cudnnSeqDataDescriptor_t")
        rnn = opaque("cudnnRNNDataDescriptor_t")
        class Owner: _as_parameter_ = desc
        def nd(*arguments): return lambda: cudnn.cudnnSetTensorNdDescriptor(*arguments)
        def attribute(elements): return lambda: cudnn.cudnnBackendSetAttribute(backend, 0, 3, 1, elements)
        def nd_out(dims): return lambda: cudnn.cudnnGetTensorNdDescriptor(desc, 8, c_int(), c_int(), dims, None)
        cases = {
            "tensorDesc 1": nd(filt, 0, 4, int4, int4),
            "tensorDesc 2": nd(handle, 0, 4, int4, int4),
            "tensorDesc 3": nd(0x1234, 0, 4, int4, int4),
            "dataType 1": nd(desc, cudnn.CUDNN_TENSOR_NCHW, 4, int4, int4),
            "dataType 2": nd(desc, 0.0, 4, int4, int4),
            "dataType 3": nd(desc, None, 4, int4, int4),
            "dataType 4 value": nd(desc, 999, 4, int4, int4),
            "dataType 5 value": nd(desc, -1, 4, int4, int4),
            "nbDims 1 value": nd(desc, 0, 2**31, int4, int4),
            "nbDims 2 value": nd(desc, 0, -(2**31) - 1, int4, int4),
            "nbDims 3": nd(desc, 0, 4.0, int4, int4),
            "nbDims 4": nd(desc, 0, None, int4, int4),
            "dimA 1 value": nd(desc, 0, 4, [1, 2, 3, 2**31], int4),
            "dimA 2": nd(desc, 0, 4, [1, 2, 3, 4.0], int4),
            "dimA 3": nd(desc, 0, 4, np.array(int4, np.int64), int4),
            "dimA 4 value": nd(desc, 0, 4, np.zeros(8, np.int32)[::2], int4),
            "dimA 10 value": nd(desc, 0, 4, [1, 2, 3], int4),
            "dimA 11 value": nd(desc, 0, np.int64(9), np.ones(8, np.int32), [1] * 9),
            "strideA 1 value": nd(desc, 0, 4, int4, (c_int * 3)()),
            "dilationA 1 value": lambda: cudnn.cudnnSetConvolutionNdDescriptor(conv, 3, [0] * 3, [1] * 3, [1, 1], 1, 0),
            "seqLengthArray 1 value": lambda: cudnn.cudnnSetSeqDataDescriptor(seq, 0, 4, int4, int4, 5, int4, None),
            "seqLengthArray 2 value": lambda: cudnn.cudnnSetRNNDataDescriptor(rnn, 0, 0, 4, 2, 9, [1], None),
            "dimA 5": nd(desc, 0, 4, "1234", int4),
            "dimA 6": nd(desc, 0, 4, 4, int4),
            "dimA 7": nd_out(int4),
            "dimA 8 value": nd_out(frozen),
            "dimA 9": nd_out((c_int64 * 8)()),
            "size 1": lambda: cudnn.cudnnGetTensorSizeInBytes(desc, byref(c_int())),
            "size 2": lambda: cudnn.cudnnGetTensorSizeInBytes(desc, np.zeros(1, np.int64)),
            "y 1": lambda: cudnn.cudnnScaleTensor(handle, desc, np.zeros(4), None),
            "y 2": lambda: cudnn.cudnnScaleTensor(handle, desc, "memory", None),
            "y 3 value": lambda: cudnn.cudnnScaleTensor(handle, desc, -1, None),
            "y 4 value": lambda: cudnn.cudnnScaleTensor(handle, desc, 2**64, None),
            "y 5": lambda: cudnn.cudnnScaleTensor(handle, desc, b"bytes", None),
            "y 6": lambda: cudnn.cudnnScaleTensor(handle, desc, desc, None),
            "y 7": lambda: cudnn.cudnnScaleTensor(handle, desc, Owner(), None),
            "streamId 1": lambda: cudnn.cudnnSetStream(handle, "stream"),
            "arrayOfElements 1": attribute(5),
            "arrayOfElements 2": attribute([5]),
            "arrayOfElements 3 value": attribute(np.zeros((4, 4)).T),
            "arrayOfElements 4": attribute(backend),
            "arrayOfElements 5": attribute(handle),
            "attributeName 1 value": lambda: cudnn.cudnnBackendSetAttribute(backend, 99999, 3, 1, None),
            "descriptorType 1 value": lambda: cudnn.cudnnBackendCreateDescriptor(999, byref(backend)),
            "fptr 1": lambda: cudnn.cudnnSetCallback(0, None, print),
            "tensorDesc 4": lambda: cudnn.cudnnCreateTensorDescriptor(byref(filt)),
        }
        report({name: failure(call) for name, call in cases.items()})
        """
    )
    for name, (kind, message, calls) in found.items():
        parameter, *rest = name.split()
        assert kind == ("ValueError" if "value" in rest else "TypeError"), (name, kind, message)
        assert f": {parameter}: " in message, (name, message)
        assert calls == 0, name


def test_the_number_of_arguments_is_checked(run: Run) -> None:
    """ctypes passes surplus arguments on in silence."""
    few, many, unknown = run(
        """
        handle = opaque("cudnnHandle_t")
        report([
            failure(lambda: cudnn.cudnnSetStream(handle)),
            failure(lambda: cudnn.cudnnSetStream(handle, 0, 0)),
            failure(lambda: cudnn.cudnnSetStream(handle, stream=0)),
        ])
        """
    )
    for kind, message, calls in (few, many, unknown):
        assert kind == "TypeError"
        assert "cudnnSetStream" in message
        assert "streamId" in message
        assert calls == 0


def test_a_newer_library_may_have_newer_enum_values(tmp_path: Path) -> None:
    found = runner(built(tmp_path, (), "-DSTUB_VERSION=99900"))(
        """
        desc = opaque("cudnnTensorDescriptor_t")
        cudnn.cudnnSetTensorNdDescriptor(desc, 999, 1, [1], [1])
        assert struct.unpack("i", stub.argument(1))[0] == 999
        report(failure(lambda: cudnn.cudnnSetTensorNdDescriptor(desc, cudnn.CUDNN_TENSOR_NCHW, 1, [1], [1])))
        """
    )
    assert found[0] == "TypeError"


def test_callbacks_stay_alive(run: Run) -> None:
    run(
        """
        import weakref
        callback = cudnn.cudnnCallback_t(lambda *_: None)
        alive = weakref.ref(callback)
        cudnn.cudnnSetCallback(cudnn.CUDNN_SEV_ERROR_EN, None, callback)
        del callback
        gc.collect()
        assert alive() is not None
        cudnn.cudnnSetCallback(0, None, None)
        report(None)
        """
    )


def test_threads_bind_and_call_at_once(run: Run) -> None:
    run(
        """
        import threading
        failed = []
        start = threading.Barrier(8)
        def work(number):
            start.wait()
            try:
                for _ in range(50):
                    cudnn.cudnnSetStream(opaque("cudnnHandle_t"), number)
                    cudnn.cudnnGetVersion()
            except BaseException as error:
                failed.append(error)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not failed, failed
        report(None)
        """
    )
