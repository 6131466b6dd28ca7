// Pooling of dense images, nchw or nhwc. Outputs are overwritten (=). Windows start at o * stride - padding; all of them
// hold at least one place of the image. Element kernels take any launch shape of one dimension (grid-stride).
// The index of a window is the place of its maximum, row * kernel_w + column: in small_indices (at most 256 places) or, when
// that is null, in large_indices. Backward passes gather: no atomics.

#include "common.cuh"

struct PoolSizes {
  int64 n, c, h, w, oh, ow, kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w;
  int nhwc;

  __device__ int64 place(int64 image, int64 channel, int64 y, int64 x, int64 height, int64 width) const {
    return nhwc ? ((image * height + y) * width + x) * c + channel : ((image * c + channel) * height + y) * width + x;
  }
  // The coordinates of element i of an array of height and width, in its memory order.
  __device__ void coordinates(int64 i, int64 height, int64 width, int64* image, int64* channel, int64* y,
                              int64* x) const {
    int64 inner, middle, outer;
    i = divide(i, nhwc ? c : width, &inner);
    i = divide(i, nhwc ? width : height, &middle);
    *image = divide(i, nhwc ? height : c, &outer);
    *channel = nhwc ? inner : outer;
    *y = nhwc ? outer : middle;
    *x = nhwc ? middle : inner;
  }
};

// The windows [first, last) along one side that hold a place.
__device__ inline void windows(int64 place, int64 kernel, int64 stride, int64 padding, int64 count, int64* first,
                               int64* last) {
  int64 padded = place + padding;
  int64 ignored;
  *first = padded < kernel ? 0 : divide(padded - kernel, stride, &ignored) + 1;
  *last = divide(padded, stride, &ignored) + 1;
  if (*last > count) *last = count;
}

// NaN wins, and of several the last; when nothing is above minus infinity the first place of the image is the maximum.
template <class T>
__device__ void max_pool_forward(T* y, uint8* small_indices, int* large_indices, const T* x, const PoolSizes& s) {
  GRID_STRIDE(i, s.n * s.c * s.oh * s.ow) {
    int64 image, channel, oy, ox;
    s.coordinates(i, s.oh, s.ow, &image, &channel, &oy, &ox);
    int64 top = oy * s.stride_h - s.padding_h, left = ox * s.stride_w - s.padding_w;
    int64 begin_h = top < 0 ? -top : 0, begin_w = left < 0 ? -left : 0;
    int64 end_h = s.h - top < s.kernel_h ? s.h - top : s.kernel_h;
    int64 end_w = s.w - left < s.kernel_w ? s.w - left : s.kernel_w;
    auto best = minus_infinity<Accumulator<T>>();
    int64 index = begin_h * s.kernel_w + begin_w;
    for (int64 ky = begin_h; ky < end_h; ++ky) {
      for (int64 kx = begin_w; kx < end_w; ++kx) {
        auto value = widen(x[s.place(image, channel, top + ky, left + kx, s.h, s.w)]);
        if (value > best || is_nan(value)) {
          best = value;
          index = ky * s.kernel_w + kx;
        }
      }
    }
    y[i] = narrow<T>(best);
    if (small_indices) {
      small_indices[i] = (uint8)index;
    } else {
      large_indices[i] = (int)index;
    }
  }
}

template <class T>
__device__ void max_pool_backward(T* dx, const T* dy, const uint8* small_indices, const int* large_indices,
                                  const PoolSizes& s) {
  GRID_STRIDE(i, s.n * s.c * s.h * s.w) {
    int64 image, channel, y, x, first_h, last_h, first_w, last_w;
    s.coordinates(i, s.h, s.w, &image, &channel, &y, &x);
    windows(y, s.kernel_h, s.stride_h, s.padding_h, s.oh, &first_h, &last_h);
    windows(x, s.kernel_w, s.stride_w, s.padding_w, s.ow, &first_w, &last_w);
    Accumulator<T> sum = 0;
    for (int64 oy = first_h; oy < last_h; ++oy) {
      for (int64 ox = first_w; ox < last_w; ++ox) {
        int64 window = s.place(image, channel, oy, ox, s.oh, s.ow);
        int64 ky = y + s.padding_h - oy * s.stride_h, kx = x + s.padding_w - ox * s.stride_w;
        int64 index = small_indices ? small_indices[window] : large_indices[window];
        if (index == ky * s.kernel_w + kx) sum += widen(dy[window]);
      }
    }
    dx[i] = narrow<T>(sum);
  }
}

// Padding counts as zeros.
template <class T>
__device__ void avg_pool_forward(T* y, const T* x, const PoolSizes& s) {
  GRID_STRIDE(i, s.n * s.c * s.oh * s.ow) {
    int64 image, channel, oy, ox;
    s.coordinates(i, s.oh, s.ow, &image, &channel, &oy, &ox);
    int64 top = oy * s.stride_h - s.padding_h, left = ox * s.stride_w - s.padding_w;
    Accumulator<T> sum = 0;
    for (int64 ky = top < 0 ? -top : 0; ky < s.kernel_h && top + ky < s.h; ++ky) {
      for (int64 kx = left < 0 ? -left : 0; kx < s.kernel_w && left + kx < s.w; ++kx) {
        sum += widen(x[s.place(image, channel, top + ky, left + kx, s.h, s.w)]);
      }
    }
    y[i] = narrow<T>(sum / Accumulator<T>(s.kernel_h * s.kernel_w));
  }
}

