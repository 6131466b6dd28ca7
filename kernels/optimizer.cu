// The optimizers' steps, clipping, the commit of batch norm's statistics, and the loss scaler's rule. All are in place;
// all read what changes between steps from device memory. flags, int32, may be null: flags[0] != 0 marks an invalid step,
// in which nothing is written.

#include "common.cuh"

const int THREADS = 256;
const int GROUPS = 2;        // of a thread in a chunk: all of their loads are in flight at once
const int MAX_UNIFORM = 32;  // segments of a chunk that are looked through for one decay factor

// --- a pass over the flat storage -------------------------------------------------------------------------------------

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

// A step's arrays. data may be master; the first state may be null when the rule does not use it.
template <class T, int STATES>
struct Storage {
  Accumulator<T>* master;
  T* data;
  const T* grad;
  Accumulator<T>* state[STATES];
};

// The last segment that starts at or before an element, from `low` to `high`, both included.
__device__ inline int64 segment_of(const int64* offsets, int64 low, int64 high, int64 element) {
  while (low < high) {
    int64 middle = (low + high + 1) / 2;
    if (offsets[middle] <= element) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The segments of two elements, by all threads of the block together: each round narrows the range THREADS times. What a
// round reads is under way at once. A barrier.
__device__ inline void find_segments(int64* first, int64* last, const int64* offsets, int64 segments, int64 from,
                                     int64 to) {
  __shared__ int64 found[2];
  int64 low[2] = {0, 0};
  const int64 element[2] = {from, to};
  const int64 NONE = 0x7fffffffffffffff;
  int64 width = segments;
  do {
    int64 step = (width + THREADS - 1) / THREADS;
    int64 begin[2], end[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      int64 stop = low[k] + width < segments ? low[k] + width : segments;
      int64 here = low[k] + threadIdx.x * step;
      begin[k] = here < stop ? offsets[here] : NONE;
      end[k] = here + step < stop ? offsets[here + step] : NONE;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (begin[k] <= element[k] && element[k] < end[k]) found[k] = low[k] + threadIdx.x * step;
    }
    __syncthreads();
    low[0] = found[0];
    low[1] = found[1];
    __syncthreads();
    width = step;
  } while (width > 1);
  *first = low[0];
  *last = low[1];
}

// The rule on one element.
template <class T, class Rule>
__device__ inline void update_element(const Storage<T, Rule::STATES>& arrays, const Rule& rule, int64 element,
                                      float decay) {
  typedef Accumulator<T> A;
  A state[Rule::STATES];
  bool stateful = arrays.state[0] != nullptr;
  for (int k = 0; k < Rule::STATES; ++k) state[k] = stateful ? arrays.state[k][element] : A(0);
  A value = rule.apply(arrays.master[element], widen(arrays.grad[element]) * rule.unscale, rule.weight * (A)decay, state);
  arrays.master[element] = value;
  if (stateful) {
    for (int k = 0; k < Rule::STATES; ++k) arrays.state[k][element] = state[k];
  }
  if (sizeof(T) < sizeof(A)) arrays.data[element] = narrow<T>(value);
}

// The rule on `groups` groups of N elements from element `start` on, at which all arrays are aligned for a Pack. The last
// chunk comes first: what a check of the gradients before has left of them in the cache is their end. All threads call
// fill(shared_rule) once, with their first loads under way; the rule is read behind a barrier.
template <int N, class T, class Rule, class Fill>
__device__ void update_groups(const Storage<T, Rule::STATES>& arrays, Rule& shared_rule, const Fill& fill, bool decays,
                              const int64* offsets, const float* decay, int64 segments, int64 start, int64 groups) {
  typedef Accumulator<T> A;
  const int64 CHUNK = THREADS * GROUPS;
  bool stateful = arrays.state[0] != nullptr, filled = false;
  for (int64 chunk = (groups + CHUNK - 1) / CHUNK - 1 - blockIdx.x; chunk >= 0; chunk -= gridDim.x) {
    int64 group = chunk * CHUNK + threadIdx.x;
    Pack<T, N> gradient[GROUPS];
    Pack<A, N> value[GROUPS], state[Rule::STATES][GROUPS];
#pragma unroll
    for (int u = 0; u < GROUPS; ++u) {
      if (group + u * THREADS >= groups) continue;
      int64 element = start + (group + u * THREADS) * N;
      gradient[u] = *(const Pack<T, N>*)(arrays.grad + element);
      value[u] = *(const Pack<A, N>*)(arrays.master + element);
#pragma unroll
      for (int k = 0; k < Rule::STATES; ++k) {
        if (stateful) state[k][u] = *(const Pack<A, N>*)(arrays.state[k] + element);
      }
    }
    // While these are under way: the rule, and the decay factor, one for the chunk wherever its segments have the same.
    if (!filled) fill(shared_rule);
    filled = true;
    int64 first = 0, last = 0;
    bool mixed = false;
    if (decays) {
      int64 stop = (chunk + 1) * CHUNK < groups ? (chunk + 1) * CHUNK : groups;
      find_segments(&first, &last, offsets, segments, start + chunk * CHUNK * N, start + stop * N - 1);
      mixed = last - first > MAX_UNIFORM;
      for (int64 segment = first + 1; segment <= last && !mixed; ++segment) mixed = decay[segment] != decay[first];
    } else {
      __syncthreads();
    }
    const Rule rule = shared_rule;
    A uniform = decays ? rule.weight * (A)decay[first] : A(0);
#pragma unroll
    for (int u = 0; u < GROUPS; ++u) {
      if (group + u * THREADS >= groups) continue;
      int64 element = start + (group + u * THREADS) * N;
      A factor[N];
#pragma unroll
      for (int j = 0; j < N; ++j) factor[j] = uniform;
      if (mixed) {
        int64 segment = segment_of(offsets, first, last, element);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          while (element + j >= offsets[segment + 1]) ++segment;
          factor[j] = rule.weight * (A)decay[segment];
        }
      }
      Pack<T, N> copy;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        A own[Rule::STATES];
#pragma unroll
        for (int k = 0; k < Rule::STATES; ++k) own[k] = state[k][u].at[j];
        value[u].at[j] = rule.apply(value[u].at[j], widen(gradient[u].at[j]) * rule.unscale, factor[j], own);
#pragma unroll
        for (int k = 0; k < Rule::STATES; ++k) state[k][u].at[j] = own[k];
        copy.at[j] = narrow<T>(value[u].at[j]);
      }
      *(Pack<A, N>*)(arrays.master + element) = value[u];
#pragma unroll
      for (int k = 0; k < Rule::STATES; ++k) {
        if (stateful) *(Pack<A, N>*)(arrays.state[k] + element) = state[k][u];
      }
      if (sizeof(T) < sizeof(A)) *(Pack<T, N>*)(arrays.data + element) = copy;
    }
  }
}

