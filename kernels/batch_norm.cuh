// What passes over all elements of a channel share: how a block goes through memory, and sums in one launch.
//
// Memory is dense, (outer, channels, inner): nchw with inner above 1, else nhwc with inner 1. Grid (tiles, splits). nhwc: a
// tile is `lanes` (a power of two, up to 32) times V neighbouring channels, each thread has V of them and goes down the rows.
// nchw: a tile is one channel, and lanes is 1. V elements are one memory access of a thread: a vector, aligned to its size, or
// a single element. A row of accesses is one access of each thread of a block, a chunk is U of them, read at once.
//
// A pass that only maps has blocks of NORM_THREADS threads, and its split s has the chunks s, s + splits, s + 2 * splits, ...
// A pass that sums has blocks of THREADS, REDUCTION unless a kernel says otherwise, and its split s has the rows of accesses
// s, s + splits, ..., of which it reads U at once: splits differ by a row at most, and few of them keep what is to do at the
// end short. All that a last block reads then is under way at once, so that it waits for the second-level cache only once.
// A thread of nhwc has V sums of each kind, and of nchw one: there is room for twice the threads, and half as many accesses
// at once are enough.
//
// partial is (tiles, splits, values, slots), slots = lanes * V or 1, in the accumulator's type, aligned to 16 bytes. ticket
// has a word a tile and one more, zero between launches: the block that finishes a tile last adds up the tile's parts. The
// order of all sums depends on the sizes and the launch shape alone; there are no float atomics.

#pragma once

#include "common.cuh"

const int NORM_THREADS = 384;
template <bool NHWC>
constexpr int REDUCTION = NHWC ? 256 : 512;
const int REDUCTION_BLOCKS = 2;
// Parts whose values a thread of the last block reads at once.
const int NORM_BATCH = 8;
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

template <int V, bool NHWC, int U, int THREADS>
struct Walk {
  static constexpr int OWN = NHWC ? V : 1;     // channels of a thread
  static constexpr int WEIGHT = NHWC ? 1 : V;  // elements that an access has of a channel

  int64 count, gap;          // accesses along the channel; how many are between two of a thread in a chunk
  int64 channels, channel;   // all, and the thread's first
  int64 inner, width, pitch; // nchw: width accesses make a row; pitch: elements between two accesses of a thread
  int64 columns;
  int slots, step, place;

  // spread: how many rows of accesses the accesses of a chunk are apart.
  __device__ Walk(int64 outer, int64 channels_, int64 inner_, int lanes, int64 spread)
      : channels(channels_), inner(inner_) {
    if (NHWC) {
      int bits = __ffs(lanes) - 1;
      step = THREADS >> bits;
      gap = spread * step;
      place = (int)threadIdx.x >> bits;
      channel = ((int64)blockIdx.x * lanes + ((int)threadIdx.x & (lanes - 1))) * V;
      count = outer;
      width = 1;
      columns = 0;
      pitch = gap * channels;
    } else {
      step = THREADS;
      gap = spread * step;
      place = threadIdx.x;
      channel = blockIdx.x;
      width = inner / V;
      count = outer * width;
      int64 rows = divide(gap, width, &columns);
      pitch = rows * channels * inner + columns * V;
    }
    slots = lanes * OWN;
  }
  __device__ bool active() const { return channel < channels; }
  __device__ int64 rows() const { return (count + step - 1) / step; }
  __device__ int64 chunks() const { return (count + (int64)step * U - 1) / ((int64)step * U); }

  // Where the thread's accesses begin in a chunk whose first row of accesses is `row`, and how many of them, the first ones,
  // are in the array.
  __device__ int seek(int64 row, int64 (&offset)[U]) const {
    int64 first = row * step + place;
    if (NHWC) {
      int64 base = first * channels + channel;
#pragma unroll
      for (int u = 0; u < U; ++u) offset[u] = base + u * pitch;
    } else {
      int64 column;
      int64 line = divide(first, width, &column);
      offset[0] = (line * channels + channel) * inner + column * V;
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
    int64 left = count - first;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      n += left > 0;
      left -= gap;
    }
    return n;
  }
};

// --- one launch -------------------------------------------------------------------------------------------------------

// All threads of a block call it when the block's part is written: true in the last of `blocks`, which can then read what
// the others have written.
__device__ inline bool is_last_block(uint32* ticket, uint32 blocks) {
  bool last = false;
  __syncthreads();
  if (threadIdx.x == 0) last = take_ticket(ticket, blocks);
  return __syncthreads_or(last);
}

