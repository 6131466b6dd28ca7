// What passes over all elements of a channel share: how a block goes through memory, and sums in one launch.
//
// Memory is dense, (outer, channels, inner): nchw with inner above 1, else nhwc with inner 1. Blocks have NORM_THREADS
// threads; grid (tiles, splits). nhwc: a tile is `lanes` (a power of two, up to 32) times V neighbouring channels, each
// thread has V of them and goes down the rows. nchw: a tile is one channel, and lanes is 1. V elements are one memory
// access of a thread: a vector, aligned to its size, or a single element. A chunk is what a block reads at once, U
// accesses a thread. Split s has the chunks s, s + splits, s + 2 * splits, ...
//
// partial is (tiles, splits, values, slots), slots = lanes * V or 1, in the accumulator's type. ticket has a word a tile
// and one more, zero between launches: the block that finishes a tile last adds up the tile's parts, in the order of
// splits. The order of all sums depends on the sizes and the launch shape alone; there are no float atomics.

#pragma once

#include "common.cuh"

const int NORM_THREADS = 384;
const int NORM_WARPS = NORM_THREADS / 32;
const int NORM_PARTS = 16;
const int NORM_BATCH = 16;
const int NORM_SLOTS = 64;

// --- vectors ----------------------------------------------------------------------------------------------------------

template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  T e[V];
};

template <class T, int V>
__device__ inline Pack<T, V> load_pack(const T* from) {
  Pack<T, V> pack;
  if constexpr (sizeof(pack) == 16) {
    *(uint4*)&pack = *(const uint4*)from;
  } else if constexpr (sizeof(pack) == 8) {
    *(uint64*)&pack = *(const uint64*)from;
  } else {
    static_assert(V == 1, "an element");
    pack.e[0] = *from;
  }
  return pack;
}

template <class T, int V>
__device__ inline void store_pack(T* to, const Pack<T, V>& pack) {
  if constexpr (sizeof(pack) == 16) {
    *(uint4*)to = *(const uint4*)&pack;
  } else if constexpr (sizeof(pack) == 8) {
    *(uint64*)to = *(const uint64*)&pack;
  } else {
    *to = pack.e[0];
  }
}

