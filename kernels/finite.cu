// The search for NaN and infinity in gradients: in a flat storage of arrays, and in separate arrays by a table.
//
// flags, int32: [any, index of the first invalid array (`segments` when none), one flag an array]. All are written by
// every search. What is written does not depend on the order of the threads. Bits are tested (an exponent of all ones),
// so that no floating-point option can remove the test. With inv_scale, which may be null, a finite number that times
// inv_scale is none in the accumulator's type counts too; that is looked at only where inv_scale is above 1.
//
// Memory is seen as rows of 32 aligned 16-byte vectors, one a lane. Each warp has a range of rows and reads ROWS of them
// at a time. Mostly nothing is found. So a search of a flat storage learns only whether a block has met anything, without
// a look at the offsets; a block that has looks again and marks the arrays. From records and marks the flags are made: by
// the block that finishes last when there is a ticket (zero between searches), else by finish_invalid in a launch after.
// Blocks have THREADS threads in one dimension. `blocks` is that of the search.

#include "common.cuh"

const int THREADS = 32 * WARPS;
const int ROWS = 8;

// --- the four formats -------------------------------------------------------------------------------------------------

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
  typedef float Number;
  __device__ static bool is_invalid(uint16 bits) { return is_full16<0x7c00u>(bits); }
  __device__ static bool any_invalid(uint4 v) {
    return any_full16<0x7c00u>(v.x) | any_full16<0x7c00u>(v.y) | any_full16<0x7c00u>(v.z) | any_full16<0x7c00u>(v.w);
  }
  __device__ static double value(uint16 bits) { return widen(*(const __half*)&bits); }
};
struct BFloat16 {
  typedef uint16 Bits;
  typedef float Number;
  __device__ static bool is_invalid(uint16 bits) { return is_full16<0x7f80u>(bits); }
  __device__ static bool any_invalid(uint4 v) {
    return any_full16<0x7f80u>(v.x) | any_full16<0x7f80u>(v.y) | any_full16<0x7f80u>(v.z) | any_full16<0x7f80u>(v.w);
  }
  __device__ static double value(uint16 bits) { return __int_as_float((int)((uint32)bits << 16)); }
};
struct Float32 {
  typedef uint32 Bits;
  typedef float Number;
  __device__ static bool is_invalid(uint32 bits) { return (bits & 0x7f800000u) == 0x7f800000u; }
  __device__ static bool any_invalid(uint4 v) {
    return is_invalid(v.x) | is_invalid(v.y) | is_invalid(v.z) | is_invalid(v.w);
  }
  __device__ static double value(uint32 bits) { return __int_as_float((int)bits); }
};
struct Float64 {
  typedef uint64 Bits;
  typedef double Number;
  __device__ static bool is_invalid_upper(uint32 bits) { return (bits & 0x7ff00000u) == 0x7ff00000u; }
  __device__ static bool is_invalid(uint64 bits) { return is_invalid_upper((uint32)(bits >> 32)); }
  __device__ static bool any_invalid(uint4 v) { return is_invalid_upper(v.y) | is_invalid_upper(v.w); }
  __device__ static double value(uint64 bits) { return __longlong_as_double((long long)bits); }
};

template <class Format>
constexpr int WIDTH = 16 / sizeof(typename Format::Bits);

__device__ inline uint32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

template <class Format>
__device__ inline typename Format::Bits element_of(uint4 v, int i) {
  if constexpr (WIDTH<Format> == 2) {
    return (uint64)word_of(v, 2 * i + 1) << 32 | word_of(v, 2 * i);
  } else if constexpr (WIDTH<Format> == 4) {
    return word_of(v, i);
  } else {
    return (uint16)(word_of(v, i / 2) >> (i % 2 * 16));
  }
}

// The squares of a vector's elements [from, to), summed in double: exact each but for Float64.
template <class Format>
__device__ inline double squares(uint4 v, int from, int to) {
  double sum = 0;
#pragma unroll
  for (int i = 0; i < WIDTH<Format>; ++i) {
    if (i >= from && i < to) {
      double value = Format::value(element_of<Format>(v, i));
      sum += value * value;
    }
  }
  return sum;
}

// What gradients will be multiplied by, in the type of the update.
template <class Format>
struct Unscale {
  typedef typename Format::Number Number;
  Number factor;
  bool above_one;