__device__ inline bool is_aligned(const void* address, uint64 bytes) { return (uint64)address % bytes == 0; }

// The rule on elements [offsets[0], offsets[segments]): by 16 bytes of master where all arrays are aligned alike, else one
// by one. fill(rule), called by all threads of a block, writes the rule by some of them: the last ones, which have the
// fewest segments to look at. decays: there is weight decay. Block THREADS, any grid; fast with a block for each
// THREADS * GROUPS * 16 bytes of master.
template <class Rule, class T, class Fill>
__device__ void update(const Storage<T, Rule::STATES>& arrays, const int* flags, const Fill& fill, bool decays,
                       const int64* offsets, const float* decay, int64 segments) {
  typedef Accumulator<T> A;
  const int N = 16 / sizeof(A);
  __shared__ Rule shared_rule;
  int64 begin = offsets[0], count = offsets[segments] - begin;
  bool skipped = flags && flags[0] != 0;
  // One condition, so that all that it needs is read at once.
  if (skipped | (count == 0)) return;
  int64 head = (int64)((0 - (uint64)(arrays.master + begin)) % 16 / sizeof(A));
  if (head > count) head = count;
  int64 start = begin + head;
  bool together = is_aligned(arrays.grad + start, sizeof(Pack<T, N>)) &&
                  is_aligned(arrays.data + start, sizeof(Pack<T, N>));
  for (int k = 0; k < Rule::STATES; ++k) {
    if (arrays.state[0] != nullptr) together = together && is_aligned(arrays.state[k] + start, 16);
  }
  if (!together) {
    update_groups<1>(arrays, shared_rule, fill, decays, offsets, decay, segments, begin, count);
    return;
  }
  int64 groups = (count - head) / N;
  update_groups<N>(arrays, shared_rule, fill, decays, offsets, decay, segments, start, groups);
  // Fewer than N elements at either end.
  int64 body = groups * N, edge = count - body;
  if (blockIdx.x == 0 && edge > 0) {
    if (groups == 0) fill(shared_rule);
    __syncthreads();
    if (threadIdx.x < edge) {
      int64 element = begin + (threadIdx.x < head ? threadIdx.x : threadIdx.x + body);
      update_element(arrays, shared_rule, element, decay[segment_of(offsets, 0, segments - 1, element)]);
    }
  }
}