// Of the totals over all threads of a block that have the same number modulo `columns` (a power of two, up to 32) the one
// numbered threadIdx.x, of VALUES * columns * N: value * columns * N + column * N + n. At most NORM_SLOTS a value.
template <int THREADS, class A, int VALUES, int N>
__device__ A block_total(A (&values)[VALUES][N], int columns) {
  static_assert(THREADS >= VALUES * NORM_SLOTS, "a thread a total");
  __shared__ A shared[THREADS / 32][VALUES * NORM_SLOTS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slots = columns * N;
  for (int distance = 16; distance >= columns; distance /= 2) {
#pragma unroll
    for (int value = 0; value < VALUES; ++value) {
#pragma unroll
      for (int i = 0; i < N; ++i) values[value][i] += __shfl_down_sync(0xffffffffu, values[value][i], distance);
    }
  }
  if (lane < columns) {
#pragma unroll
    for (int value = 0; value < VALUES; ++value) {
#pragma unroll
      for (int i = 0; i < N; ++i) shared[warp][value * slots + lane * N + i] = values[value][i];
    }
  }
  __syncthreads();
  A total = A(0);
  if (threadIdx.x < VALUES * slots) {
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) total += shared[w][threadIdx.x];
  }
  return total;
}

// The same, with each thread's own totals in place of its values.
template <int THREADS, class A, int VALUES, int N>
__device__ void block_totals(A (&values)[VALUES][N], int columns) {
  __shared__ A totals[VALUES * NORM_SLOTS];
  A total = block_total<THREADS>(values, columns);
  int slots = columns * N, column = (int)threadIdx.x & (columns - 1);
  if (threadIdx.x < VALUES * slots) totals[threadIdx.x] = total;
  __syncthreads();
#pragma unroll
  for (int value = 0; value < VALUES; ++value) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[value][i] = totals[value * slots + column * N + i];
  }
}

// In the last block of a tile: how its threads share the parts. Each reads N neighbouring slots of every `parts`-th of them.
template <class A, int THREADS, int OWN>
struct Parts {
  static constexpr int N = OWN % (16 / (int)sizeof(A)) == 0 ? 16 / (int)sizeof(A) : 1;
  int columns, part, parts, slot;
  __device__ explicit Parts(int slots) {
    columns = slots / N;
    int bits = __ffs(columns) - 1;
    parts = THREADS >> bits;
    part = (int)threadIdx.x >> bits;
    slot = ((int)threadIdx.x & (columns - 1)) * N;
  }
};

// --- moments ----------------------------------------------------------------------------------------------------------

// Count, means and sums of squared distances from the mean, of N channels with one count (Chan, Golub and LeVeque 1979):
// unlike the sum of squares minus the square of the sum they keep their digits when the mean is large.
template <class A, int N>
struct MomentsOf {
  A count, mean[N], m2[N];

  __device__ void merge(A other_count, const A (&other_mean)[N], const A (&other_m2)[N]) {
    if (other_count == A(0)) return;
    A total = count + other_count;
    A weight = other_count / total;
    A cross = count * weight;
#pragma unroll
    for (int c = 0; c < N; ++c) {
      A distance = other_mean[c] - mean[c];
      mean[c] += distance * weight;
      m2[c] += other_m2[c] + distance * distance * cross;
    }
    count = total;
  }
};

// Sums around a shift, of N channels with one count. The shift is the mean of at least half of what has been added, and of
// all at the end: so of the sum of squares only a bit or two is lost to that of its mean.
template <class A, int N>
struct Shifted {
  A count, again, shift[N], sum[N], squares[N];

  __device__ void clear() {
    count = again = A(0);
#pragma unroll
    for (int c = 0; c < N; ++c) shift[c] = sum[c] = squares[c] = A(0);
  }
  __device__ void add(A x, int c) {
    A distance = x - shift[c];
    sum[c] += distance;
    squares[c] += distance * distance;
  }
  // Moves the shift to the mean.
  __device__ void center() {
    A share = A(1) / count;
#pragma unroll
    for (int c = 0; c < N; ++c) {
      A mean = shift[c] + sum[c] * share;
      A moved = mean - shift[c];
      A rest = sum[c] - count * moved;
      squares[c] -= moved * (sum[c] + rest);
      sum[c] = rest;
      shift[c] = mean;
    }
  }
  __device__ void counted(A items) {
    count += items;
    if (count < again) return;
    center();
    again = count + count;
  }
};

