// Ops that treat each element by itself. All arrays are dense and of `size` elements unless said otherwise; the order of
// elements in memory is the caller's and the same for all arrays of a call. Outputs are overwritten (=). Any launch shape
// of one dimension (grid-stride). `add` may have out == a.

#include "common.cuh"

// y = max(x, 0), NaN stays
template <class T>
__device__ void relu_forward(T* y, const T* x, int64 size) {
  GRID_STRIDE(i, size) {
    auto value = widen(x[i]);
    y[i] = value > 0 || is_nan(value) ? x[i] : narrow<T>(decltype(value)(0));
  }
}

// dx = dy where y is not <= 0
template <class T>
__device__ void relu_backward(T* dx, const T* dy, const T* y, int64 size) {
  GRID_STRIDE(i, size) { dx[i] = widen(y[i]) <= 0 ? narrow<T>(Accumulator<T>(0)) : dy[i]; }
}

template <class T>
__device__ void add(T* out, const T* a, const T* b, int64 size) {
  GRID_STRIDE(i, size) { out[i] = narrow<T>(widen(a[i]) + widen(b[i])); }
}

template <class T>
__device__ void scale(T* out, const T* x, Accumulator<T> factor, int64 size) {
  GRID_STRIDE(i, size) { out[i] = narrow<T>(widen(x[i]) * factor); }
}

template <class T>
__device__ void fill(T* out, double value, int64 size) {
  T narrowed = narrow<T>(value);
  GRID_STRIDE(i, size) { out[i] = narrowed; }
}

// A thread takes the four elements of a Philox block. mask: 1 where kept. `threshold` is compared with a word's upper 24 bits.
template <class T>
__device__ void dropout_forward(T* y, uint8* mask, const T* x, const uint64* counter, uint64 seed, uint32 stream,
                                uint32 threshold, Accumulator<T> factor, int64 size) {
  uint64 first = counter[0];
  GRID_STRIDE(block, (size + 3) / 4) {
    uint4 words = philox(seed, first + block, stream);
    uint32 lanes[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      int64 i = 4 * block + lane;
      if (i < size) {
        bool keep = (lanes[lane] >> 8) >= threshold;
        mask[i] = keep;
        y[i] = narrow<T>(keep ? widen(x[i]) * factor : Accumulator<T>(0));
      }
    }
  }
}

template <class T>
__device__ void dropout_backward(T* dx, const T* dy, const uint8* mask, Accumulator<T> factor, int64 size) {
  GRID_STRIDE(i, size) { dx[i] = narrow<T>(mask[i] ? widen(dy[i]) * factor : Accumulator<T>(0)); }
}

#define INSTANCES(name, T)                                                                                          \
  extern "C" __global__ void relu_forward_##name(T* y, const T* x, int64 size) { relu_forward<T>(y, x, size); }     \
  extern "C" __global__ void relu_backward_##name(T* dx, const T* dy, const T* y, int64 size) {                     \
    relu_backward<T>(dx, dy, y, size);                                                                              \
  }                                                                                                                 \
  extern "C" __global__ void add_##name(T* out, const T* a, const T* b, int64 size) { add<T>(out, a, b, size); }    \
  extern "C" __global__ void scale_##name(T* out, const T* x, double factor, int64 size) {                          \
    scale<T>(out, x, (Accumulator<T>)factor, size);                                                                 \
  }                                                                                                                 \
  extern "C" __global__ void scale_by_device_value_##name(T* out, const T* x, const double* factor, int64 size) {   \
    scale<T>(out, x, (Accumulator<T>)factor[0], size);                                                              \
  }                                                                                                                 \
  extern "C" __global__ void fill_##name(T* out, double value, int64 size) { fill<T>(out, value, size); }           \
  extern "C" __global__ void dropout_forward_##name(T* y, uint8* mask, const T* x, const uint64* counter,           \
                                                    uint64 seed, uint32 stream, uint32 threshold,                   \
                                                    Accumulator<T> factor, int64 size) {                            \
    dropout_forward<T>(y, mask, x, counter, seed, stream, threshold, factor, size);                                 \
  }                                                                                                                 \
  extern "C" __global__ void dropout_backward_##name(T* dx, const T* dy, const uint8* mask, Accumulator<T> factor,  \
                                                     int64 size) {                                                  \
    dropout_backward<T>(dx, dy, mask, factor, size);                                                                \
  }
FOR_FLOAT_TYPES(INSTANCES)

// counter += blocks; one thread, after the kernels that read it.
extern "C" __global__ void advance_counter(uint64* counter, uint64 blocks) {
  if (blockIdx.x == 0 && threadIdx.x == 0) counter[0] += blocks;
}

// out = src, both strided: six nested loops, outermost first, each with its length and the strides of out and of src in
// elements. `size` is the product of the lengths. out and src must not overlap.
struct CopyLoops {
  int64 length[6], out[6], src[6];
};

template <class Out, class Src, class Convert>
__device__ void strided_copy(Out* out, const Src* src, const CopyLoops& loops, int64 size, Convert convert) {
  GRID_STRIDE(i, size) {
    int64 rest = i, to = 0, from = 0;
#pragma unroll
    for (int loop = 5; loop >= 0; --loop) {
      if (loops.length[loop] != 1) {
        int64 place;
        rest = divide(rest, loops.length[loop], &place);
        to += place * loops.out[loop];
        from += place * loops.src[loop];
      }
    }
    out[to] = convert(src[from]);
  }
}

#define SIX(prefix) int64 prefix##0, int64 prefix##1, int64 prefix##2, int64 prefix##3, int64 prefix##4, int64 prefix##5
#define SIX_VALUES(prefix) {prefix##0, prefix##1, prefix##2, prefix##3, prefix##4, prefix##5}
#define COPY(name, Out, Src, convert)                                                                       \
  extern "C" __global__ void strided_copy_##name(Out* out, const Src* src, SIX(length), SIX(step), SIX(from), \
                                                 int64 size) {                                              \
    CopyLoops loops = {SIX_VALUES(length), SIX_VALUES(step), SIX_VALUES(from)};                             \
    strided_copy(out, src, loops, size, [](Src value) { return convert; });                                 \
  }
#define COPIES_FROM(name, Src)                                               \
  COPY(f32_##name, float, Src, narrow<float>(widen(value)))                  \
  COPY(f64_##name, double, Src, narrow<double>(widen(value)))                \
  COPY(f16_##name, __half, Src, narrow<__half>(widen(value)))                \
  COPY(bf16_##name, __nv_bfloat16, Src, narrow<__nv_bfloat16>(widen(value)))
FOR_FLOAT_TYPES(COPIES_FROM)

COPY(bytes1, uint8, uint8, value)
COPY(bytes2, uint16, uint16, value)
COPY(bytes4, uint32, uint32, value)
COPY(bytes8, uint64, uint64, value)
COPY(i64_i32, int64, int, value)
