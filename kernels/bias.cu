// A bias a channel. y and dy are dense (outer, channels, inner); bias and out are (channels).

#include "common.cuh"

// y += bias; grid-stride, any launch shape of one dimension.
template <class T>
__device__ void bias_forward(T* y, const T* bias, int64 outer, int64 channels, int64 inner) {
  GRID_STRIDE(i, outer * channels * inner) {
    y[i] = narrow<T>(widen(y[i]) + widen(bias[channel_of(i, channels, inner)]));
  }
}

template <class T>
struct LoadElement {
  typedef Accumulator<T> Item;
  const T* dy;
  __device__ Item item(int64 index, int64) const { return widen(dy[index]); }
};

// out = (or += when accumulate) the sum of the partial sums; launch shape of combine_splits.
template <class T>
__device__ void bias_finish(T* out, const Sum<Accumulator<T>>* partial, int64 splits, int64 channels, int accumulate) {
  Sum<Accumulator<T>> total;
  int64 channel;
  if (!combine_splits(&total, &channel, partial, splits, channels)) return;
  out[channel] = narrow<T>(accumulate ? widen(out[channel]) + total.sum : total.sum);
}

#define INSTANCES(name, T)                                                                                            \
  extern "C" __global__ void bias_forward_##name(T* y, const T* bias, int64 outer, int64 channels, int64 inner) {     \
    bias_forward<T>(y, bias, outer, channels, inner);                                                                 \
  }                                                                                                                   \
  extern "C" __global__ void bias_partial_nchw_##name(Sum<Accumulator<T>>* partial, const T* dy, int64 outer,         \
                                                      int64 channels, int64 inner) {                                  \
    reduce_rows(partial, LoadElement<T>{dy}, outer, channels, inner);                                                 \
  }                                                                                                                   \
  extern "C" __global__ void bias_partial_nhwc_##name(Sum<Accumulator<T>>* partial, const T* dy, int64 outer,         \
                                                      int64 channels, int64 inner) {                                  \
    reduce_columns(partial, LoadElement<T>{dy}, outer * inner, channels);                                             \
  }                                                                                                                   \
  extern "C" __global__ void bias_finish_##name(T* out, const Sum<Accumulator<T>>* partial, int64 splits,             \
                                                int64 channels, int accumulate) {                                     \
    bias_finish<T>(out, partial, splits, channels, accumulate);                                                       \
  }
FOR_FLOAT_TYPES(INSTANCES)
