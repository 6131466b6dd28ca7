// Softmax cross-entropy. logits, probabilities and dlogits are (rows, classes), target is (rows), 64-bit. Outputs are
// overwritten (=) but for `correct` and top1_count, which are added to. Sums run in a fixed order. A target that is neither a
// class nor ignore_index makes the loss and the row's gradients NaN; it is never used as an index.
//
// The forward pass is one launch: a block of up to THREADS, whole warps, a row, and one where there is none. The block that ends last adds up what
// all have written. `ticket` is zero before and after.

#include "common.cuh"

const int THREADS = 256;

template <class A>
__device__ A larger(A a, A b) {
  return b > a || is_nan(b) ? b : a;  // NaN wins
}

// The total of a block's values, in all its threads. V has add and shuffle_down.
template <class V>
__device__ V block_total(V value) {
  __shared__ V shared[WARPS];
  for (int width = 16; width > 0; width /= 2) value.add(value.shuffle_down(width));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  V total = shared[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) total.add(shared[warp]);
  return total;
}

// Of a row: the sums of the exponentials, and of what they are taken of; how many logits come before the target's.
template <class A>
struct RowSums {
  A exponentials, shifted;
  int64 before;
  __device__ void add(const RowSums& other) {
    exponentials += other.exponentials;
    shifted += other.shifted;
    before += other.before;
  }
  __device__ RowSums shuffle_down(int width) const {
    return RowSums{__shfl_down_sync(0xffffffffu, exponentials, width), __shfl_down_sync(0xffffffffu, shifted, width),
                   __shfl_down_sync(0xffffffffu, before, width)};
  }
};

// Of all rows: the sum of the losses, how many count, and are right.
struct Outcome {
  double sum;
  int64 valid, first, among_five;
  __device__ void add(const Outcome& other) {
    sum += other.sum;
    valid += other.valid;
    first += other.first;
    among_five += other.among_five;
  }
  __device__ Outcome shuffle_down(int width) const {
    return Outcome{__shfl_down_sync(0xffffffffu, sum, width), __shfl_down_sync(0xffffffffu, valid, width),
                   __shfl_down_sync(0xffffffffu, first, width), __shfl_down_sync(0xffffffffu, among_five, width)};
  }
};

template <class A>
__device__ A block_max(A value) {
  __shared__ A shared[WARPS];
  for (int width = 16; width > 0; width /= 2) value = larger(value, __shfl_down_sync(0xffffffffu, value, width));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  A best = shared[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) best = larger(best, shared[warp]);
  return best;
}

// Whether a logit comes before the target's in descending order: NaN is the largest, and of equal ones the first.
template <class A>
__device__ bool comes_before(A value, int64 k, A label_value, int64 label) {
  if (is_nan(value) || is_nan(label_value)) return is_nan(value) && (!is_nan(label_value) || k < label);
  return value > label_value || (value == label_value && k < label);
}

// A thread's logits of a row, the first of which it keeps: they are asked for at once, before the target is known.
template <class T>
struct Row {
  typedef Accumulator<T> A;
  static const int HELD = 4;
  const T* x;
  A held[HELD];
  int64 classes;
  __device__ Row(const T* x_, int64 classes_) : x(x_), classes(classes_) {
#pragma unroll
    for (int u = 0; u < HELD; ++u) {
      int64 k = threadIdx.x + (int64)u * blockDim.x;
      held[u] = k < classes ? widen(x[k]) : minus_infinity<A>();
    }
  }
  template <class Visit>
  __device__ void each(Visit visit) const {
#pragma unroll
    for (int u = 0; u < HELD; ++u) {
      int64 k = threadIdx.x + (int64)u * blockDim.x;
      if (k < classes) visit(held[u], k);
    }
    for (int64 k = threadIdx.x + (int64)HELD * blockDim.x; k < classes; k += blockDim.x) visit(widen(x[k]), k);
  }
};

