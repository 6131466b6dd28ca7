"""The ops: arrays in, arrays out, on both devices.

NumPy arrays run in `flcuda.reference`, CuPy arrays in the kernels of `kernels/` or in cuDNN, on CuPy's current stream
and device and in memory of CuPy's current allocator. No op waits for the device.
"""