  __device__ static bool is_full(float product) { return Float32::is_invalid(__float_as_uint(product)); }
  __device__ static bool is_full(double product) { return Float64::is_invalid((uint64)__double_as_longlong(product)); }
  __device__ static Unscale of(const double* inv_scale) {
    if (inv_scale == nullptr) return {1, false};
    // By the bits: there is no comparison that an option could change.
    return {(Number)*inv_scale, __double_as_longlong(*inv_scale) > 0x3ff0000000000000};
  }
  __device__ bool overflows(typename Format::Bits bits) const {
    return above_one && is_full((Number)Format::value(bits) * factor);
  }
  __device__ bool any_overflows(uint4 v) const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < WIDTH<Format>; ++i) any |= overflows(element_of<Format>(v, i));
    return any;
  }
};

// --- rows -------------------------------------------------------------------------------------------------------------

// `count` elements, of which the first lies `lead` elements behind the start of vector 0, which is aligned.
template <class Format>
struct Run {
  typedef typename Format::Bits Bits;
  static constexpr int ROW = 32 * WIDTH<Format>;

  const uint4* __restrict__ vectors;
  int64 lead, count;

  __device__ static Run of(const Bits* start, int64 count) {
    int64 lead = (int64)((uint64)start % 16 / sizeof(Bits));
    return {(const uint4*)(start - lead), lead, count};
  }
  __device__ int64 rows() const { return count == 0 ? 0 : (lead + count + ROW - 1) / ROW; }

  // Zeros where there are no elements; nothing outside of them is read.
  __device__ uint4 vector(int64 place) const {
    int64 first = place * WIDTH<Format> - lead;
    if (first >= 0 && first + WIDTH<Format> <= count) return vectors[place];
    const Bits* start = (const Bits*)vectors + lead;
    uint32 words[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < WIDTH<Format>; ++i) {
      if (first + i < 0 || first + i >= count) continue;
      uint64 bits = start[first + i];
      int shift = i * 8 * (int)sizeof(Bits);
      words[shift / 32] |= (uint32)(bits << shift % 32);
      if (sizeof(Bits) == 8) words[shift / 32 + 1] = (uint32)(bits >> 32);
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // This lane's vectors of rows [row, row + ROWS), zeros from row `stop` on.
  __device__ void read(uint4 (&v)[ROWS], int64 row, int64 stop) const {
    int lane = threadIdx.x % 32;
    int64 first = row * ROW - lead;
    if (row + ROWS <= stop && first >= 0 && first + ROWS * ROW <= count) {
      const uint4* __restrict__ from = vectors + row * 32 + lane;
#pragma unroll
      for (int i = 0; i < ROWS; ++i) v[i] = from[i * 32];
    } else if (first >= 0 && stop - row < ROWS && first + (stop - row) * ROW <= count) {
      // The end of a warp's rows: as many loads at once as there are.
      const uint4* __restrict__ from = vectors + row * 32 + lane;
      int left = (int)(stop - row);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        v[i] = {0, 0, 0, 0};
        if (i < left) v[i] = from[i * 32];
      }
    } else {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) v[i] = row + i < stop ? vector((row + i) * 32 + lane) : uint4{0, 0, 0, 0};
    }
  }
};

// Each warp has `quotient` rows and the first `remainder` warps one more: the first row of a warp, and the warp of a row.
struct Share {
  int64 quotient, remainder;
  __device__ int64 start(int64 warp) const {
    return warp * quotient + (warp < remainder ? warp : remainder);
  }
  __device__ int64 warp_of(int64 row) const {
    int64 longer = remainder * (quotient + 1);
    return row < longer ? row / (quotient + 1) : remainder + (row - longer) / quotient;
  }
};

