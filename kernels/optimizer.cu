// The optimizer step, the commit of batch norm's statistics, and the loss scaler's rule. All are in place; all read what
// changes between steps from device memory. flags, int32, may be null: flags[0] != 0 marks an invalid step.

#include "common.cuh"

const int CHUNK = 1024;

// The last segment that starts at or before an element.
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

// g = grad * inv_scale + weight_decay * decay[segment] * master; velocity = momentum * velocity + g;
// master -= lr * (nesterov ? g + momentum * velocity : velocity); data = master. Nothing is written in an invalid step.
// velocity and inv_scale may be null; data may be master. Elements [offsets[0], offsets[segments]). Block of any size,
// one dimension; blocks take chunks of CHUNK elements.
template <class T>
__device__ void sgd_update(Accumulator<T>* master, T* data, Accumulator<T>* velocity, const T* grad,
                           const int64* offsets, const float* decay, const double* lr, const double* inv_scale,
                           const int* flags, Accumulator<T> momentum, Accumulator<T> weight_decay, int nesterov,
                           int64 segments) {
  typedef Accumulator<T> A;
  if (segments == 0 || (flags && flags[0] != 0)) return;
  A rate = (A)lr[0];
  A unscale = inv_scale ? (A)inv_scale[0] : A(1);
  bool copy_out = (void*)data != (void*)master;
  int64 begin = offsets[0], end = offsets[segments];
  __shared__ int64 first, last;
  for (int64 start = begin + (int64)blockIdx.x * CHUNK; start < end; start += (int64)gridDim.x * CHUNK) {
    int64 stop = start + CHUNK < end ? start + CHUNK : end;
    __syncthreads();
    if (threadIdx.x == 0) {
      first = segment_of(offsets, 0, segments - 1, start);
      last = segment_of(offsets, first, segments - 1, stop - 1);
    }
    __syncthreads();
    for (int64 i = start + threadIdx.x; i < stop; i += blockDim.x) {
      A value = master[i];
      A step = widen(grad[i]) * unscale;
      A factor = weight_decay * (A)decay[segment_of(offsets, first, last, i)];
      if (factor != A(0)) step += factor * value;
      if (velocity) {
        A speed = momentum * velocity[i] + step;
        velocity[i] = speed;
        step = nesterov ? step + momentum * speed : speed;
      }
      value -= rate * step;
      master[i] = value;
      if (copy_out) data[i] = narrow<T>(value);
    }
  }
}

#define INSTANCES(name, T)                                                                                            \
  extern "C" __global__ void sgd_update_##name(Accumulator<T>* master, T* data, Accumulator<T>* velocity,             \
                                               const T* grad, const int64* offsets, const float* decay,               \
                                               const double* lr, const double* inv_scale, const int* flags,           \
                                               Accumulator<T> momentum, Accumulator<T> weight_decay, int nesterov,    \
                                               int64 segments) {                                                      \
    sgd_update<T>(master, data, velocity, grad, offsets, decay, lr, inv_scale, flags, momentum, weight_decay,         \
                  nesterov, segments);                                                                                \
  }
FOR_FLOAT_TYPES(INSTANCES)

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

// counters: good steps since the scale last changed or was tried to, skipped steps, skipped steps in a row. One thread.
extern "C" __global__ void scaler_update(double* scale, double* inv_scale, int64* counters, const int* flags,
                                         double growth_factor, double backoff_factor, int64 growth_interval,
                                         double min_scale, double max_scale) {
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
}