template <class T>
__device__ void avg_pool_backward(T* dx, const T* dy, const PoolSizes& s) {
  GRID_STRIDE(i, s.n * s.c * s.h * s.w) {
    int64 image, channel, y, x, first_h, last_h, first_w, last_w;
    s.coordinates(i, s.h, s.w, &image, &channel, &y, &x);
    windows(y, s.kernel_h, s.stride_h, s.padding_h, s.oh, &first_h, &last_h);
    windows(x, s.kernel_w, s.stride_w, s.padding_w, s.ow, &first_w, &last_w);
    Accumulator<T> sum = 0;
    for (int64 oy = first_h; oy < last_h; ++oy) {
      for (int64 ox = first_w; ox < last_w; ++ox) sum += widen(dy[s.place(image, channel, oy, ox, s.oh, s.ow)]);
    }
    dx[i] = narrow<T>(sum / Accumulator<T>(s.kernel_h * s.kernel_w));
  }
}

// y (n, c) = the mean over space. nchw: a warp an element, block a multiple of 32; nhwc: grid-stride.
template <class T>
__device__ void global_avg_pool_nchw(T* y, const T* x, int64 n, int64 c, int64 space) {
  int64 row = ((int64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= n * c) return;  // the whole warp
  Accumulator<T> sum = 0;
  for (int64 i = threadIdx.x % 32; i < space; i += 32) sum += widen(x[row * space + i]);
  for (int width = 16; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width);
  if (threadIdx.x % 32 == 0) y[row] = narrow<T>(sum / Accumulator<T>(space));
}

template <class T>
__device__ void global_avg_pool_nhwc(T* y, const T* x, int64 n, int64 c, int64 space) {
  GRID_STRIDE(i, n * c) {
    int64 channel;
    int64 image = divide(i, c, &channel);
    Accumulator<T> sum = 0;
    for (int64 place = 0; place < space; ++place) sum += widen(x[(image * space + place) * c + channel]);
    y[i] = narrow<T>(sum / Accumulator<T>(space));
  }
}

// dx is (outer, channels, inner); dy is (n, channels).
template <class T>
__device__ void global_avg_pool_backward(T* dx, const T* dy, int64 outer, int64 channels, int64 inner, int64 space) {
  GRID_STRIDE(i, outer * channels * inner) {
    int64 channel, ignored;
    int64 row = inner == 1 ? i : divide(i, inner, &ignored);
    row = divide(row, channels, &channel);
    int64 image = inner == 1 ? divide(row, space, &ignored) : row;
    dx[i] = narrow<T>(widen(dy[image * channels + channel]) / Accumulator<T>(space));
  }
}

#define SIZES                                                                                                       \
  int64 n, int64 c, int64 h, int64 w, int64 oh, int64 ow, int64 kernel_h, int64 kernel_w, int64 stride_h,           \
      int64 stride_w, int64 padding_h, int64 padding_w, int nhwc
#define SIZE_VALUES \
  PoolSizes { n, c, h, w, oh, ow, kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, nhwc }

#define INSTANCES(name, T)                                                                                            \
  extern "C" __global__ void max_pool_forward_##name(T* y, uint8* small_indices, int* large_indices, const T* x,      \
                                                     SIZES) {                                                         \
    max_pool_forward<T>(y, small_indices, large_indices, x, SIZE_VALUES);                                             \
  }                                                                                                                   \
  extern "C" __global__ void max_pool_backward_##name(T* dx, const T* dy, const uint8* small_indices,                 \
                                                      const int* large_indices, SIZES) {                              \
    max_pool_backward<T>(dx, dy, small_indices, large_indices, SIZE_VALUES);                                          \
  }                                                                                                                   \
  extern "C" __global__ void avg_pool_forward_##name(T* y, const T* x, SIZES) {                                       \
    avg_pool_forward<T>(y, x, SIZE_VALUES);                                                                           \
  }                                                                                                                   \
  extern "C" __global__ void avg_pool_backward_##name(T* dx, const T* dy, SIZES) {                                    \
    avg_pool_backward<T>(dx, dy, SIZE_VALUES);                                                                        \
  }                                                                                                                   \
  extern "C" __global__ void global_avg_pool_nchw_##name(T* y, const T* x, int64 n, int64 c, int64 space) {           \
    global_avg_pool_nchw<T>(y, x, n, c, space);                                                                       \
  }                                                                                                                   \
  extern "C" __global__ void global_avg_pool_nhwc_##name(T* y, const T* x, int64 n, int64 c, int64 space) {           \
    global_avg_pool_nhwc<T>(y, x, n, c, space);                                                                       \
  }                                                                                                                   \
  extern "C" __global__ void global_avg_pool_backward_##name(T* dx, const T* dy, int64 outer, int64 channels,         \
                                                             int64 inner, int64 space) {                              \
    global_avg_pool_backward<T>(dx, dy, outer, channels, inner, space);                                               \
  }
FOR_FLOAT_TYPES(INSTANCES)