// --- rules ------------------------------------------------------------------------------------------------------------
//
// A rule's fields are written once a block. apply() gets an element of the master, its unscaled gradient, its
// share of weight decay and its states, which it changes; it returns the new element.

// velocity = momentum * velocity + share * g; master -= rate * (nesterov ? g + momentum * velocity : velocity).
template <class A>
struct Sgd {
  static const int STATES = 1;
  A rate, unscale, weight, momentum, share;
  int moving, nesterov;
  __device__ A apply(A value, A gradient, A factor, A* state) const {
    if (factor != A(0)) gradient += factor * value;
    if (moving) {
      state[0] = momentum * state[0] + share * gradient;
      gradient = nesterov ? gradient + momentum * state[0] : state[0];
    }
    return value - rate * gradient;
  }
};

__device__ inline float square_root(float value) { return sqrtf(value); }
__device__ inline double square_root(double value) { return sqrt(value); }

// rate is lr / (1 - beta1^t), and inverse_root 1 / sqrt(1 - beta2^t).
template <class A>
struct Adam {
  static const int STATES = 2;
  A rate, unscale, weight, rest1, beta2, rest2, eps, inverse_root;
  int decoupled;
  __device__ A apply(A value, A gradient, A factor, A* state) const {
    if (factor != A(0)) {
      if (decoupled) {
        value -= factor * value;
      } else {
        gradient += factor * value;
      }
    }
    // As PyTorch's lerp: exact at both ends.
    A distance = gradient - state[0];
    state[0] = rest1 < A(0.5) ? state[0] + rest1 * distance : gradient - distance * (A(1) - rest1);
    state[1] = beta2 * state[1] + rest2 * gradient * gradient;
    return value - rate * (state[0] / (square_root(state[1]) * inverse_root + eps));
  }
};

// By squaring: a few products of one thread.
__device__ inline double power(double base, int64 exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2) result *= base;
    base *= base;
  }
  return result;
}

// What the gradients are multiplied by first; both may be null.
__device__ inline double factor_of(const double* inv_scale, const double* clip) {
  return (inv_scale ? inv_scale[0] : 1.0) * (clip ? clip[0] : 1.0);
}

// With g = grad * inv_scale * clip + weight_decay * decay[segment] * master, as Sgd says; data = master, rounded. velocity,
// steps, inv_scale and clip may be null; data is master for float and double. A first valid step (steps is 0) has no
// dampening. Launch as update().
template <class T>
__device__ void sgd_update(Accumulator<T>* master, T* data, const T* grad, Accumulator<T>* velocity,
                           const int64* offsets, const float* decay, const double* lr, const int64* steps,
                           const double* inv_scale, const double* clip, const int* flags, double momentum,
                           double dampening, double weight_decay, int nesterov, int64 segments) {
  typedef Accumulator<T> A;
  auto fill = [&](Sgd<A>& rule) {
    if (threadIdx.x != THREADS - 1) return;
    rule.rate = (A)lr[0];
    rule.unscale = (A)factor_of(inv_scale, clip);
    rule.weight = (A)weight_decay;
    rule.momentum = (A)momentum;
    rule.share = (A)(steps && steps[0] == 0 ? 1.0 : 1.0 - dampening);
    rule.moving = velocity != nullptr;
    rule.nesterov = nesterov;
  };
  update<Sgd<A>>(Storage<T, 1>{master, data, grad, {velocity}}, flags, fill, weight_decay != 0.0, offsets, decay, segments);
}

// As Adam says, in step t = steps + 1. decoupled: weight decay shrinks the master by lr * weight_decay * decay[segment]
// (AdamW), else it is added to the gradient as for sgd_update. inv_scale and clip may be null.
template <class T>
__device__ void adam_update(Accumulator<T>* master, T* data, const T* grad, Accumulator<T>* exp_avg,
                            Accumulator<T>* exp_avg_sq, const int64* offsets, const float* decay, const double* lr,
                            const int64* steps, const double* inv_scale, const double* clip, const int* flags,
                            double beta1, double beta2, double eps, double weight_decay, int decoupled,
                            int64 segments) {
  typedef Accumulator<T> A;
  auto fill = [&](Adam<A>& rule) {
    // A warp each for the two powers, which take as long as a read from memory.
    if (threadIdx.x == THREADS - 33) rule.inverse_root = (A)(1.0 / sqrt(1.0 - power(beta2, steps[0] + 1)));
    if (threadIdx.x != THREADS - 1) return;
    int64 step = steps[0] + 1;
    rule.rate = (A)(lr[0] / (1.0 - power(beta1, step)));
    rule.unscale = (A)factor_of(inv_scale, clip);
    rule.weight = (A)(decoupled ? lr[0] * weight_decay : weight_decay);
    rule.rest1 = (A)(1.0 - beta1);
    rule.beta2 = (A)beta2;
    rule.rest2 = (A)(1.0 - beta2);
    rule.eps = (A)eps;
    rule.decoupled = decoupled;
  };
  update<Adam<A>>(Storage<T, 2>{master, data, grad, {exp_avg, exp_avg_sq}}, flags, fill, weight_decay != 0.0, offsets,
                  decay, segments);
}

