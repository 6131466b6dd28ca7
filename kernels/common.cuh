// What the kernel files share: types, conversions, reductions over a channel, Philox.
//
// Dense memory is a triple (outer, channels, inner): NCHW is (N, C, space), NHWC is (N * space, C, 1).
// Sizes and indices have 64 bits. 16-bit and float values are summed in float, double in double.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;
typedef unsigned short uint16;
typedef unsigned char uint8;

// One instance of a kernel a dtype: X(suffix, type).
#define FOR_FLOAT_TYPES(X) \
  X(f32, float)            \
  X(f64, double)           \
  X(f16, __half)           \
  X(bf16, __nv_bfloat16)

// The loop of a grid-stride kernel over `count` items, i each one's index.
#define GRID_STRIDE(i, count)                                                               \
  for (int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x; i < (int64)(count);          \
       i += (int64)gridDim.x * blockDim.x)

// --- types ------------------------------------------------------------------------------------------------------------

template <class T>
struct AccumulatorOf {
  typedef float type;
};
template <>
struct AccumulatorOf<double> {
  typedef double type;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

// Rounds to nearest even.
template <class T>
struct Narrow;
template <>
struct Narrow<float> {
  __device__ static float from(float value) { return value; }
  __device__ static float from(double value) { return (float)value; }
};
template <>
struct Narrow<double> {
  __device__ static double from(float value) { return value; }
  __device__ static double from(double value) { return value; }
};
template <>
struct Narrow<__half> {
  __device__ static __half from(float value) { return __float2half_rn(value); }
  __device__ static __half from(double value) { return __double2half(value); }
};
template <>
struct Narrow<__nv_bfloat16> {
  __device__ static __nv_bfloat16 from(float value) { return __float2bfloat16_rn(value); }
  __device__ static __nv_bfloat16 from(double value) { return __double2bfloat16(value); }
};

template <class T, class A>
__device__ inline T narrow(A value) {
  return Narrow<T>::from(value);
}

__device__ inline bool is_nan(float value) { return (__float_as_uint(value) & 0x7fffffffu) > 0x7f800000u; }
__device__ inline bool is_nan(double value) {
  return ((uint64)__double_as_longlong(value) & 0x7fffffffffffffffull) > 0x7ff0000000000000ull;
}

template <class A>
__device__ inline A quiet_nan();
template <>
__device__ inline float quiet_nan<float>() {
  return __int_as_float(0x7fffffff);
}
template <>
__device__ inline double quiet_nan<double>() {
  return __longlong_as_double(0x7fffffffffffffffll);
}

template <class A>
__device__ inline A minus_infinity();
template <>
__device__ inline float minus_infinity<float>() {
  return __int_as_float((int)0xff800000u);
}
template <>
__device__ inline double minus_infinity<double>() {
  return __longlong_as_double((long long)0xfff0000000000000ull);
}

// --- index arithmetic -------------------------------------------------------------------------------------------------

// a / b and a % b, in 32 bits when both fit: a 64-bit division costs several times as much.
__device__ inline int64 divide(int64 a, int64 b, int64* remainder) {
  if (((uint64)a | (uint64)b) >> 32 == 0) {
    uint32 quotient = (uint32)a / (uint32)b;
    *remainder = (uint32)a - quotient * (uint32)b;
    return quotient;
  }
  int64 quotient = a / b;
  *remainder = a - quotient * b;
  return quotient;
}

__device__ inline int64 channel_of(int64 index, int64 channels, int64 inner) {
  int64 channel, ignored;
  int64 row = inner == 1 ? index : divide(index, inner, &ignored);
  divide(row, channels, &channel);
  return channel;
}

// --- one launch for two stages ----------------------------------------------------------------------------------------

// Counts up a word that is zero, and zero again when the last of `blocks` has called: true for that one. What a block has
// written before, with a barrier in between, the last one sees, after a barrier too. The fences of its order are cheaper than
// two of __threadfence.
__device__ inline bool take_ticket(uint32* ticket, uint32 blocks) {
#ifdef __CUDA_ARCH__
  uint32 before;
  asm volatile("atom.inc.acq_rel.gpu.u32 %0, [%1], %2;" : "=r"(before) : "l"(ticket), "r"(blocks - 1) : "memory");
  return before == blocks - 1;
#else
  bool last = atomicAdd(ticket, (uint32)1) + 1 == blocks;
  if (last) *ticket = 0;
  return last;
#endif
}

// Has the second-level cache read what a block will need at its end.
__device__ inline void prefetch_line(const void* place) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.L2 [%0];" ::"l"(place));
#endif
}

