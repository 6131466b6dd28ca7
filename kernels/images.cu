// Copies of bytes from many places into one array.

#include "common.cuh"

// One copy: `rows` rows of `bytes` bytes, in `source` each `pitch` bytes behind the last, in `out` from `offset` on
// without gaps.
struct Gathered {
  const uint8* source;
  int64 offset, rows, bytes, pitch;
};

// Block row y does copy y, with all the blocks of that row; any number of threads in one dimension.
extern "C" __global__ void gather_bytes(uint8* out, const Gathered* table) {
  Gathered copy = table[blockIdx.y];
  // One row when there are no gaps.
  int64 rows = copy.pitch == copy.bytes ? 1 : copy.rows;
  int64 bytes = copy.pitch == copy.bytes ? copy.rows * copy.bytes : copy.bytes;
  int64 first = (int64)blockIdx.x * blockDim.x + threadIdx.x, step = (int64)gridDim.x * blockDim.x;
  for (int64 row = 0; row < rows; ++row) {
    const uint8* from = copy.source + row * copy.pitch;
    uint8* to = out + copy.offset + row * bytes;
    int64 vectors = (((uint64)from | (uint64)to) & 15) == 0 ? bytes / 16 : 0;
    for (int64 i = first; i < vectors; i += step) ((uint4*)to)[i] = ((const uint4*)from)[i];
    for (int64 i = vectors * 16 + first; i < bytes; i += step) to[i] = from[i];
  }
}
