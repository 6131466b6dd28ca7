import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcuda import device
from flcuda.device import CPU, Device
from flcuda.errors import DeviceNotFoundError


def test_cuda_is_here() -> None:
    cupy = device.cupy()
    assert device.cuda_missing_reason() is None
    assert device.resolve(None) == device.resolve("cuda") == Device("cuda", cupy.cuda.runtime.getDevice())
    assert device.resolve("cuda:0") == Device("cuda", 0)
    with pytest.raises(DeviceNotFoundError, match="cuda:64"):
        device.resolve("cuda:64")


def test_model_travels_and_driver_is_recorded() -> None:
    cupy = device.cupy()
    model = device.device_model(Device("cuda", 0))
    assert set(model) == {"name", "sm", "sm_count", "memory"}
    assert model["sm"] == int(cupy.cuda.Device(0).compute_capability)
    assert str(model["memory"]).endswith(" GiB")
    recorded = device.driver()
    assert recorded["cuda_driver"] >= 12000
    assert recorded["cuda_runtime"] >= 12000
    assert recorded["cupy"] == cupy.__version__


def test_workspace_comes_from_the_current_allocator() -> None:
    cupy = device.cupy()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        scratch = device.workspace(1000)
        assert pool.used_bytes() >= 1000
        before = pool.used_bytes()
        assert device.workspace(0) is device.workspace(0)
        assert pool.used_bytes() == before
    assert (scratch.dtype, scratch.shape) == (np.uint8, (1000,))
    assert device.workspace(0).shape == (0,)
    with pytest.raises(ValueError, match="nbytes: -1"):
        device.workspace(-1)


def test_workspace_limit() -> None:
    _, total = device.cupy().cuda.runtime.memGetInfo()
    assert 0 < device.workspace_limit(Device("cuda", 0)) <= min(2 << 30, total // 8 + (1 << 30))


def test_device_of_and_same_device() -> None:
    cupy = device.cupy()
    there, here = cupy.zeros(3, np.float32), np.zeros(3, np.float32)
    assert device.device_of(there) == Device("cuda", 0)
    assert device.array_module(there, None) is cupy
    assert device.require_same_device(x=there, w=there, bias=None) == Device("cuda", 0)
    with pytest.raises(ValueError, match="x is on cuda:0, w is on cpu"):
        device.require_same_device(x=there, w=here)
    with pytest.raises(TypeError, match=r"CuPy, NumPy"):
        device.array_module(there, here)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=3, max_size=5).map(tuple),
    st.sampled_from(device.LAYOUTS),
    st.sampled_from(device.LAYOUTS),
    st.sampled_from(sorted(device.DTYPES)),
)
def test_layouts(shape: tuple[int, ...], before: str, after: str, dtype: str) -> None:
    a = device.empty(shape, dtype, device="cuda", layout=before)
    values = np.arange(a.size).reshape(shape).astype(device.DTYPES[dtype])
    a[...] = device.cupy().asarray(values)
    on_cpu = device.empty(shape, dtype, device=CPU, layout=before)
    assert device.element_strides(a) == device.element_strides(on_cpu)
    assert device.memory_layout(a) == device.memory_layout(on_cpu)
    b = device.to_layout(a, after)
    assert np.array_equal(b.get(), values)
    assert device.to_layout(b, after) is b
    assert not device.zeros(shape, dtype, device="cuda", layout=before).get().astype(np.float32).any()


def test_alignment() -> None:
    raw = device.cupy().zeros(256, np.uint8)
    assert [device.alignment(raw[shift:]) for shift in (0, 1, 2, 12, 16, 32)] == [32, 1, 2, 4, 16, 32]


# --- streams and capture --------------------------------------------------------------------------------------------


def test_current_stream_is_cupys() -> None:
    cupy = device.cupy()
    assert device.current_stream() == cupy.cuda.get_current_stream().ptr
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert device.current_stream() == stream.ptr


def test_capture_is_noticed() -> None:
    cupy = device.cupy()
    a = cupy.zeros(8, np.float32)
    assert not device.is_capturing()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert not device.is_capturing()
        stream.begin_capture()
        inside = device.is_capturing()
        a += 1
        graph = stream.end_capture()
        assert inside
        assert not device.is_capturing()
        graph.launch(stream)
        stream.synchronize()
    assert a.get().tolist() == [1] * 8


def test_capture_on_a_blocking_stream_is_noticed_from_the_default_one() -> None:
    cupy = device.cupy()
    a = cupy.zeros(8, np.float32)
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture()
        a += 1
    outside = device.is_capturing()
    with stream:
        graph = stream.end_capture()
    assert outside
    graph.launch(stream)
    device.synchronize(Device("cuda", 0))
    assert a.get().tolist() == [1] * 8


# --- arrays in ------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_torch_tensors_share_memory(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    t = torch.randn(2, 3, 4, 5, device="cuda").to(getattr(torch, dtype)).to(memory_format=torch.channels_last)
    a = device.asarray(t)
    assert device.is_cuda(a)
    assert a.dtype == device.DTYPES[dtype]
    assert a.data.ptr == t.data_ptr()
    assert device.element_strides(a) == t.stride()
    assert device.memory_layout(a) == "nhwc"
    assert np.array_equal(a.get().astype(np.float64), t.double().cpu().numpy())
    a[1, 2, 3, 4] = 7
    device.synchronize(Device("cuda", 0))
    assert t[1, 2, 3, 4].item() == 7


@pytest.mark.peer
def test_torch_tensor_with_gradient_is_named() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(TypeError, match=r"^x: .*detach"):
            device.asarray(torch.ones(3, device="cuda", dtype=dtype, requires_grad=True), "x")


@pytest.mark.peer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stream_handshake(dtype: str) -> None:
    """CuPy's stream waits for what torch's stream has still to do; without that it reads the old values."""
    torch = pytest.importorskip("torch")
    cupy = device.cupy()
    t = torch.zeros(1 << 20, device="cuda", dtype=getattr(torch, dtype))
    device.asarray(t).astype(np.float32)  # Compiles CuPy's kernel, which would take longer than torch sleeps.
    torch.cuda.synchronize()
    theirs = torch.cuda.Stream()
    ours = cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(theirs):
        torch.cuda._sleep(200_000_000)  # About a tenth of a second.
        t.fill_(3)
        with ours:
            a = device.asarray(t)
            copy = a.astype(np.float32)
        assert not theirs.query(), "torch was done before the copy was asked for: this test showed nothing"
    ours.synchronize()
    assert (copy.get() == 3).all()


def test_bfloat16_of_cupy_goes_through_numpy() -> None:
    a = device.empty((3, 5), "bfloat16", device="cuda")
    a[...] = 1.5
    assert a.get().dtype == ml_dtypes.bfloat16
    assert (a.get().astype(np.float32) == 1.5).all()