// --- reductions over a channel ----------------------------------------------------------------------------------------
//
// `Load` has a type Item and gives item(index, channel) of a dense array. `Value` has zero(), add(items, n) and merge(other).
// A thread hands its items over in groups of GROUP, so that a Value may treat a group as a whole. partial is
// (splits, channels). The order of all sums depends on the sizes and the launch shape alone.

const int GROUP = 4;
const int REDUCTION_THREADS = 256;
const int WARPS = 8;

// Grid (channels, splits), block REDUCTION_THREADS: for an inner size above 1.
template <class Value, class Load>
__device__ void reduce_rows(Value* partial, const Load& load, int64 outer, int64 channels, int64 inner) {
  __shared__ Value shared[REDUCTION_THREADS];
  int64 channel = blockIdx.x;
  int64 count = outer * inner;
  int64 share = (count + gridDim.y - 1) / gridDim.y;
  int64 begin = share * blockIdx.y;
  int64 end = begin + share < count ? begin + share : count;
  Value value = Value::zero();
  typename Load::Item items[GROUP];
  for (int64 start = begin + threadIdx.x; start < end; start += (int64)GROUP * REDUCTION_THREADS) {
    int n = 0;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      int64 place = start + (int64)g * REDUCTION_THREADS;
      if (place < end) {
        int64 column;
        int64 row = divide(place, inner, &column);
        items[g] = load.item((row * channels + channel) * inner + column, channel);
        n = g + 1;
      }
    }
    value.add(items, n);
  }
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int width = REDUCTION_THREADS / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) shared[threadIdx.x].merge(shared[threadIdx.x + width]);
    __syncthreads();
  }
  if (threadIdx.x == 0) partial[blockIdx.y * channels + channel] = shared[0];
}

// Grid (channels / 32, splits), block (32, WARPS): for an inner size of 1.
template <class Value, class Load>
__device__ void reduce_columns(Value* partial, const Load& load, int64 outer, int64 channels) {
  __shared__ Value shared[WARPS][32];
  int64 channel = (int64)blockIdx.x * 32 + threadIdx.x;
  int64 share = (outer + gridDim.y - 1) / gridDim.y;
  int64 begin = share * blockIdx.y;
  int64 end = begin + share < outer ? begin + share : outer;
  Value value = Value::zero();
  typename Load::Item items[GROUP];
  if (channel < channels) {
    for (int64 start = begin + threadIdx.y; start < end; start += GROUP * WARPS) {
      int n = 0;
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        int64 row = start + g * WARPS;
        if (row < end) {
          items[g] = load.item(row * channels + channel, channel);
          n = g + 1;
        }
      }
      value.add(items, n);
    }
  }
  shared[threadIdx.y][threadIdx.x] = value;
  __syncthreads();
  if (threadIdx.y == 0 && channel < channels) {
    for (int warp = 1; warp < WARPS; ++warp) value.merge(shared[warp][threadIdx.x]);
    partial[blockIdx.y * channels + channel] = value;
  }
}

// The second stage, a warp a channel, block (32 * WARPS): lane 0 of each warp gets the channel's value and true.
template <class Value>
__device__ bool combine_splits(Value* result, int64* channel, const Value* partial, int64 splits, int64 channels) {
  int lane = threadIdx.x % 32;
  *channel = (int64)blockIdx.x * WARPS + threadIdx.x / 32;
  if (*channel >= channels) return false;  // the whole warp
  Value value = Value::zero();
  for (int64 split = lane; split < splits; split += 32) value.merge(partial[split * channels + *channel]);
  for (int width = 16; width > 0; width /= 2) value.merge(value.shuffle_down(width));
  *result = value;
  return lane == 0;
}

template <class A>
struct Sum {
  A sum;
  __device__ static Sum zero() { return Sum{A(0)}; }
  __device__ void add(const A* items, int n) {
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      if (g < n) sum += items[g];
    }
  }
  __device__ void merge(const Sum& other) { sum += other.sum; }
  __device__ Sum shuffle_down(int width) const { return Sum{__shfl_down_sync(0xffffffffu, sum, width)}; }
};

template <class A>
struct Pair {
  A first, second;
};

// --- Philox -----------------------------------------------------------------------------------------------------------

// Philox4x32-10, as flcuda/rng.py: block `block` of stream `stream` of `seed`. Source: Salmon et al., SC 2011.
__device__ inline uint4 philox(uint64 seed, uint64 block, uint32 stream) {
  uint32 c0 = (uint32)block, c1 = (uint32)(block >> 32), c2 = 0, c3 = stream;
  uint32 k0 = (uint32)seed, k1 = (uint32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    uint32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

// A multiple of 2^-24 in [0, 1): exact, so the same bits as in NumPy.
__device__ inline float unit_uniform(uint32 word) { return (float)(word >> 8) * 5.9604644775390625e-08f; }
