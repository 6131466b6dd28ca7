// Batch normalisation. x, y, dx, dy are dense (outer, channels, inner); every vector is (channels), in float (double for
// double). Reductions run in two stages and in a fixed order, without atomics: two runs give the same bits.
// Element kernels take any launch shape of one dimension (grid-stride); the others those of common.cuh.

#include "common.cuh"

template <class T>
struct LoadElement {
  typedef Accumulator<T> Item;
  const T* x;
  __device__ Item item(int64 index, int64) const { return widen(x[index]); }
};

// num_batches, when not null, rises by one here, before the second stage reads it.
__device__ inline void count_batch(int64* num_batches) {
  if (num_batches && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && threadIdx.y == 0) num_batches[0] += 1;
}

// saved_mean and saved_inv_variance =; pending_mean and pending_var = (1 - f) * pending + f * batch when not null, with
// f = momentum, or 1 / num_batches when momentum is negative.
template <class A>
__device__ void finish_statistics(A* saved_mean, A* saved_inv_variance, A* pending_mean, A* pending_var,
                                  const int64* num_batches, const Moments<A>* partial, int64 splits, int64 channels,
                                  double momentum, double eps) {
  Moments<A> total;
  int64 channel;
  if (!combine_splits(&total, &channel, partial, splits, channels)) return;
  saved_mean[channel] = total.mean;
  saved_inv_variance[channel] = A(1) / sqrt(total.m2 / total.count + A(eps));
  if (pending_mean) {
    A factor = momentum < 0 ? A(1) / A(num_batches[0]) : A(momentum);
    pending_mean[channel] = (A(1) - factor) * pending_mean[channel] + factor * total.mean;
    pending_var[channel] = (A(1) - factor) * pending_var[channel] + factor * (total.m2 / (total.count - A(1)));
  }
}

template <class A>
__device__ void inverse(A* out, const A* variance, double eps, int64 channels) {
  GRID_STRIDE(i, channels) { out[i] = A(1) / sqrt(variance[i] + A(eps)); }
}

// y = (x - mean) * (inverse * weight) + bias: the mean is taken off first, since it may be large.
template <class T>
__device__ void apply(T* y, const T* x, const Accumulator<T>* weight, const Accumulator<T>* bias,
                      const Accumulator<T>* mean, const Accumulator<T>* inverse, int64 outer, int64 channels,
                      int64 inner) {
  GRID_STRIDE(i, outer * channels * inner) {
    int64 c = channel_of(i, channels, inner);
    y[i] = narrow<T>((widen(x[i]) - mean[c]) * (inverse[c] * weight[c]) + bias[c]);
  }
}

// dy and dy * (x - mean)
template <class T>
struct LoadGradient {
  typedef Pair<Accumulator<T>> Item;
  const T* dy;
  const T* x;
  const Accumulator<T>* mean;
  __device__ Item item(int64 index, int64 channel) const {
    Accumulator<T> gradient = widen(dy[index]);
    return Item{gradient, gradient * (widen(x[index]) - mean[channel])};
  }
};

// dweight and dbias = (or += when accumulate); means (2, channels) = the means of dy and of dy * x normalised, or zeros
// when count is 0 (constant statistics).
template <class A>
__device__ void finish_gradient(A* dweight, A* dbias, A* means, const PairSum<A>* partial, const A* inverse,
                                int64 splits, int64 channels, int64 count, int accumulate) {
  PairSum<A> total;
  int64 channel;
  if (!combine_splits(&total, &channel, partial, splits, channels)) return;
  A product = total.second * inverse[channel];
  dweight[channel] = accumulate ? dweight[channel] + product : product;
  dbias[channel] = accumulate ? dbias[channel] + total.first : total.first;
  means[channel] = count ? total.first / A(count) : A(0);
  means[channels + channel] = count ? product / A(count) : A(0);
}

template <class T>
__device__ void backward(T* dx, const T* dy, const T* x, const Accumulator<T>* weight, const Accumulator<T>* mean,
                         const Accumulator<T>* inverse, const Accumulator<T>* means, int64 outer, int64 channels,
                         int64 inner) {
  GRID_STRIDE(i, outer * channels * inner) {
    int64 c = channel_of(i, channels, inner);
    Accumulator<T> normalized = (widen(x[i]) - mean[c]) * inverse[c];
    Accumulator<T> rest = widen(dy[i]) - means[c] - normalized * means[channels + c];
    dx[i] = narrow<T>(rest * (weight[c] * inverse[c]));
  }
}

