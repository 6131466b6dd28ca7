// What bench_scaler.py measures beside flcuda's kernels: the memory's own time for the same bytes, and the flags of a
// search for invalid gradients as uint8 and as int32.

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;
typedef unsigned char uint8;

#define GRID_STRIDE(i, count)                                                      \
  for (int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x; i < (int64)(count); \
       i += (int64)gridDim.x * blockDim.x)

__device__ inline uint32 folded(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// Reads `vectors` of 16 bytes and writes nothing, unless their bits in one thread happen to give `guard`: no compiler knows
// that they do not.
extern "C" __global__ void read_bytes(const uint4* __restrict__ data, int64 vectors, uint32 guard, uint32* out) {
  int64 threads = (int64)gridDim.x * blockDim.x;
  int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  uint32 bits = 0;
  for (; i + 3 * threads < vectors; i += 4 * threads) {
    uint4 a = data[i], b = data[i + threads], c = data[i + 2 * threads], d = data[i + 3 * threads];
    bits ^= folded(a) ^ folded(b) ^ folded(c) ^ folded(d);
  }
  for (; i < vectors; i += threads) bits ^= folded(data[i]);
  if (bits == guard) *out = bits;
}

// What an update moves: reads `grad`, reads and writes `a` and `b`, of RATIO times its size, and writes `copy` of its size
// if not null. `zero` is 0, which no compiler knows: all values stay.
template <int RATIO>
__device__ void move_bytes(const uint4* __restrict__ grad, uint4* a, uint4* b, uint4* copy, int64 vectors, uint32 zero) {
  GRID_STRIDE(i, vectors) {
    uint4 g = grad[i];
    uint32 bits = folded(g) & zero;
    uint4 x[RATIO], y[RATIO];
#pragma unroll
    for (int r = 0; r < RATIO; ++r) {
      x[r] = a[i + r * vectors];
      y[r] = b[i + r * vectors];
    }
#pragma unroll
    for (int r = 0; r < RATIO; ++r) {
      x[r].x ^= bits;
      y[r].x ^= bits;
      a[i + r * vectors] = x[r];
      b[i + r * vectors] = y[r];
    }
    if (copy) copy[i] = x[0];
  }
}
extern "C" __global__ void move_bytes_1(const uint4* grad, uint4* a, uint4* b, uint4* copy, int64 vectors, uint32 zero) {
  move_bytes<1>(grad, a, b, copy, vectors, zero);
}
extern "C" __global__ void move_bytes_2(const uint4* grad, uint4* a, uint4* b, uint4* copy, int64 vectors, uint32 zero) {
  move_bytes<2>(grad, a, b, copy, vectors, zero);
}

// --- flags ------------------------------------------------------------------------------------------------------------

// flags: [any, index of the first invalid array or nothing, one flag an array]. `first` is 1 where the index is kept, for
// which uint8 has no room. Everything else is the same code, so that a difference is the flags' own.
template <class Flag>
__device__ void reset(Flag* flags, int segments, int first) {
  GRID_STRIDE(i, 2 + segments) { flags[i] = first && i == 1 ? (Flag)segments : (Flag)0; }
}

template <class Flag, bool FIRST>
__device__ void report(Flag* flags, const int64* offsets, int segments, int64 element) {
  int low = 0, high = segments - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (offsets[middle] <= element) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  flags[0] = 1;
  flags[2 + low] = 1;
  if (FIRST) atomicMin((int*)&flags[1], low);
}

// float32, in whole vectors from a 16-byte boundary; a vector lies in one array.
template <class Flag, bool FIRST>
__device__ void find(Flag* flags, const uint4* __restrict__ data, const int64* offsets, int segments, int64 vectors) {
  const uint32 FULL = 0x7f800000u;
  GRID_STRIDE(i, vectors) {
    uint4 v = data[i];
    bool invalid = (v.x & FULL) == FULL || (v.y & FULL) == FULL || (v.z & FULL) == FULL || (v.w & FULL) == FULL;
    if (invalid) report<Flag, FIRST>(flags, offsets, segments, 4 * i);
  }
}

#define INSTANCE(name, Flag, FIRST)                                                                                  \
  extern "C" __global__ void reset_##name(Flag* flags, int segments) { reset<Flag>(flags, segments, FIRST); }        \
  extern "C" __global__ void find_##name(Flag* flags, const uint4* data, const int64* offsets, int segments,         \
                                         int64 vectors) {                                                            \
    find<Flag, FIRST>(flags, data, offsets, segments, vectors);                                                      \
  }
INSTANCE(uint8, uint8, false)
INSTANCE(int32, int, false)
INSTANCE(int32_first, int, true)