// Reads a block's rows of x and writes its part of partial: means, then sums of squared distances.
template <class T, int V, bool NHWC, int U, int THREADS>
__device__ void reduce_moments(Accumulator<T>* partial, const T* x, const Walk<V, NHWC, U, THREADS>& walk, int lanes) {
  typedef Accumulator<T> A;
  const int OWN = NHWC ? V : 1, WEIGHT = NHWC ? 1 : V;
  Shifted<A, OWN> shifted;
  shifted.clear();
  if (walk.active()) {
    for (int64 row = blockIdx.y; row * walk.step < walk.count; row += U * (int64)gridDim.y) {
      int64 offset[U];
      int n = walk.seek(row, offset);
      if (n == 0) break;
      Pack<T, V> read[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u < n) read[u] = load_pack<T, V>(x + offset[u]);
      }
      if (shifted.count == A(0)) {
#pragma unroll
        for (int c = 0; c < OWN; ++c) shifted.shift[c] = element(read[0], c);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u >= n) break;
#pragma unroll
        for (int i = 0; i < V; ++i) shifted.add(element(read[u], i), NHWC ? i : 0);
      }
      shifted.counted(A(n * WEIGHT));
    }
  }
  MomentsOf<A, OWN> value;
  if (shifted.count != A(0)) shifted.center();
  value.count = shifted.count;
#pragma unroll
  for (int c = 0; c < OWN; ++c) {
    value.mean[c] = shifted.shift[c];
    value.m2[c] = shifted.squares[c] < A(0) ? A(0) : shifted.squares[c];
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
  const int WARPS_HERE = THREADS / 32;
  __shared__ A shared[WARPS_HERE][2][NORM_SLOTS], counts[WARPS_HERE][32];
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
  // Around the first warp's mean, then around that of all: no division a warp.
  A shift = shared[0][0][slot], count = A(0), sum = A(0), m2 = A(0);
#pragma unroll
  for (int w = 0; w < WARPS_HERE; ++w) {
    A items = counts[w][slot / OWN];
    count += items;
    sum += items * (shared[w][0][slot] - shift);
  }
  A moved = sum / count;
#pragma unroll
  for (int w = 0; w < WARPS_HERE; ++w) {
    A items = counts[w][slot / OWN];
    // Of a warp without elements the mean is no number of this channel: nothing times its square may be NaN.
    A distance = items == A(0) ? A(0) : shared[w][0][slot] - shift - moved;
    m2 += shared[w][1][slot] + items * (distance * distance);
  }
  A* out = partial + ((int64)blockIdx.x * gridDim.y + blockIdx.y) * 2 * walk.slots + slot;
  out[0] = shift + moved;
  out[walk.slots] = m2;
}

// How many elements of a channel each split has.
template <class A>
struct Shares {
  int rest, last;
  A usual, longer, ending;

  template <int V, bool NHWC, int U, int THREADS>
  __device__ Shares(const Walk<V, NHWC, U, THREADS>& walk, int splits) {
    int64 rows = walk.rows(), left;
    int64 each = divide(rows, splits, &left) * walk.step;
    rest = (int)left;
    // The last row may not be full.
    last = (rest ? rest : splits) - 1;
    int64 missing = rows * walk.step - walk.count;
    usual = A(each * walk.WEIGHT);
    longer = A((each + walk.step) * walk.WEIGHT);
    ending = A((each + (rest ? walk.step : 0) - missing) * walk.WEIGHT);
  }
  __device__ A of(int split) const { return split == last ? ending : split < rest ? longer : usual; }
};