#define UPDATES_OF(name, T)                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS) sgd_update_##name(                                            \
      Accumulator<T>* master, T* data, const T* grad, Accumulator<T>* velocity, const int64* offsets,                 \
      const float* decay, const double* lr, const int64* steps, const double* inv_scale, const double* clip,          \
      const int* flags, double momentum, double dampening, double weight_decay, int nesterov, int64 segments) {       \
    sgd_update<T>(master, data, grad, velocity, offsets, decay, lr, steps, inv_scale, clip, flags, momentum,          \
                  dampening, weight_decay, nesterov, segments);                                                       \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS) adam_update_##name(                                           \
      Accumulator<T>* master, T* data, const T* grad, Accumulator<T>* exp_avg, Accumulator<T>* exp_avg_sq,            \
      const int64* offsets, const float* decay, const double* lr, const int64* steps, const double* inv_scale,        \
      const double* clip, const int* flags, double beta1, double beta2, double eps, double weight_decay,              \
      int decoupled, int64 segments) {                                                                                \
    adam_update<T>(master, data, grad, exp_avg, exp_avg_sq, offsets, decay, lr, steps, inv_scale, clip, flags, beta1, \
                   beta2, eps, weight_decay, decoupled, segments);                                                    \
  }
FOR_FLOAT_TYPES(UPDATES_OF)

// A valid step counts. One thread.
extern "C" __global__ void advance_steps(int64* steps, const int* flags) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && !(flags && flags[0] != 0)) steps[0] += 1;
}

// sums: the sum of squares of each segment's gradients. out = min(1, max_norm / norm) with norm = sqrt(all) * inv_scale,
// which is summed in one order always. A norm that is NaN or above limit raises flags[0], and out is 1. inv_scale may be
// null. One block of THREADS.
extern "C" __global__ void clip_factor(double* out, int* flags, const double* sums, const double* inv_scale,
                                       double max_norm, double limit, int64 segments) {
  __shared__ double partial[THREADS];
  double sum = 0.0;
  for (int64 i = threadIdx.x; i < segments; i += THREADS) sum += sums[i];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int width = THREADS / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) partial[threadIdx.x] += partial[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  double norm = sqrt(partial[0]) * (inv_scale ? inv_scale[0] : 1.0);
  bool invalid = is_nan(norm) || norm > limit;
  if (invalid) flags[0] = 1;
  out[0] = invalid || norm <= max_norm ? 1.0 : max_norm / norm;
}

// A valid step: running = pending; an invalid one: pending = running. Grid-stride.
template <class Word>
__device__ void commit_statistics(Word* running, Word* pending, const int* flags, int64 size) {
  bool valid = !flags || flags[0] == 0;
  GRID_STRIDE(i, size) {
    if (valid) {
      running[i] = pending[i];
    } else {
      pending[i] = running[i];
    }
  }
}

extern "C" __global__ void commit_statistics_bytes4(uint32* running, uint32* pending, const int* flags, int64 size) {
  commit_statistics(running, pending, flags, size);
}
extern "C" __global__ void commit_statistics_bytes8(uint64* running, uint64* pending, const int* flags, int64 size) {
  commit_statistics(running, pending, flags, size);
}

// counters: good steps since the scale last changed or was tried to, skipped steps, skipped steps in a row. steps, which
// may be null: all steps. One thread.
extern "C" __global__ void scaler_update(double* scale, double* inv_scale, int64* counters, const int* flags,
                                         double growth_factor, double backoff_factor, int64 growth_interval,
                                         double min_scale, double max_scale, int64* steps) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  double current = scale[0];
  if (flags[0] != 0) {
    if (current * backoff_factor >= min_scale) current *= backoff_factor;
    counters[0] = 0;
    counters[1] += 1;
    counters[2] += 1;
  } else {
    counters[0] += 1;
    counters[2] = 0;
    if (counters[0] >= growth_interval) {
      if (current * growth_factor <= max_scale) current *= growth_factor;
      counters[0] = 0;
    }
  }
  scale[0] = current;
  inv_scale[0] = 1.0 / current;
  if (steps) steps[0] += 1;
}
