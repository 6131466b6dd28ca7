// Batch normalisation, with what follows it in one pass: another tensor added (raw, or normalised too) and ReLU. x, y, dx,
// dy, residual are dense (outer, channels, inner); every vector is (channels), in float (double for double). How blocks go
// through memory, and partial and ticket: batch_norm.cuh. Passes over what an earlier pass has read go backwards, so that
// they begin with what is still in the cache.
//
// mask has a byte for each memory access of V elements in order, bit i for element i: set where the gradient passes ReLU.
// Kernels exist for the type, order and width that the macros at the end name.

#include "batch_norm.cuh"

extern "C" __global__ void batch_norm_inverse_f32(float* out, const float* variance, double eps, int64 channels) {
  GRID_STRIDE(i, channels) { out[i] = 1.0f / sqrt(variance[i] + (float)eps); }
}
extern "C" __global__ void batch_norm_inverse_f64(double* out, const double* variance, double eps, int64 channels) {
  GRID_STRIDE(i, channels) { out[i] = 1.0 / sqrt(variance[i] + eps); }
}

enum Residual { NONE, RAW, NORMALISED };

// Of N channels: y = (x - mean) * factor + bias. The mean is taken off first, since it may be large.
template <class A, int N>
struct Norm {
  A mean[N], factor[N], bias[N];
  __device__ void load(const A* weights, const A* biases, const A* means, const A* inverses, int64 channel) {
    A weight[N];
    load_values(mean, means + channel);
    load_values(factor, inverses + channel);
    load_values(weight, weights + channel);
    load_values(bias, biases + channel);
#pragma unroll
    for (int c = 0; c < N; ++c) factor[c] *= weight[c];
  }
  __device__ A operator()(A x, int c) const { return (x - mean[c]) * factor[c] + bias[c]; }
};

// What a channel's vectors are called in the kernels' arguments.
template <class A>
struct Vectors {
  const A *weight, *bias, *mean, *inverse;
};

// --- forward ----------------------------------------------------------------------------------------------------------

template <class T, int V, bool NHWC, int U, int THREADS>
__device__ void statistics(Accumulator<T>* partial, uint32* ticket, const StatisticsOut<T>& out, const T* x, int64 outer,
                           int64 channels, int64 inner, int lanes) {
  Walk<V, NHWC, U, THREADS> walk(outer, channels, inner, lanes, gridDim.y);
  out.prefetch(ticket, walk);
  reduce_moments<T>(partial, x, walk, lanes);
  out.finish(partial, ticket, walk);
}

template <class T, int V, bool NHWC, int U, Residual RESIDUAL>
__device__ void apply(T* y, uint8* mask, const T* x, const Vectors<Accumulator<T>>& vectors, const T* residual,
                      const Vectors<Accumulator<T>>& other, int relu, int64 outer, int64 channels, int64 inner,
                      int lanes) {
  typedef Accumulator<T> A;
  const int OWN = NHWC ? V : 1;
  Walk<V, NHWC, U, NORM_THREADS> walk(outer, channels, inner, lanes, 1);
  if (!walk.active()) return;
  Norm<A, OWN> norm, second;
  norm.load(vectors.weight, vectors.bias, vectors.mean, vectors.inverse, walk.channel);
  if (RESIDUAL == NORMALISED) second.load(other.weight, other.bias, other.mean, other.inverse, walk.channel);
  int64 chunks = walk.chunks();
  for (int64 chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
    int64 offset[U];
    int n = walk.seek((chunks - 1 - chunk) * U, offset);
    Pack<T, V> read[U], added[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u < n) {
        read[u] = load_pack<T, V>(x + offset[u]);
        if (RESIDUAL != NONE) added[u] = load_pack<T, V>(residual + offset[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u >= n) break;
      Pack<T, V> out;
      uint32 bits = 0;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        int c = NHWC ? i : 0;
        A value = norm(element(read[u], i), c);
        if (RESIDUAL == RAW) value += element(added[u], i);
        if (RESIDUAL == NORMALISED) value += second(element(added[u], i), c);
        bool off = relu && value <= A(0);  // NaN stays
        if (!off) bits |= 1u << i;
        out.e[i] = narrow<T>(off ? A(0) : value);
      }
      store_pack<T, V>(y + offset[u], out);
      if (RESIDUAL != NONE && mask) mask[(uint64)offset[u] / V] = (uint8)bits;
    }
  }
}