// In the last block of a tile, of the slot threadIdx.x: the mean, and the sum of squared distances from it.
template <class A, int V, bool NHWC, int U, int THREADS>
__device__ void combine_moments(A* mean, A* m2, const A* partial, const Walk<V, NHWC, U, THREADS>& walk) {
  typedef Parts<A, THREADS, NHWC ? V : 1> P;
  const int N = P::N;
  P parts(walk.slots);
  int splits = gridDim.y, pitch = 2 * walk.slots;
  const A* from = partial + (int64)blockIdx.x * splits * pitch + parts.slot;
  A portion = A(1) / A(walk.count * Walk<V, NHWC, U, THREADS>::WEIGHT);
  Shares<A> shares(walk, splits);
  Pack<A, N> shift = load_pack<A, N>(from);
  A sums[2][N];
#pragma unroll
  for (int i = 0; i < N; ++i) sums[0][i] = sums[1][i] = A(0);
  for (int begin = parts.part; begin < splits; begin += NORM_BATCH * parts.parts) {
    Pack<A, N> means[NORM_BATCH], m2s[NORM_BATCH];
#pragma unroll
    for (int b = 0; b < NORM_BATCH; ++b) {
      int split = begin + b * parts.parts;
      if (split < splits) {
        means[b] = load_pack<A, N>(from + split * pitch);
        m2s[b] = load_pack<A, N>(from + split * pitch + walk.slots);
      }
    }
#pragma unroll
    for (int b = 0; b < NORM_BATCH; ++b) {
      int split = begin + b * parts.parts;
      if (split >= splits) break;
      A share = shares.of(split);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sums[0][i] += share * (means[b].e[i] - shift.e[i]);
        sums[1][i] += m2s[b].e[i];
      }
    }
  }
  block_totals<THREADS>(sums, parts.columns);
  // Around the mean itself: what was read before is near now.
  A moved[N], between[1][N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    moved[i] = sums[0][i] * portion;
    between[0][i] = A(0);
  }
#pragma unroll 4
  for (int split = parts.part; split < splits; split += parts.parts) {
    Pack<A, N> means = load_pack<A, N>(from + split * pitch);
    A share = shares.of(split);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      A distance = means.e[i] - shift.e[i] - moved[i];
      between[0][i] += share * (distance * distance);
    }
  }
  __shared__ A results[2][NORM_SLOTS];
  if (parts.part == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      results[0][parts.slot + i] = shift.e[i] + moved[i];
      results[1][parts.slot + i] = sums[1][i];
    }
  }
  A squares = block_total<THREADS>(between, parts.columns);
  if (threadIdx.x >= walk.slots) return;
  *mean = results[0][threadIdx.x];
  *m2 = results[1][threadIdx.x] + squares;
}

// saved_mean and saved_inv_variance =; pending_mean and pending_var = (1 - f) * pending + f * batch when not null, with
// f = momentum, or 1 / num_batches when momentum is negative. num_batches, when not null, rises by one, before it is used.
template <class T>
struct StatisticsOut {
  typedef Accumulator<T> A;
  A *saved_mean, *saved_inv_variance, *pending_mean, *pending_var;
  int64* num_batches;
  double momentum, eps;

  // Has what finish will read brought near.
  template <int V, bool NHWC, int U, int THREADS>
  __device__ void prefetch(const uint32* ticket, const Walk<V, NHWC, U, THREADS>& walk) const {
    int64 channel = (int64)blockIdx.x * walk.slots + threadIdx.x;
    if (blockIdx.y != 0 || threadIdx.x >= walk.slots || channel >= walk.channels) return;
    if (threadIdx.x == 0) prefetch_line(ticket + blockIdx.x);
    if (!pending_mean) return;
    prefetch_line(pending_mean + channel);
    prefetch_line(pending_var + channel);
    if (num_batches && threadIdx.x == 0) prefetch_line(num_batches);
  }
  template <int V, bool NHWC, int U, int THREADS>
  __device__ void finish(const A* partial, uint32* ticket, const Walk<V, NHWC, U, THREADS>& walk) const {
    if (!is_last_block(ticket + blockIdx.x, gridDim.y)) return;
    int64 channel = (int64)blockIdx.x * walk.slots + threadIdx.x;
    bool own = threadIdx.x < walk.slots && channel < walk.channels;
    A before_mean = A(0), before_var = A(0);
    if (own && pending_mean) {
      before_mean = pending_mean[channel];
      before_var = pending_var[channel];
    }
    A mean, m2;
    combine_moments(&mean, &m2, partial, walk);
    if (own) {
      A count = A(walk.count * Walk<V, NHWC, U, THREADS>::WEIGHT);
      saved_mean[channel] = mean;
      saved_inv_variance[channel] = A(1) / sqrt(m2 / count + A(eps));
      if (pending_mean) {
        A factor = momentum < 0 ? A(1) / A(num_batches[0] + 1) : A(momentum);
        pending_mean[channel] = (A(1) - factor) * before_mean + factor * mean;
        pending_var[channel] = (A(1) - factor) * before_var + factor * (m2 / (count - A(1)));
      }
    }
    if (!num_batches) return;
    // Where tiles read it, once all of them have.
    bool read = momentum < 0 && pending_mean;
    bool mine = read ? is_last_block(ticket + gridDim.x, gridDim.x) : blockIdx.x == 0;
    if (mine && threadIdx.x == 0) num_batches[0] += 1;
  }
};

