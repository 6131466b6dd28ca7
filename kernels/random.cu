// The twin of rng.normal: out[i] = normal number offset + i of a stream of the seed, 0 <= i < size. Any launch shape of one
// dimension (grid-stride over Philox blocks).

#include "common.cuh"

// Two standard normal numbers from two words (Box and Muller 1958).
__device__ inline Pair<float> box_muller(uint32 first, uint32 second) {
  float uniform = (float)((first >> 8) + 1u) * 5.9604644775390625e-08f;  // in (0, 1]: a finite logarithm
  float radius = sqrtf(-2.0f * logf(uniform));
  float sine, cosine;
  sincospif(2.0f * unit_uniform(second), &sine, &cosine);
  return Pair<float>{radius * cosine, radius * sine};
}

template <class T>
__device__ void normal_fill(T* out, uint64 seed, uint64 offset, uint32 stream, int64 size) {
  uint64 first = offset / 4;
  int64 skipped = (int64)(offset % 4);
  GRID_STRIDE(block, (skipped + size + 3) / 4) {
    uint4 words = philox(seed, first + block, stream);
    Pair<float> low = box_muller(words.x, words.y), high = box_muller(words.z, words.w);
    float values[4] = {low.first, low.second, high.first, high.second};
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      int64 i = 4 * block + lane - skipped;
      if (i >= 0 && i < size) out[i] = narrow<T>(values[lane]);
    }
  }
}

#define INSTANCES(name, T)                                                                                     \
  extern "C" __global__ void normal_fill_##name(T* out, uint64 seed, uint64 offset, uint32 stream, int64 size) { \
    normal_fill<T>(out, seed, offset, stream, size);                                                           \
  }
FOR_FLOAT_TYPES(INSTANCES)