// The N values of neighbouring channels, by vectors where they are aligned.
template <class A, int N>
__device__ inline void load_values(A (&values)[N], const A* from) {
  const int EACH = 16 / sizeof(A);
  if constexpr (N % EACH == 0) {
    if ((uint64)from % 16 == 0) {
#pragma unroll
      for (int i = 0; i < N; i += EACH) {
        Pack<A, EACH> pack = load_pack<A, EACH>(from + i);
#pragma unroll
        for (int j = 0; j < EACH; ++j) values[i + j] = pack.e[j];
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = from[i];
}

// An element, widened. Of bfloat16 by its bits: the compiler then keeps vectors in fewer registers.
template <class T, int V>
__device__ inline Accumulator<T> element(const Pack<T, V>& pack, int i) {
  return widen(pack.e[i]);
}
template <>
__device__ inline float element<__nv_bfloat16, 8>(const Pack<__nv_bfloat16, 8>& pack, int i) {
  uint32 word = ((const uint32*)&pack)[i / 2];
  return __int_as_float((int)(i % 2 ? word & 0xffff0000u : word << 16));
}
template <>
__device__ inline float element<__nv_bfloat16, 4>(const Pack<__nv_bfloat16, 4>& pack, int i) {
  uint32 word = ((const uint32*)&pack)[i / 2];
  return __int_as_float((int)(i % 2 ? word & 0xffff0000u : word << 16));
}

// --- the way through memory -------------------------------------------------------------------------------------------

template <int V, bool NHWC, int U>
struct Walk {
  static constexpr int OWN = NHWC ? V : 1;     // channels of a thread
  static constexpr int WEIGHT = NHWC ? 1 : V;  // elements that an access has of a channel

  int64 count, chunks;       // accesses along the channel; chunks of them
  int64 channels, channel;   // all, and the thread's first
  int64 inner, width, pitch; // nchw: width accesses make a row; pitch: elements between two accesses of a thread
  int slots, step, place, columns;

  __device__ Walk(int64 outer, int64 channels_, int64 inner_, int lanes) : channels(channels_), inner(inner_) {
    if (NHWC) {
      step = NORM_THREADS / lanes;
      place = (int)threadIdx.x / lanes;
      channel = ((int64)blockIdx.x * lanes + (int)threadIdx.x % lanes) * V;
      count = outer;
      width = 1;
      columns = 0;
      pitch = step * channels;
    } else {
      step = NORM_THREADS;
      place = threadIdx.x;
      channel = blockIdx.x;
      width = inner / V;
      count = outer * width;
      int64 rest;
      int64 rows = divide(step, width, &rest);
      columns = (int)rest;
      pitch = rows * channels * inner + rest * V;
    }
    slots = lanes * OWN;
    chunks = (count + (int64)step * U - 1) / ((int64)step * U);
  }
  __device__ bool active() const { return channel < channels; }

  // Where the thread's accesses in a chunk begin, and how many of them, the first ones, are in the array.
  __device__ int seek(int64 chunk, int64 (&offset)[U]) const {
    int64 first = chunk * (U * step) + place;
    int64 left = count - first;
    if (NHWC) {
      int64 base = first * channels + channel;
#pragma unroll
      for (int u = 0; u < U; ++u) offset[u] = base + u * pitch;
    } else {
      int64 column;
      int64 row = divide(first, width, &column);
      offset[0] = (row * channels + channel) * inner + column * V;
      int64 wrap = (channels - 1) * inner;
#pragma unroll
      for (int u = 1; u < U; ++u) {
        offset[u] = offset[u - 1] + pitch;
        column += columns;
        if (column >= width) {
          column -= width;
          offset[u] += wrap;
        }
      }
    }
    int n = 0;
#pragma unroll
    for (int u = 0; u < U; ++u) n += u * step < left;
    return n;
  }
};

// --- one launch -------------------------------------------------------------------------------------------------------

// All threads of a block call it when the block's part is written: true in the last of `blocks`, which can then read what
// the others have written.
__device__ inline bool is_last_block(uint32* ticket, uint32 blocks) {
  __shared__ int last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) + 1 == blocks;
    if (last) {
      *ticket = 0;
      __threadfence();
    }
  }
  __syncthreads();
  return last;
}

// In the last block of a tile: up to NORM_PARTS groups of `slots` threads share the splits.
struct Parts {
  int count, part, slot;
  __device__ explicit Parts(int slots) {
    count = NORM_THREADS / slots;
    if (count > NORM_PARTS) count = NORM_PARTS;
    part = (int)threadIdx.x / slots;
    slot = (int)threadIdx.x % slots;
  }
};

// Adds up the values of the parts: in every thread the total of its slot.
template <class A>
__device__ inline A add_parts(A value, const Parts& parts, int slots) {
  __shared__ A shared[NORM_THREADS];
  if (parts.part < parts.count) shared[threadIdx.x] = value;
  __syncthreads();
  A total = A(0);
  for (int part = 0; part < parts.count; ++part) total += shared[part * slots + parts.slot];
  __syncthreads();
  return total;
}

// --- moments ----------------------------------------------------------------------------------------------------------

// Count, means and sums of squared distances from the mean, of N channels with one count (Chan, Golub and LeVeque 1979):
// unlike the sum of squares minus the square of the sum they keep their digits when the mean is large.
template <class A, int N>
struct MomentsOf {
  A count, mean[N], m2[N];

  __device__ void clear() {
    count = A(0);
#pragma unroll
    for (int c = 0; c < N; ++c) mean[c] = m2[c] = A(0);
  }
  // weight is the others' share of the new count, cross the old count times that.
  __device__ void merge_channel(int c, A other_mean, A other_m2, A weight, A cross) {
    A distance = other_mean - mean[c];
    mean[c] += distance * weight;
    m2[c] += other_m2 + distance * distance * cross;
  }
  __device__ void merge(A other_count, const A (&other_mean)[N], const A (&other_m2)[N]) {
    if (other_count == A(0)) return;
    A total = count + other_count;
    A weight = other_count / total;
    A cross = count * weight;
#pragma unroll
    for (int c = 0; c < N; ++c) merge_channel(c, other_mean[c], other_m2[c], weight, cross);
    count = total;
  }
};

// Reads a block's chunks of x and writes its part of partial: means, then sums of squared distances.
template <class T, int V, bool NHWC, int U>
__device__ void reduce_moments(Accumulator<T>* partial, const T* x, const Walk<V, NHWC, U>& walk, int lanes) {
  typedef Accumulator<T> A;
  const int OWN = NHWC ? V : 1, WEIGHT = NHWC ? 1 : V;
  MomentsOf<A, OWN> value;
  value.clear();
  if (walk.active()) {
    for (int64 chunk = blockIdx.y; chunk < walk.chunks; chunk += gridDim.y) {
      int64 offset[U];
      int n = walk.seek(chunk, offset);
      Pack<T, V> read[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u < n) read[u] = load_pack<T, V>(x + offset[u]);
      }
      if (n == 0) break;
      A items = A(n * WEIGHT);
      A share = A(1) / items;
      A total = value.count + items;
      A weight = items / total;
      A cross = value.count * weight;
#pragma unroll
      for (int c = 0; c < OWN; ++c) {
        A sum = A(0), squares = A(0);
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
          for (int i = 0; i < WEIGHT; ++i) {
            if (u < n) sum += element(read[u], c + i);
          }
        }
        A mean = sum * share;
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
          for (int i = 0; i < WEIGHT; ++i) {
            A distance = u < n ? element(read[u], c + i) - mean : A(0);
            squares += distance * distance;
          }
        }
        value.merge_channel(c, mean, squares, weight, cross);
      }
      value.count = total;
    }
  }
  for (int distance = 16; distance >= lanes; distance /= 2) {
    A other_mean[OWN], other_m2[OWN];
    A other_count = __shfl_down_sync(0xffffffffu, value.count, distance);
#pragma unroll
    for (int c = 0; c < OWN; ++c) {
      other_mean[c] = __shfl_down_sync(0xffffffffu, value.mean[c], distance);
      other_m2[c] = __shfl_down_sync(0xffffffffu, value.m2[c], distance);
    }
    value.merge(other_count, other_mean, other_m2);
  }
  __shared__ A shared[NORM_WARPS][2][NORM_SLOTS], counts[NORM_WARPS][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane < lanes) {
    counts[warp][lane] = value.count;
#pragma unroll
    for (int c = 0; c < OWN; ++c) {
      shared[warp][0][lane * OWN + c] = value.mean[c];
      shared[warp][1][lane * OWN + c] = value.m2[c];
    }
  }
  __syncthreads();
  int slot = threadIdx.x;
  if (slot >= walk.slots) return;
  MomentsOf<A, 1> total;
  total.clear();
  for (int w = 0; w < NORM_WARPS; ++w) {
    A mean[1] = {shared[w][0][slot]}, m2[1] = {shared[w][1][slot]};
    total.merge(counts[w][slot / OWN], mean, m2);
  }
  A* out = partial + ((int64)blockIdx.x * gridDim.y + blockIdx.y) * 2 * walk.slots + slot;
  out[0] = total.mean[0];
  out[walk.slots] = total.m2[0];
}