// The last array that starts at or before an element: the one that holds it, when there is one.
__device__ inline int64 segment_of(const int64* offsets, int64 segments, int64 element) {
  int64 low = 0, high = segments - 1;
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

// --- sums of squares --------------------------------------------------------------------------------------------------

// Goes with a warp through its rows and sums squares by array. A sum goes to cells[array] when the array or the range
// ends. The caller gives cells + warp: warps are in the order of memory as arrays are, so that no two sums share a cell.
template <class Format>
struct Squares {
  const int64* offsets;
  int64 segments;
  double* cells;
  int64 segment, begin, end;
  double sum;

  __device__ void enter(int64 index) {
    segment = index;
    if (segment >= segments) return;
    begin = offsets[segment];
    end = offsets[segment + 1];
    sum = 0;
  }
  // The first array that ends behind an element.
  __device__ void start(int64 element) {
    int64 low = 0, high = segments;
    while (low < high) {
      int64 middle = (low + high) / 2;
      if (offsets[middle + 1] > element) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    enter(low);
  }
  __device__ void leave() {
    for (int width = 16; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width);
    if (threadIdx.x % 32 == 0) cells[segment] = sum;
  }
  // The rows [row, row + ROWS), of which those from `stop` on are zeros in v.
  __device__ void add(const uint4 (&v)[ROWS], const Run<Format>& run, int64 row, int64 stop) {
    if (stop > row + ROWS) stop = row + ROWS;
    if (segment >= segments) return;
    if (begin <= row * run.ROW - run.lead && stop * run.ROW - run.lead < end) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) sum += squares<Format>(v[i], 0, WIDTH<Format>);
      return;
    }
    // Rare: what was read a moment ago is still near.
#pragma unroll 1
    for (; row < stop; ++row) add_row(run.vector(row * 32 + threadIdx.x % 32), row * run.ROW - run.lead);
  }
  __device__ void add_row(uint4 v, int64 first) {
    int64 mine = first + threadIdx.x % 32 * WIDTH<Format>;
    while (segment < segments) {
      sum += squares<Format>(v, within(begin - mine), within(end - mine));
      if (end > first + Run<Format>::ROW) return;
      leave();
      enter(segment + 1);
    }
  }
  __device__ static int within(int64 place) {
    return place < 0 ? 0 : place > WIDTH<Format> ? WIDTH<Format> : (int)place;
  }
  // The range ends before element `last`.
  __device__ void stop(int64 last) {
    if (segment < segments && begin < last) leave();
  }
};

// --- flags ------------------------------------------------------------------------------------------------------------

__device__ inline void clear_flags(int* flags, int64 segments) {
  for (int64 i = threadIdx.x; i < 2 + segments; i += THREADS) flags[i] = i == 1 ? (int)segments : 0;
  __syncthreads();
}

__device__ inline void raise_flags(int* flags, int64 segment) {
  flags[0] = 1;
  flags[2 + segment] = 1;
  atomicMin(&flags[1], (int)segment);
}

// records: a block's first and last array that it may have marked, first -1 when it has met nothing; its marks are
// marks[block + array].
__device__ inline void collect(int* flags, const int* records, const int* marks, int64 blocks, int64 segments) {
  for (int64 block = threadIdx.x; block < blocks; block += THREADS) {
    if (records[2 * block] < 0) continue;
    for (int64 segment = records[2 * block]; segment <= records[2 * block + 1]; ++segment) {
      if (marks[block + segment]) raise_flags(flags, segment);
    }
  }
}

// Ends a block's part; all its threads call it. Says whether this block is the last one; then found says whether any has
// found something, and what all have written can be read. The lower half of the ticket counts blocks, the upper those
// that have found something.
__device__ inline bool is_last(uint32* ticket, bool any, bool* found) {
  __shared__ uint32 before;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    before = atomicAdd(ticket, any ? 0x10001u : 1u);
    // Only then is anything read that other blocks have written.
    if (any || before >> 16 != 0) __threadfence();
  }
  __syncthreads();
  if ((before & 0xffffu) + 1 != gridDim.x) return false;
  if (threadIdx.x == 0) *ticket = 0;
  *found = any || before >> 16 != 0;
  return true;
}

// --- a flat storage ---------------------------------------------------------------------------------------------------