// --- sums -------------------------------------------------------------------------------------------------------------

// Writes a block's part of partial: sums of VALUES values a channel.
template <class A, int VALUES, int V, bool NHWC, int U, int THREADS>
__device__ void reduce_sums(A* partial, A (&sum)[VALUES][NHWC ? V : 1], const Walk<V, NHWC, U, THREADS>& walk,
                            int lanes) {
  A total = block_total<THREADS>(sum, lanes);
  if (threadIdx.x >= VALUES * walk.slots) return;
  partial[((int64)blockIdx.x * gridDim.y + blockIdx.y) * VALUES * walk.slots + threadIdx.x] = total;
}

// In the last block of a tile, of the slot threadIdx.x: the sums.
template <class A, int VALUES, int V, bool NHWC, int U, int THREADS>
__device__ void combine_sums(A (&total)[VALUES], const A* partial, const Walk<V, NHWC, U, THREADS>& walk) {
  typedef Parts<A, THREADS, NHWC ? V : 1> P;
  const int N = P::N;
  P parts(walk.slots);
  int splits = gridDim.y, pitch = VALUES * walk.slots;
  const A* from = partial + (int64)blockIdx.x * splits * pitch + parts.slot;
  A sum[VALUES][N];
#pragma unroll
  for (int value = 0; value < VALUES; ++value) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[value][i] = A(0);
  }
  for (int begin = parts.part; begin < splits; begin += NORM_BATCH * parts.parts) {
    Pack<A, N> read[NORM_BATCH][VALUES];
#pragma unroll
    for (int b = 0; b < NORM_BATCH; ++b) {
      int split = begin + b * parts.parts;
#pragma unroll
      for (int value = 0; value < VALUES; ++value) {
        if (split < splits) read[b][value] = load_pack<A, N>(from + split * pitch + value * walk.slots);
      }
    }
#pragma unroll
    for (int b = 0; b < NORM_BATCH; ++b) {
      if (begin + b * parts.parts >= splits) break;
#pragma unroll
      for (int value = 0; value < VALUES; ++value) {
#pragma unroll
        for (int i = 0; i < N; ++i) sum[value][i] += read[b][value].e[i];
      }
    }
  }
  __shared__ A results[VALUES * NORM_SLOTS];
  A result = block_total<THREADS>(sum, parts.columns);
  if (threadIdx.x < VALUES * walk.slots) results[threadIdx.x] = result;
  __syncthreads();
  if (threadIdx.x >= walk.slots) return;
#pragma unroll
  for (int value = 0; value < VALUES; ++value) total[value] = results[value * walk.slots + threadIdx.x];
}

// Of one norm: dweight and dbias = (or += when accumulate); means (2, channels) = the sums of dy and of dy * x normalised
// over count, or zeros when count is 0 (constant statistics).
template <class A>
struct GradientOut {
  A *dweight, *dbias, *means;
  const A* inverse;
  int accumulate;

  // Has what write will read brought near.
  template <int V, bool NHWC, int U, int THREADS>
  __device__ void prefetch(const uint32* ticket, const Walk<V, NHWC, U, THREADS>& walk) const {
    int64 channel = (int64)blockIdx.x * walk.slots + threadIdx.x;
    if (blockIdx.y != 0 || threadIdx.x >= walk.slots || channel >= walk.channels) return;
    if (threadIdx.x == 0) prefetch_line(ticket + blockIdx.x);
    prefetch_line(inverse + channel);
    if (!accumulate) return;
    prefetch_line(dweight + channel);
    prefetch_line(dbias + channel);
  }
  // sum of dy, and of dy * (x - mean)
  __device__ void write(A sum, A product, int64 channel, int64 channels, int64 count) const {
    product *= inverse[channel];
    dweight[channel] = accumulate ? dweight[channel] + product : product;
    dbias[channel] = accumulate ? dbias[channel] + sum : sum;
    means[channel] = count ? sum / A(count) : A(0);
    means[channels + channel] = count ? product / A(count) : A(0);
  }
};