// How many elements of a channel each split has.
template <class A>
struct Shares {
  int64 rest, last;
  A usual, longer, ending;

  template <int V, bool NHWC, int U>
  __device__ Shares(const Walk<V, NHWC, U>& walk, int64 splits) {
    int64 chunk = (int64)U * walk.step;
    int64 each = divide(walk.chunks, splits, &rest) * chunk;
    // The last chunk may not be full.
    last = (rest ? rest : splits) - 1;
    int64 missing = walk.chunks * chunk - walk.count;
    usual = A(each * walk.WEIGHT);
    longer = A((each + chunk) * walk.WEIGHT);
    ending = A((each + (rest ? chunk : 0) - missing) * walk.WEIGHT);
  }
  __device__ A of(int64 split) const { return split == last ? ending : split < rest ? longer : usual; }
};

// In the last block of a tile, of every thread's slot: the mean, and the sum of squared distances from it.
template <class A, int V, bool NHWC, int U>
__device__ void combine_moments(A* mean, A* m2, const A* partial, const Walk<V, NHWC, U>& walk) {
  Parts parts(walk.slots);
  int64 splits = gridDim.y;
  const A* from = partial + (int64)blockIdx.x * splits * 2 * walk.slots + parts.slot;
  int64 pitch = 2 * walk.slots;
  int64 total = walk.count * Walk<V, NHWC, U>::WEIGHT;
  Shares<A> shares(walk, splits);
  A shift = from[0], sum = A(0), squares = A(0), between = A(0);
  if (parts.part < parts.count) {
    for (int64 first = parts.part; first < splits; first += NORM_BATCH * parts.count) {
      A means[NORM_BATCH], m2s[NORM_BATCH];
#pragma unroll
      for (int i = 0; i < NORM_BATCH; ++i) {
        int64 split = first + i * parts.count;
        means[i] = split < splits ? from[split * pitch] : shift;
        m2s[i] = split < splits ? from[split * pitch + walk.slots] : A(0);
      }
#pragma unroll
      for (int i = 0; i < NORM_BATCH; ++i) {
        sum += shares.of(first + i * parts.count) * (means[i] - shift);
        squares += m2s[i];
      }
    }
  }
  A found = shift + add_parts(sum, parts, walk.slots) / A(total);
  // Around the mean itself: what was read before is near now.
  if (parts.part < parts.count) {
#pragma unroll 4
    for (int64 split = parts.part; split < splits; split += parts.count) {
      A distance = from[split * pitch] - found;
      between += shares.of(split) * (distance * distance);
    }
  }
  *mean = found;
  *m2 = add_parts(squares + between, parts, walk.slots);
}

// saved_mean and saved_inv_variance =; pending_mean and pending_var = (1 - f) * pending + f * batch when not null, with
// f = momentum, or 1 / num_batches when momentum is negative. num_batches, when not null, rises by one, before it is used.
template <class T>
struct StatisticsOut {
  typedef Accumulator<T> A;
  A *saved_mean, *saved_inv_variance, *pending_mean, *pending_var;
  int64* num_batches;
  double momentum, eps;