// Looks again at the rows [row, stop) of each thread that has met something, and marks arrays. Returns the first array
// that may be marked, and the last; -1 when the block's rows lie outside of all arrays.
template <class Format>
__device__ void mark(int* record, int* marks, const Run<Format>& run, Share share, const int64* offsets, int64 segments,
                     Unscale<Format> unscale, int64 row, int64 stop, bool hit) {
  const int64 ROW = Run<Format>::ROW;
  int64 lower = offsets[0], upper = offsets[segments];
  int64 from = share.start((int64)blockIdx.x * WARPS) * ROW - run.lead;
  int64 to = share.start((int64)(blockIdx.x + 1) * WARPS) * ROW - run.lead;
  if (from < lower) from = lower;
  if (to > upper) to = upper;
  if (from >= to) return;
  int64 first = segment_of(offsets, segments, from);
  int64 last = segment_of(offsets, segments, to - 1);
  for (int64 segment = first + threadIdx.x; segment <= last; segment += THREADS) marks[blockIdx.x + segment] = 0;
  __syncthreads();
  // The array that was marked last: its other elements need no look.
  int64 begin = 0, end = 0;
  for (; hit && row < stop; ++row) {
    int64 place = row * 32 + threadIdx.x % 32;
    uint4 v = run.vector(place);
    if (!Format::any_invalid(v) && !unscale.any_overflows(v)) continue;
#pragma unroll
    for (int i = 0; i < WIDTH<Format>; ++i) {
      int64 element = place * WIDTH<Format> - run.lead + i;
      typename Format::Bits bits = element_of<Format>(v, i);
      if (!Format::is_invalid(bits) && !unscale.overflows(bits)) continue;
      if (element < lower || element >= upper) continue;
      if (element >= begin && element < end) continue;
      int64 segment = segment_of(offsets, segments, element);
      begin = offsets[segment];
      end = offsets[segment + 1];
      marks[blockIdx.x + segment] = 1;
    }
  }
  if (threadIdx.x == 0) {
    record[0] = (int)first;
    record[1] = (int)last;
  }
}

template <class Format, bool SUMS>
__device__ void find_invalid(int* flags, int* records, int* marks, uint32* ticket, double* cells,
                             const typename Format::Bits* flat, int64 count, const int64* offsets, int64 segments,
                             Share share, const double* inv_scale) {
  // Long before the ticket, whose fence waits for it.
  int* record = records + 2 * blockIdx.x;
  if (threadIdx.x == 0) record[0] = -1;
  Unscale<Format> unscale = {1, false};
  Run<Format> run = Run<Format>::of(flat, count);
  int64 warp = (int64)blockIdx.x * WARPS + threadIdx.x / 32;
  int64 begin = share.start(warp), stop = share.start(warp + 1);
  Squares<Format> sums = {offsets, segments, cells + warp, segments};
  bool hit = false;
  for (int64 row = begin; row < stop; row += ROWS) {
    uint4 v[ROWS];
    run.read(v, row, stop);
    // The loads are under way; what else is read from memory must not delay them.
    if (row == begin) {
      unscale = Unscale<Format>::of(inv_scale);
      if (SUMS) sums.start(row * run.ROW - run.lead);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) hit |= Format::any_invalid(v[i]);
    if (unscale.above_one) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) hit |= unscale.any_overflows(v[i]);
    }
    if (SUMS) sums.add(v, run, row, stop);
  }
  if (SUMS && begin < stop) sums.stop(stop * run.ROW - run.lead);
  bool any = __syncthreads_or(hit);
  if (any && segments > 0) mark<Format>(record, marks, run, share, offsets, segments, unscale, begin, stop, hit);
  bool found;
  if (SUMS || ticket == nullptr || !is_last(ticket, any, &found)) return;
  clear_flags(flags, segments);
  if (found) collect(flags, records, marks, gridDim.x, segments);
}

// records (blocks, 2), marks (blocks + segments). With sums, cells (blocks * WARPS + segments) are for finish_invalid.
#define SEARCHES(name, Format)                                                                                        \
  extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                            \
      find_invalid_##name(int* flags, int* records, int* marks, uint32* ticket, const Format::Bits* flat,             \
                          int64 count, const int64* offsets, int64 segments, int64 quotient, int64 remainder,         \
                          const double* inv_scale) {                                                                  \
    find_invalid<Format, false>(flags, records, marks, ticket, nullptr, flat, count, offsets, segments,               \
                                Share{quotient, remainder}, inv_scale);                                               \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                            \
      find_invalid_sums_##name(int* records, int* marks, double* cells, const Format::Bits* flat, int64 count,        \
                               const int64* offsets, int64 segments, int64 quotient, int64 remainder,                 \
                               const double* inv_scale) {                                                             \
    find_invalid<Format, true>(nullptr, records, marks, nullptr, cells, flat, count, offsets, segments,               \
                               Share{quotient, remainder}, inv_scale);                                                \
  }
SEARCHES(f16, Float16)
SEARCHES(bf16, BFloat16)
SEARCHES(f32, Float32)
SEARCHES(f64, Float64)

