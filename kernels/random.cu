// Fills of random numbers, the twins of flcuda/rng.py. out = element offset + i of the seed's stream of values, i in memory
// order, 0 <= i < size. Any launch shape of one dimension (grid-stride over Philox blocks).

#include "common.cuh"

// Two standard normal numbers from two words (Box and Muller 1958).
__device__ inline Pair<float> box_muller(uint32 first, uint32 second) {
  float uniform = (float)((first >> 8) + 1u) * 5.9604644775390625e-08f;  // in (0, 1]: a finite logarithm
  float radius = sqrtf(-2.0f * logf(uniform));
  float sine, cosine;
  sincospif(2.0f * unit_uniform(second), &sine, &cosine);
  return Pair<float>{radius * cosine, radius * sine};
}

template <class T, bool NORMAL>
__device__ void random_fill(T* out, uint64 seed, uint64 offset, uint32 stream, int64 size) {
  uint64 first = offset / 4;
  int64 skipped = (int64)(offset % 4);
  GRID_STRIDE(block, (skipped + size + 3) / 4) {
    uint4 words = philox(seed, first + block, stream);
    float values[4];
    if (NORMAL) {
      Pair<float> low = box_muller(words.x, words.y), high = box_muller(words.z, words.w);
      values[0] = low.first;
      values[1] = low.second;
      values[2] = high.first;
      values[3] = high.second;
    } else {
      values[0] = unit_uniform(words.x);
      values[1] = unit_uniform(words.y);
      values[2] = unit_uniform(words.z);
      values[3] = unit_uniform(words.w);
    }
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      int64 i = 4 * block + lane - skipped;
      if (i >= 0 && i < size) out[i] = narrow<T>(values[lane]);
    }
  }
}

#define INSTANCES(name, T)                                                                                      \
  extern "C" __global__ void uniform_fill_##name(T* out, uint64 seed, uint64 offset, uint32 stream, int64 size) { \
    random_fill<T, false>(out, seed, offset, stream, size);                                                     \
  }                                                                                                             \
  extern "C" __global__ void normal_fill_##name(T* out, uint64 seed, uint64 offset, uint32 stream, int64 size) { \
    random_fill<T, true>(out, seed, offset, stream, size);                                                      \
  }
FOR_FLOAT_TYPES(INSTANCES)