  template <int V, bool NHWC, int U>
  __device__ void finish(const A* partial, uint32* ticket, const Walk<V, NHWC, U>& walk) const {
    if (!is_last_block(ticket + blockIdx.x, gridDim.y)) return;
    A mean, m2;
    combine_moments(&mean, &m2, partial, walk);
    int64 channel = (int64)blockIdx.x * walk.slots + threadIdx.x;
    if (threadIdx.x < walk.slots && channel < walk.channels) {
      A count = A(walk.count * Walk<V, NHWC, U>::WEIGHT);
      saved_mean[channel] = mean;
      saved_inv_variance[channel] = A(1) / sqrt(m2 / count + A(eps));
      if (pending_mean) {
        A factor = momentum < 0 ? A(1) / A(num_batches[0] + 1) : A(momentum);
        pending_mean[channel] = (A(1) - factor) * pending_mean[channel] + factor * mean;
        pending_var[channel] = (A(1) - factor) * pending_var[channel] + factor * (m2 / (count - A(1)));
      }
    }
    // Once all tiles have read it.
    if (num_batches && is_last_block(ticket + gridDim.x, gridDim.x) && threadIdx.x == 0) num_batches[0] += 1;
  }
};

// --- sums -------------------------------------------------------------------------------------------------------------

// Writes a block's part of partial: sums of VALUES values a channel.
template <class A, int VALUES, int V, bool NHWC, int U>
__device__ void reduce_sums(A* partial, A (&sum)[VALUES][NHWC ? V : 1], const Walk<V, NHWC, U>& walk, int lanes) {
  const int OWN = NHWC ? V : 1;
  __shared__ A shared[NORM_WARPS][VALUES][NORM_SLOTS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int value = 0; value < VALUES; ++value) {
#pragma unroll
    for (int c = 0; c < OWN; ++c) {
      for (int distance = 16; distance >= lanes; distance /= 2) {
        sum[value][c] += __shfl_down_sync(0xffffffffu, sum[value][c], distance);
      }
      if (lane < lanes) shared[warp][value][lane * OWN + c] = sum[value][c];
    }
  }
  __syncthreads();
  int slot = threadIdx.x;
  if (slot >= walk.slots) return;
  A* out = partial + ((int64)blockIdx.x * gridDim.y + blockIdx.y) * VALUES * walk.slots + slot;
#pragma unroll
  for (int value = 0; value < VALUES; ++value) {
    A total = A(0);
    for (int w = 0; w < NORM_WARPS; ++w) total += shared[w][value][slot];
    out[value * walk.slots] = total;
  }
}

// In the last block of a tile, of every thread's slot: the sums.
template <class A, int VALUES, int V, bool NHWC, int U>
__device__ void combine_sums(A (&total)[VALUES], const A* partial, const Walk<V, NHWC, U>& walk) {
  Parts parts(walk.slots);
  int64 splits = gridDim.y;
  const A* from = partial + (int64)blockIdx.x * splits * VALUES * walk.slots + parts.slot;
  A sum[VALUES];
#pragma unroll
  for (int value = 0; value < VALUES; ++value) sum[value] = A(0);
  if (parts.part < parts.count) {
    for (int64 first = parts.part; first < splits; first += NORM_BATCH * parts.count) {
      A read[NORM_BATCH][VALUES];
#pragma unroll
      for (int i = 0; i < NORM_BATCH; ++i) {
        int64 split = first + i * parts.count;
#pragma unroll
        for (int value = 0; value < VALUES; ++value) {
          read[i][value] = split < splits ? from[(split * VALUES + value) * walk.slots] : A(0);
        }
      }
#pragma unroll
      for (int i = 0; i < NORM_BATCH; ++i) {
#pragma unroll
        for (int value = 0; value < VALUES; ++value) sum[value] += read[i][value];
      }
    }
  }
#pragma unroll
  for (int value = 0; value < VALUES; ++value) total[value] = add_parts(sum[value], parts, walk.slots);
}

// Of one norm: dweight and dbias = (or += when accumulate); means (2, channels) = the sums of dy and of dy * x normalised
// over count, or zeros when count is 0 (constant statistics).
template <class A>
struct GradientOut {
  A *dweight, *dbias, *means;
  const A* inverse;
  int accumulate;

  // sum of dy, and of dy * (x - mean)
  __device__ void write(A sum, A product, int64 channel, int64 channels, int64 count) const {
    product *= inverse[channel];
    dweight[channel] = accumulate ? dweight[channel] + product : product;
    dbias[channel] = accumulate ? dbias[channel] + sum : sum;
    means[channel] = count ? sum / A(count) : A(0);
    means[channels + channel] = count ? product / A(count) : A(0);
  }
};