// losses (rows) = each row's loss, 0 when ignored; ranks (rows) = how many logits come before the target's, `classes` where it
// is no class or ignored; probabilities = softmax.
template <class T>
__device__ void row_loss(Accumulator<T>* losses, int64* ranks, Accumulator<T>* probabilities, const T* logits,
                         const int64* target, int64 row, int64 classes, double label_smoothing, int64 ignore_index) {
  typedef Accumulator<T> A;
  const T* x = logits + row * classes;
  Row<T> own(x, classes);
  int64 label = target[row];
  bool is_class = label >= 0 && label < classes;
  A label_value = is_class ? widen(x[label]) : A(0);
  A largest = minus_infinity<A>();
  own.each([&](A value, int64) { largest = larger(largest, value); });
  largest = block_max(largest);
  RowSums<A> sums = {A(0), A(0), 0};
  own.each([&](A value, int64 k) {
    A shifted = value - largest;
    sums.exponentials += exp(shifted);
    sums.shifted += shifted;
    sums.before += comes_before(value, k, label_value, label);
  });
  sums = block_total(sums);
  A total = sums.exponentials;
  own.each([&](A value, int64 k) { probabilities[row * classes + k] = exp(value - largest) / total; });
  if (threadIdx.x != 0) return;
  A loss = 0;
  if (label != ignore_index && !is_class) {
    loss = quiet_nan<A>();
  } else if (label != ignore_index) {
    A smoothing = A(label_smoothing);
    A log_total = log(total);
    loss = -(A(1) - smoothing) * (label_value - largest - log_total);
    if (label_smoothing > 0) loss -= smoothing / A(classes) * (sums.shifted - A(classes) * log_total);
  }
  losses[row] = loss;
  ranks[row] = is_class && label != ignore_index ? sums.before : classes;
}

__device__ inline bool is_last_block(uint32* ticket) {
  bool last = false;
  __syncthreads();
  if (threadIdx.x == 0) last = take_ticket(ticket, gridDim.x);
  return __syncthreads_or(last);
}

// loss (one element) = the mean over the rows that are not ignored; count (one element) = how many; correct (two elements, or
// null) += rows whose target is the largest logit, and is among the five largest.
template <class T>
__device__ void cross_entropy(Accumulator<T>* loss, int64* count, int64* correct, Accumulator<T>* losses, int64* ranks,
                              Accumulator<T>* probabilities, uint32* ticket, const T* logits, const int64* target,
                              int64 rows, int64 classes, double label_smoothing, int64 ignore_index) {
  typedef Accumulator<T> A;
  if (blockIdx.x < rows) {
    row_loss<T>(losses, ranks, probabilities, logits, target, blockIdx.x, classes, label_smoothing, ignore_index);
  }
  if (!is_last_block(ticket)) return;
  // What other blocks have written must not come from this multiprocessor's cache.
  const volatile A* all_losses = losses;
  const volatile int64* all_ranks = ranks;
  Outcome outcome = {0, 0, 0, 0};
  for (int64 row = threadIdx.x; row < rows; row += blockDim.x) {
    if (target[row] != ignore_index) {
      outcome.sum += all_losses[row];
      outcome.valid += 1;
    }
    int64 rank = all_ranks[row];
    outcome.first += rank == 0;
    outcome.among_five += rank < 5 && rank < classes;
  }
  outcome = block_total(outcome);
  if (threadIdx.x != 0) return;
  loss[0] = (A)(outcome.sum / (double)outcome.valid);
  count[0] = outcome.valid;
  if (correct) {
    correct[0] += outcome.first;
    correct[1] += outcome.among_five;
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
  if (lane == 0 && index == target[row]) atomicAdd(top1_count, (uint64)1);
}

#define LOSS_KERNELS(name, T) \
  extern "C" __global__ void cross_entropy_forward_##name( \
      Accumulator<T>* loss, int64* count, int64* correct, Accumulator<T>* losses, int64* ranks, \
      Accumulator<T>* probabilities, uint32* ticket, const T* logits, const int64* target, int64 rows, int64 classes, \
      double label_smoothing, int64 ignore_index) { \
    cross_entropy<T>(loss, count, correct, losses, ranks, probabilities, ticket, logits, target, rows, classes, \
                     label_smoothing, ignore_index); \
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
#define TYPE_f32 float
#define TYPE_f64 double
#define TYPE_f16 __half
#define TYPE_bf16 __nv_bfloat16
#define JOINED(kind) LOSS_KERNELS(kind, TYPE_##kind)
#define EXPANDED(kind) JOINED(kind)

// LOSS_KIND, where defined, is the dtype's suffix: to compile all takes time.
#ifdef LOSS_KIND
EXPANDED(LOSS_KIND)
#else
FOR_FLOAT_TYPES(LOSS_KERNELS)
#endif