// --- backward ---------------------------------------------------------------------------------------------------------

// First pass. dz = (dy + dy_2) where ReLU passes, rounded to T; its sums, and those of dz * (x - mean). Without a residual
// dy_2 and dz are not used and ReLU is known from x; else by mask, null when there was none. dy_2 and dz may be null.
template <class T, int V, bool NHWC, int U, int THREADS, Residual RESIDUAL>
__device__ void sums(T* dz, Accumulator<T>* partial, uint32* ticket, const GradientOut<Accumulator<T>>& out,
                     const GradientOut<Accumulator<T>>& other_out, const T* dy, const T* dy_2, const T* x,
                     const Vectors<Accumulator<T>>& vectors, const T* residual, const Accumulator<T>* residual_mean,
                     const uint8* mask, int relu, int64 count, int64 outer, int64 channels, int64 inner, int lanes) {
  typedef Accumulator<T> A;
  const int OWN = NHWC ? V : 1, VALUES = RESIDUAL == NORMALISED ? 3 : 2;
  Walk<V, NHWC, U, THREADS> walk(outer, channels, inner, lanes, gridDim.y);
  out.prefetch(ticket, walk);
  if (RESIDUAL == NORMALISED) other_out.prefetch(ticket, walk);
  A sum[VALUES][OWN];
#pragma unroll
  for (int value = 0; value < VALUES; ++value) {
#pragma unroll
    for (int c = 0; c < OWN; ++c) sum[value][c] = A(0);
  }
  if (walk.active()) {
    Norm<A, OWN> norm;
    A mean[OWN], second_mean[OWN];
    if (RESIDUAL == NONE) {
      norm.load(vectors.weight, vectors.bias, vectors.mean, vectors.inverse, walk.channel);
    }
    load_values(mean, vectors.mean + walk.channel);
    if (RESIDUAL == NORMALISED) load_values(second_mean, residual_mean + walk.channel);
    for (int64 row = blockIdx.y; row * walk.step < walk.count; row += U * (int64)gridDim.y) {
      int64 offset[U];
      int n = walk.seek(row, offset);
      Pack<T, V> read[U], gradient[U], gradient_2[U], added[U];
      uint32 bits[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u < n) {
          gradient[u] = load_pack<T, V>(dy + offset[u]);
          read[u] = load_pack<T, V>(x + offset[u]);
          bits[u] = 0xffffffffu;
          if (RESIDUAL != NONE) {
            if (dy_2) gradient_2[u] = load_pack<T, V>(dy_2 + offset[u]);
            if (mask) bits[u] = mask[(uint64)offset[u] / V];
          }
          if (RESIDUAL == NORMALISED) added[u] = load_pack<T, V>(residual + offset[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u >= n) break;
        Pack<T, V> masked;
#pragma unroll
        for (int i = 0; i < V; ++i) {
          int c = NHWC ? i : 0;
          A value = element(gradient[u], i);
          A distance;
          if (RESIDUAL == NONE) {
            distance = element(read[u], i) - norm.mean[c];
            if (relu && norm(element(read[u], i), c) <= A(0)) value = A(0);
          } else {
            distance = element(read[u], i) - mean[c];
            if (dy_2) value += element(gradient_2[u], i);
            if (!(bits[u] >> i & 1u)) value = A(0);
            masked.e[i] = narrow<T>(value);
            value = widen(masked.e[i]);
          }
          sum[0][c] += value;
          sum[1][c] += value * distance;
          if (RESIDUAL == NORMALISED) sum[VALUES - 1][c] += value * (element(added[u], i) - second_mean[c]);
        }
        if (RESIDUAL != NONE && dz) store_pack<T, V>(dz + offset[u], masked);
      }
    }
  }
  reduce_sums<A, VALUES>(partial, sum, walk, lanes);
  if (!is_last_block(ticket + blockIdx.x, gridDim.y)) return;
  A total[VALUES];
  combine_sums<A, VALUES>(total, partial, walk);
  int64 channel = (int64)blockIdx.x * walk.slots + threadIdx.x;
  if (threadIdx.x >= walk.slots || channel >= channels) return;
  out.write(total[0], total[1], channel, channels, count);
  if (RESIDUAL == NORMALISED) other_out.write(total[0], total[VALUES - 1], channel, channels, count);
}

// Of N channels: dx = (dz - mean of dz - (x - mean) * slope) * factor.
template <class A, int N>
struct Slope {
  A mean[N], factor[N], mean_dz[N], slope[N];
  __device__ void load(const A* weights, const A* means, const A* inverses, const A* gradient_means, int64 channel,
                       int64 channels) {
    A weight[N];
    load_values(mean, means + channel);
    load_values(factor, inverses + channel);
    load_values(weight, weights + channel);
    load_values(mean_dz, gradient_means + channel);
    load_values(slope, gradient_means + channels + channel);
#pragma unroll
    for (int c = 0; c < N; ++c) {
      slope[c] *= factor[c];
      factor[c] *= weight[c];
    }
  }
  __device__ A operator()(A dz, A x, int c) const {
    return (dz - mean_dz[c] - (x - mean[c]) * slope[c]) * factor[c];
  }
};

// Second pass. With relu dz is dy where ReLU passes, which is known from x. dresidual is that of a normalised residual.
template <class T, int V, bool NHWC, int U, Residual RESIDUAL>
__device__ void backward(T* dx, T* dresidual, const T* dz, const T* x, const Vectors<Accumulator<T>>& vectors,
                         const Accumulator<T>* means, const T* residual, const Vectors<Accumulator<T>>& other,
                         const Accumulator<T>* other_means, int relu, int64 outer, int64 channels, int64 inner,
                         int lanes) {
  typedef Accumulator<T> A;
  const int OWN = NHWC ? V : 1;
  Walk<V, NHWC, U, NORM_THREADS> walk(outer, channels, inner, lanes, 1);
  if (!walk.active()) return;
  Slope<A, OWN> slope, second;
  A bias[OWN];
  slope.load(vectors.weight, vectors.mean, vectors.inverse, means, walk.channel, channels);
  if (RESIDUAL == NONE) load_values(bias, vectors.bias + walk.channel);
  if (RESIDUAL == NORMALISED) {
    second.load(other.weight, other.mean, other.inverse, other_means, walk.channel, channels);
  }
  int64 chunks = walk.chunks();
  for (int64 chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
    int64 offset[U];
    int n = walk.seek((chunks - 1 - chunk) * U, offset);
    Pack<T, V> read[U], gradient[U], added[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u < n) {
        gradient[u] = load_pack<T, V>(dz + offset[u]);
        read[u] = load_pack<T, V>(x + offset[u]);
        if (RESIDUAL == NORMALISED) added[u] = load_pack<T, V>(residual + offset[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u >= n) break;
      Pack<T, V> out, second_out;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        int c = NHWC ? i : 0;
        A value = element(gradient[u], i), place = element(read[u], i);
        if (RESIDUAL == NONE && relu && (place - slope.mean[c]) * slope.factor[c] + bias[c] <= A(0)) value = A(0);
        out.e[i] = narrow<T>(slope(value, place, c));
        if (RESIDUAL == NORMALISED) second_out.e[i] = narrow<T>(second(value, element(added[u], i), c));
      }
      store_pack<T, V>(dx + offset[u], out);
      if (RESIDUAL == NORMALISED) store_pack<T, V>(dresidual + offset[u], second_out);
    }
  }
}

// --- instances --------------------------------------------------------------------------------------------------------

#define NORM_KERNEL extern "C" __global__ void __launch_bounds__(NORM_THREADS, 2)
#define REDUCTION_KERNEL(NHWC) extern "C" __global__ void __launch_bounds__(REDUCTION<NHWC>, REDUCTION_BLOCKS)
#define VECTORS(A, prefix) const A *prefix##weight, const A *prefix##bias, const A *prefix##mean, const A *prefix##inverse
#define VECTORS_VALUES(prefix) {prefix##weight, prefix##bias, prefix##mean, prefix##inverse}
#define GRADIENT(A, prefix) A *prefix##dweight, A *prefix##dbias, A *prefix##means, int prefix##accumulate
#define GRADIENT_VALUES(prefix) {prefix##dweight, prefix##dbias, prefix##means, prefix##inverse, prefix##accumulate}
#define SIZES int64 outer, int64 channels, int64 inner, int lanes
#define SIZES_VALUES outer, channels, inner, lanes

// Accesses at once, as many as there are registers for.
#define FEW(V) (V == 8 ? 2 : 4)
#define SUM_FEW(NHWC) (NHWC ? 4 : 2)

// V: of most passes; W: where there are two norms. M: how many times more accesses at once.
#define NORM_INSTANCES(name, T, NHWC, V, W, M)                                                                         \
  REDUCTION_KERNEL(NHWC) batch_norm_statistics_##name(                                                                 \
      Accumulator<T>* saved_mean, Accumulator<T>* saved_inv_variance, Accumulator<T>* pending_mean,                    \
      Accumulator<T>* pending_var, int64* num_batches, Accumulator<T>* partial, uint32* ticket, const T* x,            \
      double momentum, double eps, SIZES) {                                                                            \
    statistics<T, V, NHWC, 2 * SUM_FEW(NHWC) * M, REDUCTION<NHWC>>(                                                    \
        partial, ticket, {saved_mean, saved_inv_variance, pending_mean, pending_var, num_batches, momentum, eps}, x,   \
        SIZES_VALUES);                                                                                                 \
  }                                                                                                                    \
  NORM_KERNEL batch_norm_apply_##name(T* y, const T* x, VECTORS(Accumulator<T>, ), int relu, SIZES) {                  \
    apply<T, V, NHWC, 8 * M, NONE>(y, nullptr, x, VECTORS_VALUES(), nullptr, {}, relu, SIZES_VALUES);                  \
  }                                                                                                                    \
  NORM_KERNEL batch_norm_apply_raw_##name(T* y, uint8* mask, const T* x, VECTORS(Accumulator<T>, ), const T* residual, \
                                          int relu, SIZES) {                                                           \
    apply<T, V, NHWC, FEW(V) * M, RAW>(y, mask, x, VECTORS_VALUES(), residual, {}, relu, SIZES_VALUES);                \
  }                                                                                                                    \
  NORM_KERNEL batch_norm_apply_normalised_##name(T* y, uint8* mask, const T* x, VECTORS(Accumulator<T>, ),             \
                                                 const T* residual, VECTORS(Accumulator<T>, residual_), int relu,      \
                                                 SIZES) {                                                              \
    apply<T, W, NHWC, 4 * M, NORMALISED>(y, mask, x, VECTORS_VALUES(), residual, VECTORS_VALUES(residual_), relu,      \
                                         SIZES_VALUES);                                                                \
  }                                                                                                                    \
  REDUCTION_KERNEL(NHWC) batch_norm_sums_##name(                                                                       \
      Accumulator<T>* partial, uint32* ticket, GRADIENT(Accumulator<T>, ), const T* dy, const T* x,                    \
      VECTORS(Accumulator<T>, ), int relu, int64 count, SIZES) {                                                       \
    sums<T, V, NHWC, SUM_FEW(NHWC) * M, REDUCTION<NHWC>, NONE>(                                                        \
        nullptr, partial, ticket, GRADIENT_VALUES(), {}, dy, nullptr, x, VECTORS_VALUES(), nullptr, nullptr, nullptr,  \
        relu, count, SIZES_VALUES);                                                                                    \
  }                                                                                                                    \
  REDUCTION_KERNEL(NHWC) batch_norm_sums_raw_##name(                                                                   \
      T* dz, Accumulator<T>* partial, uint32* ticket, GRADIENT(Accumulator<T>, ), const T* dy, const T* dy_2,          \
      const T* x, VECTORS(Accumulator<T>, ), const uint8* mask, int64 count, SIZES) {                                  \
    sums<T, V, NHWC, SUM_FEW(NHWC) * M, REDUCTION<NHWC>, RAW>(                                                         \
        dz, partial, ticket, GRADIENT_VALUES(), {}, dy, dy_2, x, VECTORS_VALUES(), nullptr, nullptr, mask, 0, count,   \
        SIZES_VALUES);                                                                                                 \
  }                                                                                                                    \
  REDUCTION_KERNEL(NHWC) batch_norm_sums_normalised_##name(                                                            \
      T* dz, Accumulator<T>* partial, uint32* ticket, GRADIENT(Accumulator<T>, ),                                      \
      GRADIENT(Accumulator<T>, residual_), const T* dy, const T* dy_2, const T* x, VECTORS(Accumulator<T>, ),          \
      const T* residual, VECTORS(Accumulator<T>, residual_), const uint8* mask, int64 count, SIZES) {                  \
    sums<T, W, NHWC, 2 * M, REDUCTION<NHWC>, NORMALISED>(                                                              \
        dz, partial, ticket, GRADIENT_VALUES(), GRADIENT_VALUES(residual_), dy, dy_2, x, VECTORS_VALUES(), residual,   \
        residual_mean, mask, 0, count, SIZES_VALUES);                                                                  \
  }                                                                                                                    \
  NORM_KERNEL batch_norm_backward_##name(T* dx, const T* dz, const T* x, VECTORS(Accumulator<T>, ),                    \
                                         const Accumulator<T>* means, int relu, SIZES) {                               \
    backward<T, V, NHWC, FEW(V) * M, NONE>(dx, nullptr, dz, x, VECTORS_VALUES(), means, nullptr, {}, nullptr, relu,    \
                                      SIZES_VALUES);                                                                   \
  }                                                                                                                    \
  NORM_KERNEL batch_norm_backward_normalised_##name(                                                                   \
      T* dx, T* dresidual, const T* dz, const T* x, VECTORS(Accumulator<T>, ), const Accumulator<T>* means,            \
      const T* residual, VECTORS(Accumulator<T>, residual_), const Accumulator<T>* residual_means, SIZES) {            \
    backward<T, W, NHWC, 2 * M, NORMALISED>(dx, dresidual, dz, x, VECTORS_VALUES(), means, residual,                   \
                                            VECTORS_VALUES(residual_), residual_means, 0, SIZES_VALUES);               \
  }

#define TYPE_f32 float
#define TYPE_f64 double
#define TYPE_f16 __half
#define TYPE_bf16 __nv_bfloat16
#define IS_NHWC_nchw false
#define IS_NHWC_nhwc true
#define NORM_vector(name, T, NHWC) NORM_INSTANCES(name, T, NHWC, 16 / sizeof(T), (sizeof(T) == 8 ? 2 : 4), 1)
#define NORM_scalar(name, T, NHWC) NORM_INSTANCES(name, T, NHWC, 1, 1, 2)
#define NORM_KERNELS(width, order, kind) NORM_##width(width##_##order##_##kind, TYPE_##kind, IS_NHWC_##order)
#define NORM_EXPANDED(width, order, kind) NORM_KERNELS(width, order, kind)

#ifdef NORM_WIDTH
NORM_EXPANDED(NORM_WIDTH, NORM_ORDER, NORM_KIND)
#endif