// The flags, by block 0, and the sums, a warp an array and WARPS of them a block; sums may be null. `lead` is the run's,
// `row` the elements of a row.
extern "C" __global__ void finish_invalid(int* flags, const int* records, const int* marks, double* sums,
                                          const double* cells, const int64* offsets, int64 segments, int64 blocks,
                                          int64 quotient, int64 remainder, int64 lead, int64 row) {
  if (blockIdx.x == 0) {
    bool any = false;
    for (int64 block = threadIdx.x; block < blocks; block += THREADS) any |= records[2 * block] >= 0;
    bool found = __syncthreads_or(any);
    clear_flags(flags, segments);
    if (found) collect(flags, records, marks, blocks, segments);
  }
  int64 segment = (int64)blockIdx.x * WARPS + threadIdx.x / 32;
  if (sums == nullptr || segment >= segments) return;
  int64 begin = offsets[segment], end = offsets[segment + 1];
  double sum = 0;
  if (begin < end) {
    Share share = {quotient, remainder};
    int64 last = share.warp_of((end - 1 + lead) / row);
    for (int64 warp = share.warp_of((begin + lead) / row) + threadIdx.x % 32; warp <= last; warp += 32) {
      sum += cells[warp + segment];
    }
  }
  for (int width = 16; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width);
  if (threadIdx.x % 32 == 0) sums[segment] = sum;
}

// --- separate arrays --------------------------------------------------------------------------------------------------

// A part of an array that one warp reads. Warp w begins with piece w and goes on with `next`, -1 when there is none.
struct Piece {
  const void* start;
  int64 count;  // elements
  int array, next;
  int64 format;  // 0 to 3: as below
};

template <class Format>
__device__ inline bool scan(const Piece& piece) {
  Run<Format> run = Run<Format>::of((const typename Format::Bits*)piece.start, piece.count);
  int64 stop = run.rows();
  bool hit = false;
  for (int64 row = 0; row < stop; row += ROWS) {
    uint4 v[ROWS];
    run.read(v, row, stop);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) hit |= Format::any_invalid(v[i]);
  }
  return hit;
}

// pieces (total), marks (total).
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    find_invalid_list(int* flags, int* marks, uint32* ticket, const Piece* __restrict__ pieces, int64 total,
                      int64 segments) {
  bool any = false;
  int64 place = (int64)blockIdx.x * WARPS + threadIdx.x / 32;
  Piece piece = pieces[place];
  while (place >= 0) {
    Piece following = pieces[piece.next < 0 ? place : piece.next];
    bool hit = piece.format == 0   ? scan<Float16>(piece)
               : piece.format == 1 ? scan<BFloat16>(piece)
               : piece.format == 2 ? scan<Float32>(piece)
                                   : scan<Float64>(piece);
    hit = __any_sync(0xffffffffu, hit);
    if (threadIdx.x % 32 == 0) marks[place] = hit;
    any |= hit;
    place = piece.next;
    piece = following;
  }
  bool found;
  if (!is_last(ticket, __syncthreads_or(any), &found)) return;
  clear_flags(flags, segments);
  if (!found) return;
  for (int64 i = threadIdx.x; i < total; i += THREADS) {
    if (marks[i]) raise_flags(flags, pieces[i].array);
  }
}

// --- flags of several searches ----------------------------------------------------------------------------------------

// Appends up to four flag arrays of n0 to n3 arrays to `out`, behind those of `before` arrays in it; the first call has
// before == 0. `segments` is the number in all. One block.
extern "C" __global__ void join_flags(int* out, int64 segments, int64 before, const int* part0, int64 n0,
                                      const int* part1, int64 n1, const int* part2, int64 n2, const int* part3,
                                      int64 n3) {
  const int* parts[4] = {part0, part1, part2, part3};
  int64 sizes[4] = {n0, n1, n2, n3};
  bool any = before > 0 && out[0] != 0;
  int64 first = any ? out[1] : segments;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (parts[k] == nullptr) continue;
    for (int64 i = threadIdx.x; i < sizes[k]; i += blockDim.x) out[2 + before + i] = parts[k][2 + i];
    if (!any && parts[k][0] != 0) {
      any = true;
      first = before + parts[k][1];
    }
    before += sizes[k];
  }
  if (threadIdx.x == 0) {
    out[0] = any;
    out[1] = (int)first;
  }
}
