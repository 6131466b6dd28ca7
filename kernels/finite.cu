// The search for NaN and infinity in a flat storage of arrays.
//
// flags, int32: [any, index of the first invalid array (`segments` when none), one flag an array]. reset_flags sets them (=)
// in a launch before; find_invalid only raises them. Array i is flat[offsets[i]:offsets[i + 1]]; arrays may be empty.
// Bits are tested (an exponent of all ones), so that no floating-point option can remove the test. Any launch shape of one
// dimension (grid-stride). What is written does not depend on the order of the threads.

#include "common.cuh"

extern "C" __global__ void reset_flags(int* flags, int64 segments) {
  GRID_STRIDE(i, 2 + segments) { flags[i] = i == 1 ? (int)segments : 0; }
}

template <uint32 MASK>
__device__ inline bool is_full16(uint16 bits) {
  return (bits & MASK) == MASK;
}
template <uint32 MASK>
__device__ inline bool any_full16(uint32 word) {
  return (word & MASK) == MASK || (word & (MASK << 16)) == (MASK << 16);
}

struct Float16 {
  typedef uint16 Bits;
  __device__ static bool is_invalid(uint16 bits) { return is_full16<0x7c00u>(bits); }
  __device__ static bool any_invalid(uint4 v) {
    return any_full16<0x7c00u>(v.x) | any_full16<0x7c00u>(v.y) | any_full16<0x7c00u>(v.z) | any_full16<0x7c00u>(v.w);
  }
};
struct BFloat16 {
  typedef uint16 Bits;
  __device__ static bool is_invalid(uint16 bits) { return is_full16<0x7f80u>(bits); }
  __device__ static bool any_invalid(uint4 v) {
    return any_full16<0x7f80u>(v.x) | any_full16<0x7f80u>(v.y) | any_full16<0x7f80u>(v.z) | any_full16<0x7f80u>(v.w);
  }
};
struct Float32 {
  typedef uint32 Bits;
  __device__ static bool is_invalid(uint32 bits) { return (bits & 0x7f800000u) == 0x7f800000u; }
  __device__ static bool any_invalid(uint4 v) {
    return is_invalid(v.x) | is_invalid(v.y) | is_invalid(v.z) | is_invalid(v.w);
  }
};
struct Float64 {
  typedef uint64 Bits;
  __device__ static bool is_invalid_upper(uint32 bits) { return (bits & 0x7ff00000u) == 0x7ff00000u; }
  __device__ static bool is_invalid(uint64 bits) { return is_invalid_upper((uint32)(bits >> 32)); }
  __device__ static bool any_invalid(uint4 v) { return is_invalid_upper(v.y) | is_invalid_upper(v.w); }
};

// Raises the flags of the array that holds an element: the last one that starts at or before it, which is not empty.
__device__ void report(int* flags, const int64* offsets, int64 segments, int64 element) {
  int64 low = 0, high = segments - 1;
  while (low < high) {
    int64 middle = (low + high + 1) / 2;
    if (offsets[middle] <= element) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  flags[0] = 1;
  flags[2 + low] = 1;
  atomicMin(&flags[1], (int)low);
}

template <class Format>
__device__ void find_invalid(int* flags, const typename Format::Bits* flat, const int64* offsets, int64 segments) {
  typedef typename Format::Bits Bits;
  const int WIDTH = 16 / sizeof(Bits);
  int64 begin = offsets[0];
  int64 count = offsets[segments] - begin;
  const Bits* start = flat + begin;
  // Elements before the first 16-byte boundary, whole vectors, elements after the last.
  int64 head = (int64)((0 - (uint64)start) % 16 / sizeof(Bits));
  if (head > count) head = count;
  int64 vectors = (count - head) / WIDTH;
  int64 tail = head + vectors * WIDTH;
  const uint4* body = (const uint4*)(start + head);
  GRID_STRIDE(i, vectors) {
    if (Format::any_invalid(body[i])) {
      for (int64 k = head + i * WIDTH; k < head + (i + 1) * WIDTH; ++k) {
        if (Format::is_invalid(start[k])) report(flags, offsets, segments, begin + k);
      }
    }
  }
  GRID_STRIDE(k, head) {
    if (Format::is_invalid(start[k])) report(flags, offsets, segments, begin + k);
  }
  GRID_STRIDE(k, count - tail) {
    if (Format::is_invalid(start[tail + k])) report(flags, offsets, segments, begin + tail + k);
  }
}

#define INSTANCE(name, Format)                                                                             \
  extern "C" __global__ void find_invalid_##name(int* flags, const Format::Bits* flat, const int64* offsets, \
                                                 int64 segments) {                                         \
    find_invalid<Format>(flags, flat, offsets, segments);                                                  \
  }
INSTANCE(f16, Float16)
INSTANCE(bf16, BFloat16)
INSTANCE(f32, Float32)
INSTANCE(f64, Float64)