#define INSTANCES(name, T)                                                                                             \
  extern "C" __global__ void batch_norm_statistics_nchw_##name(Moments<Accumulator<T>>* partial, int64* num_batches,   \
                                                               const T* x, int64 outer, int64 channels, int64 inner) { \
    count_batch(num_batches);                                                                                          \
    reduce_rows(partial, LoadElement<T>{x}, outer, channels, inner);                                                   \
  }                                                                                                                    \
  extern "C" __global__ void batch_norm_statistics_nhwc_##name(Moments<Accumulator<T>>* partial, int64* num_batches,   \
                                                               const T* x, int64 outer, int64 channels, int64 inner) { \
    count_batch(num_batches);                                                                                          \
    reduce_columns(partial, LoadElement<T>{x}, outer * inner, channels);                                               \
  }                                                                                                                    \
  extern "C" __global__ void batch_norm_apply_##name(T* y, const T* x, const Accumulator<T>* weight,                   \
                                                     const Accumulator<T>* bias, const Accumulator<T>* mean,           \
                                                     const Accumulator<T>* inverse, int64 outer, int64 channels,       \
                                                     int64 inner) {                                                    \
    apply<T>(y, x, weight, bias, mean, inverse, outer, channels, inner);                                               \
  }                                                                                                                    \
  extern "C" __global__ void batch_norm_gradient_sums_nchw_##name(PairSum<Accumulator<T>>* partial, const T* dy,       \
                                                                  const T* x, const Accumulator<T>* mean, int64 outer, \
                                                                  int64 channels, int64 inner) {                       \
    reduce_rows(partial, LoadGradient<T>{dy, x, mean}, outer, channels, inner);                                        \
  }                                                                                                                    \
  extern "C" __global__ void batch_norm_gradient_sums_nhwc_##name(PairSum<Accumulator<T>>* partial, const T* dy,       \
                                                                  const T* x, const Accumulator<T>* mean, int64 outer, \
                                                                  int64 channels, int64 inner) {                       \
    reduce_columns(partial, LoadGradient<T>{dy, x, mean}, outer * inner, channels);                                    \
  }                                                                                                                    \
  extern "C" __global__ void batch_norm_backward_##name(                                                               \
      T* dx, const T* dy, const T* x, const Accumulator<T>* weight, const Accumulator<T>* mean,                        \
      const Accumulator<T>* inverse, const Accumulator<T>* means, int64 outer, int64 channels, int64 inner) {          \
    backward<T>(dx, dy, x, weight, mean, inverse, means, outer, channels, inner);                                      \
  }
FOR_FLOAT_TYPES(INSTANCES)

#define STATISTICS_INSTANCES(name, A)                                                                              \
  extern "C" __global__ void batch_norm_finish_statistics_##name(                                                  \
      A* saved_mean, A* saved_inv_variance, A* pending_mean, A* pending_var, const int64* num_batches,             \
      const Moments<A>* partial, int64 splits, int64 channels, double momentum, double eps) {                      \
    finish_statistics<A>(saved_mean, saved_inv_variance, pending_mean, pending_var, num_batches, partial, splits,  \
                         channels, momentum, eps);                                                                 \
  }                                                                                                                \
  extern "C" __global__ void batch_norm_inverse_##name(A* out, const A* variance, double eps, int64 channels) {    \
    inverse<A>(out, variance, eps, channels);                                                                      \
  }                                                                                                                \
  extern "C" __global__ void batch_norm_finish_gradient_##name(A* dweight, A* dbias, A* means,                     \
                                                               const PairSum<A>* partial, const A* inverse,        \
                                                               int64 splits, int64 channels, int64 count,          \
                                                               int accumulate) {                                   \
    finish_gradient<A>(dweight, dbias, means, partial, inverse, splits, channels, count, accumulate);              \
  }
STATISTICS_INSTANCES(f32, float)
STATISTICS_INSTANCES(f64, double)
