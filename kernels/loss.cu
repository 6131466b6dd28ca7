// Softmax cross-entropy. logits, probabilities and dlogits are (rows, classes), target is (rows), 64-bit. Outputs are
// overwritten (=) but for top1_count, which is added to. Sums run in a fixed order. A target that is neither a class nor
// ignore_index makes the loss and the row's gradients NaN; it is never used as an index.

#include "common.cuh"

const int THREADS = 256;

template <class A>
__device__ A block_sum(A value) {
  __shared__ A shared[THREADS];
  __syncthreads();  // a second call must not overwrite what the first one still reads
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int width = THREADS / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) shared[threadIdx.x] += shared[threadIdx.x + width];
    __syncthreads();
  }
  return shared[0];
}

// NaN wins.
template <class A>
__device__ A block_max(A value) {
  __shared__ A shared[THREADS];
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int width = THREADS / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) {
      A other = shared[threadIdx.x + width];
      if (other > shared[threadIdx.x] || is_nan(other)) shared[threadIdx.x] = other;
    }
    __syncthreads();
  }
  return shared[0];
}

// losses (rows) = each row's loss, 0 when ignored; probabilities = softmax. A block of THREADS a row.
template <class T>
__device__ void rows(Accumulator<T>* losses, Accumulator<T>* probabilities, const T* logits, const int64* target,
                     int64 classes, double label_smoothing, int64 ignore_index) {
  typedef Accumulator<T> A;
  int64 row = blockIdx.x;
  const T* x = logits + row * classes;
  A largest = minus_infinity<A>();
  for (int64 k = threadIdx.x; k < classes; k += THREADS) {
    A value = widen(x[k]);
    if (value > largest || is_nan(value)) largest = value;
  }
  largest = block_max(largest);
  A total = 0, shifted_sum = 0;
  for (int64 k = threadIdx.x; k < classes; k += THREADS) {
    A shifted = widen(x[k]) - largest;
    total += exp(shifted);
    shifted_sum += shifted;
  }
  total = block_sum(total);
  for (int64 k = threadIdx.x; k < classes; k += THREADS) {
    probabilities[row * classes + k] = exp(widen(x[k]) - largest) / total;
  }
  if (label_smoothing > 0) shifted_sum = block_sum(shifted_sum);
  if (threadIdx.x != 0) return;
  int64 label = target[row];
  if (label == ignore_index) {
    losses[row] = A(0);
  } else if (label < 0 || label >= classes) {
    losses[row] = quiet_nan<A>();
  } else {
    A smoothing = A(label_smoothing);
    A log_total = log(total);
    A loss = -(A(1) - smoothing) * (widen(x[label]) - largest - log_total);
    if (label_smoothing > 0) loss -= smoothing / A(classes) * (shifted_sum - A(classes) * log_total);
    losses[row] = loss;
  }
}

// loss (one element) = the mean over the rows that are not ignored; count (one element) = how many. One block of THREADS.
template <class A>
__device__ void mean(A* loss, int64* count, const A* losses, const int64* target, int64 rows, int64 ignore_index) {
  double sum = 0;
  int64 valid = 0;
  for (int64 row = threadIdx.x; row < rows; row += THREADS) {
    if (target[row] != ignore_index) {
      sum += losses[row];
      valid += 1;
    }
  }
  sum = block_sum(sum);
  valid = block_sum(valid);
  if (threadIdx.x == 0) {
    loss[0] = (A)(sum / (double)valid);
    count[0] = valid;
  }
}

// Grid-stride over the elements.
template <class T>
__device__ void backward(T* dlogits, const Accumulator<T>* dloss, const Accumulator<T>* probabilities,
                         const int64* target, const int64* count, int64 rows, int64 classes, double label_smoothing,
                         int64 ignore_index) {
  typedef Accumulator<T> A;
  A factor = dloss[0] / A(count[0]);
  A elsewhere = A(label_smoothing / (double)classes);
  A at_target = A(1.0 - label_smoothing);
  GRID_STRIDE(i, rows * classes) {
    int64 k;
    int64 row = divide(i, classes, &k);
    int64 label = target[row];
    A gradient;
    if (label == ignore_index) {
      gradient = A(0);
    } else if (label < 0 || label >= classes) {
      gradient = quiet_nan<A>();
    } else {
      gradient = (probabilities[i] - elsewhere - (k == label ? at_target : A(0))) * factor;
    }
    dlogits[i] = narrow<T>(gradient);
  }
}

// top1_count (one element) += rows whose first largest logit is at the target, NaN being largest. A warp a row, block
// THREADS. Integer atomics: the order does not matter.
template <class T>
__device__ void top1(uint64* top1_count, const T* logits, const int64* target, int64 rows, int64 classes) {
  typedef Accumulator<T> A;
  int64 row = ((int64)blockIdx.x * THREADS + threadIdx.x) / 32;
  if (row >= rows) return;  // the whole warp
  int lane = threadIdx.x % 32;
  A best = minus_infinity<A>();
  int64 index = classes;
  for (int64 k = lane; k < classes; k += 32) {
    A value = widen(logits[row * classes + k]);
    if (index == classes || value > best || (is_nan(value) && !is_nan(best))) {
      best = value;
      index = k;
    }
  }
  for (int width = 16; width > 0; width /= 2) {
    A other = __shfl_down_sync(0xffffffffu, best, width);
    int64 other_index = __shfl_down_sync(0xffffffffu, index, width);
    if (other_index == classes) continue;
    bool larger = other > best || (is_nan(other) && !is_nan(best));
    bool equal = other == best || (is_nan(other) && is_nan(best));
    if (index == classes || larger || (equal && other_index < index)) {
      best = other;
      index = other_index;
    }
  }
  if (lane == 0 && index == target[row]) atomicAdd(top1_count, 1ull);
}

#define INSTANCES(name, T) \
  extern "C" __global__ void cross_entropy_rows_##name(Accumulator<T>* losses, Accumulator<T>* probabilities, \
                                                       const T* logits, const int64* target, int64 classes, \
                                                       double label_smoothing, int64 ignore_index) { \
    rows<T>(losses, probabilities, logits, target, classes, label_smoothing, ignore_index); \
  } \
  extern "C" __global__ void cross_entropy_backward_##name( \
      T* dlogits, const Accumulator<T>* dloss, const Accumulator<T>* probabilities, const int64* target, \
      const int64* count, int64 rows, int64 classes, double label_smoothing, int64 ignore_index) { \
    backward<T>(dlogits, dloss, probabilities, target, count, rows, classes, label_smoothing, ignore_index); \
  } \
  extern "C" __global__ void top1_count_##name(uint64* top1_count, const T* logits, const int64* target, \
                                               int64 rows, int64 classes) { \
    top1<T>(top1_count, logits, target, rows, classes); \
  }
FOR_FLOAT_TYPES(INSTANCES)

#define MEAN_INSTANCES(name, A) \
  extern "C" __global__ void cross_entropy_mean_##name(A* loss, int64* count, const A* losses, const int64* target, \
                                                       int64 rows, int64 ignore_index) { \
    mean<A>(loss, count, losses, target, rows, ignore_index); \
  }
MEAN_INSTANCES(f32, float)
MEAN_INSTANCES(f64, double)
