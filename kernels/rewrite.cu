// Packed copies of operands in another form, and the way back: borders of zeros, more channels, another layout, blocks of
// space as channels, every other position.
//
// An operand is (n, c, d, h, w) with any positive strides; so is its staged copy, of other sizes. With C the operand's
// channels, element (n, c', d, h, w) of the staged copy is the operand's element
//   (n, c, d * step.d + f.d - shift.d, h * step.h + f.h - shift.h, w * step.w + f.w - shift.w)
//   where c' = ((f.d * factor.h + f.h) * factor.w + f.w) * C + c and 0 <= f < factor,
// and zero where the operand has none. With factor > step elements are copied several times; scatter_ takes factor <= step.
// gather_ writes (=) every element of the staged copy; scatter_ writes (=), or with
// `add` adds to (+=, rounded once), each element of the operand once: what the staged copy holds for it; where that holds
// nothing, = writes zero. Neighbours in c' are neighbours in a channels-last operand.
//
// Blocks (x, y) over `block_rows` rows at a time: at most MOST_ROWS, and no more than x * y. Grid (any, any): rows, and
// parts of a row. Sizes fit into 31 bits, and so does what a row holds; offsets have 64. Operand and copy must not overlap.
// gather_wide_ and scatter_channels_ move 16 bytes of channels at a time, on addresses and strides that allow it.
//
// gather_lines_, gather_quads_ and gather_planes_ read lines of the operand, along w without gaps, into shared memory, and
// write from there. Where width and channels are one dimension without gaps, it is given as the width: C is 1.
// Block (32, LINE_WARPS), a tile of `tile_rows` (n, d, h) and `tile_columns` of w of the staged copy at a time: of several
// rows only all columns. `pitch` elements a line, tile_rows * lines of a row * pitch * sizeof(T) <= LINES_BYTES, and at most
// LINE_CHANNELS staged channels and MOST_ROWS rows. `wide`: the operand's address and strides, but that of w, allow 16
// bytes at a time.

#include "common.cuh"

const int MOST_ROWS = 64;
const int NOWHERE = -(1 << 30);
const int LINE_WARPS = 8;
const int LINES_BYTES = 16384;
const int LINE_CHANNELS = 1024;

struct Sizes {
  int n, c, d, h, w;
};
struct Strides {
  int64 n, c, d, h, w;
};
struct Space {
  int d, h, w;
};
struct Map {
  Sizes staged;
  Strides staged_stride;
  Sizes size;
  Strides stride;
  Space step, factor, shift;
};

#define FIVE(type, name) type name##_n, type name##_c, type name##_d, type name##_h, type name##_w
#define FIVE_VALUES(name) {name##_n, name##_c, name##_d, name##_h, name##_w}
#define THREE(name) int name##_d, int name##_h, int name##_w
#define THREE_VALUES(name) {name##_d, name##_h, name##_w}
#define MAP_PARAMETERS                                                                                         \
  FIVE(int, staged), FIVE(int64, staged_stride), FIVE(int, size), FIVE(int64, stride), THREE(step), THREE(factor), \
      THREE(shift)
#define MAP_VALUES                                                                                             \
  {FIVE_VALUES(staged), FIVE_VALUES(staged_stride), FIVE_VALUES(size), FIVE_VALUES(stride), THREE_VALUES(step), \
   THREE_VALUES(factor), THREE_VALUES(shift)}

template <class T, int V>
struct alignas(sizeof(T) * V) Vector {
  T item[V];
};

__device__ inline bool inside(int place, int size) { return (uint32)place < (uint32)size; }

__device__ inline int split(int value, int divisor, int* remainder) {
  if (divisor == 1) {
    *remainder = 0;
    return value;
  }
  int quotient = (uint32)value / (uint32)divisor;
  *remainder = value - quotient * divisor;
  return quotient;
}

__device__ inline int thread_of_block() { return threadIdx.y * blockDim.x + threadIdx.x; }

// The loops of a block over its rows and their items; `start` is the first row of the block's share.
#define BLOCK_ROWS(start, rows)                                                              \
  for (int64 start = (int64)blockIdx.x * block_rows; start < (rows); start += (int64)gridDim.x * block_rows)
#define EACH_ITEM(row, item, start, rows, items)                                                             \
  for (int row = threadIdx.y; row < block_rows && (start) + row < (rows); row += blockDim.y)                 \
    for (int item = blockIdx.y * blockDim.x + threadIdx.x; item < (items); item += gridDim.y * blockDim.x)

// --- gather -----------------------------------------------------------------------------------------------------------

// Rows (n, c', d, h) of the staged copy, along w.
template <class T>
__device__ void gather_rows(T* staged, const T* source, const Map& m, int block_rows) {
  __shared__ int64 from[MOST_ROWS], to[MOST_ROWS];
  __shared__ int at_w[MOST_ROWS];
  int64 rows = (int64)m.staged.n * m.staged.c * m.staged.d * m.staged.h;
  BLOCK_ROWS(start, rows) {
    int mine = thread_of_block();
    if (mine < block_rows && start + mine < rows) {
      int64 n, channel, d, h;
      n = divide(divide(divide(start + mine, m.staged.h, &h), m.staged.d, &d), m.staged.c, &channel);
      int c, f_d, f_h, f_w;
      f_d = split(split(split((int)channel, m.size.c, &c), m.factor.w, &f_w), m.factor.h, &f_h);
      int at_d = (int)d * m.step.d + f_d - m.shift.d, at_h = (int)h * m.step.h + f_h - m.shift.h;
      bool present = n < m.size.n && f_d < m.factor.d && inside(at_d, m.size.d) && inside(at_h, m.size.h);
      from[mine] = n * m.stride.n + c * m.stride.c + at_d * m.stride.d + at_h * m.stride.h;
      to[mine] = n * m.staged_stride.n + channel * m.staged_stride.c + d * m.staged_stride.d + h * m.staged_stride.h;
      at_w[mine] = present ? f_w - m.shift.w : NOWHERE;
    }
    __syncthreads();
    EACH_ITEM(row, w, start, rows, m.staged.w) {
      int place = at_w[row] == NOWHERE ? NOWHERE : w * m.step.w + at_w[row];
      T value = 0;
      if (inside(place, m.size.w)) value = source[from[row] + place * m.stride.w];
      staged[to[row] + w * m.staged_stride.w] = value;
    }
    __syncthreads();
  }
}

// Rows (n, d, h) of a channels-last staged copy, along w and c': V channels a thread, which the copy's channels divide.
// WIDE: all of a thread's are read at once.
template <class T, int V, bool WIDE>
__device__ void gather_channels(T* staged, const T* source, const Map& m, int block_rows) {
  __shared__ int64 from[MOST_ROWS], to[MOST_ROWS];
  __shared__ int at_d[MOST_ROWS], at_h[MOST_ROWS];
  int64 rows = (int64)m.staged.n * m.staged.d * m.staged.h;
  int vectors = m.staged.c / V;
  int items = m.staged.w * vectors;
  bool folded = m.factor.d * m.factor.h * m.factor.w != 1;
  // neighbouring threads read neighbours of a channels-first operand
  bool along_w = !WIDE && m.stride.c > m.stride.w;
  BLOCK_ROWS(start, rows) {
    int mine = thread_of_block();
    if (mine < block_rows && start + mine < rows) {
      int64 n, d, h;
      n = divide(divide(start + mine, m.staged.h, &h), m.staged.d, &d);
      int first_d = (int)d * m.step.d - m.shift.d, first_h = (int)h * m.step.h - m.shift.h;
      from[mine] = n * m.stride.n + first_d * m.stride.d + first_h * m.stride.h;
      to[mine] = n * m.staged_stride.n + d * m.staged_stride.d + h * m.staged_stride.h;
      at_d[mine] = n < m.size.n ? first_d : NOWHERE;
      at_h[mine] = first_h;
    }
    __syncthreads();
    EACH_ITEM(row, item, start, rows, items) {
      int w, v;
      if (along_w) {
        v = split(item, m.staged.w, &w);
      } else {
        w = split(item, vectors, &v);
      }
      int c = v * V, f_d = 0, f_h = 0, f_w = 0;
      if (folded) f_d = split(split(split(c, m.size.c, &c), m.factor.w, &f_w), m.factor.h, &f_h);
      int at_w = w * m.step.w - m.shift.w;
      Vector<T, V> vector;
      if (WIDE) {
        if (c < m.size.c && f_d < m.factor.d && inside(at_d[row] + f_d, m.size.d) &&
            inside(at_h[row] + f_h, m.size.h) && inside(at_w + f_w, m.size.w)) {
          vector = *(const Vector<T, V>*)(source + from[row] + f_d * m.stride.d + f_h * m.stride.h +
                                          (at_w + f_w) * m.stride.w + c);
        } else {
#pragma unroll
          for (int e = 0; e < V; ++e) vector.item[e] = 0;
        }
      } else {
#pragma unroll
        for (int e = 0; e < V; ++e) {
          vector.item[e] = 0;
          if (c < m.size.c && f_d < m.factor.d && inside(at_d[row] + f_d, m.size.d) &&
              inside(at_h[row] + f_h, m.size.h) && inside(at_w + f_w, m.size.w)) {
            vector.item[e] = source[from[row] + f_d * m.stride.d + f_h * m.stride.h + (at_w + f_w) * m.stride.w +
                                    c * m.stride.c];
          }
          if (++c == m.size.c && folded) {
            c = 0;
            if (++f_w == m.factor.w) {
              f_w = 0;
              if (++f_h == m.factor.h) {
                f_h = 0;
                ++f_d;
              }
            }
          }
        }
      }
      *(Vector<T, V>*)(staged + to[row] + w * m.staged_stride.w + v * V) = vector;
    }
    __syncthreads();
  }
}

// The lines that a tile reads, zero outside the operand. A line begins `lead` elements before what its first column reads,
// at a multiple of 16 bytes if `wide`. Returns the lead.
template <class T>
__device__ int read_lines(T* lines, const T* source, const Map& m, int64 first_row, int rows, int first_column, int columns,
                          int pitch, int wide) {
  const int UNIT = 16 / sizeof(T);
  typedef Vector<T, UNIT> Unit;
  int count = m.factor.d * m.factor.h * m.size.c;
  int unit = wide ? UNIT : 1;
  int first = first_column * m.step.w - m.shift.w;
  int lead = first & (unit - 1);
  int length = lead + (columns - 1) * m.step.w + m.factor.w;
  for (int number = threadIdx.y; number < rows * count; number += LINE_WARPS) {
    int which, c, f_h;
    int row = split(number, count, &which);
    int f_d = split(split(which, m.size.c, &c), m.factor.h, &f_h);
    int64 n, d, h;
    n = divide(divide(first_row + row, m.staged.h, &h), m.staged.d, &d);
    int at_d = (int)d * m.step.d + f_d - m.shift.d, at_h = (int)h * m.step.h + f_h - m.shift.h;
    int size = n < m.size.n && inside(at_d, m.size.d) && inside(at_h, m.size.h) ? m.size.w : 0;
    const T* from = source + n * m.stride.n + c * m.stride.c + at_d * m.stride.d + at_h * m.stride.h;
    T* to = lines + number * pitch;
    for (int i = threadIdx.x * unit; i < length; i += 32 * unit) {
      int place = first - lead + i;
      if (unit == 1) {
        to[i] = inside(place, size) ? from[place] : T(0);
      } else if (place >= 0 && place + UNIT <= size) {
        *(Unit*)(to + i) = *(const Unit*)(from + place);
      } else {
#pragma unroll
        for (int e = 0; e < UNIT; ++e) to[i + e] = inside(place + e, size) ? from[place + e] : T(0);
      }
    }
  }
  return lead;
}

// Where a staged channel begins within the lines of a row; -1 where it holds nothing.
__device__ inline void place_channels(int* places, const Map& m, int pitch) {
  for (int channel = thread_of_block(); channel < m.staged.c; channel += 32 * LINE_WARPS) {
    int c, f_h, f_w;
    int f_d = split(split(split(channel, m.size.c, &c), m.factor.w, &f_w), m.factor.h, &f_h);
    places[channel] = f_d < m.factor.d ? ((f_d * m.factor.h + f_h) * m.size.c + c) * pitch + f_w : -1;
  }
}

#define LINES_MEMORY(T)                                   \
  __shared__ Vector<uint32, 4> memory[LINES_BYTES / 16];  \
  __shared__ int places[LINE_CHANNELS];                   \
  T* lines = (T*)memory;                                  \
  place_channels(places, m, pitch);                       \
  __syncthreads();

// The loop of a block over its tiles. `rows` and `columns` are those of the tile.
#define EACH_TILE                                                                                        \
  int64 all_rows = (int64)m.staged.n * m.staged.d * m.staged.h;                                          \
  int64 across = (m.staged.w + tile_columns - 1) / tile_columns;                                         \
  int64 tiles = (all_rows + tile_rows - 1) / tile_rows * across;                                         \
  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x)
#define TILE_VALUES                                                                                      \
  int64 tile_column;                                                                                     \
  int64 first_row = divide(tile, across, &tile_column) * tile_rows;                                      \
  int first_column = (int)tile_column * tile_columns;                                                    \
  int rows = all_rows - first_row < tile_rows ? (int)(all_rows - first_row) : tile_rows;                 \
  int columns = m.staged.w - first_column < tile_columns ? m.staged.w - first_column : tile_columns;

// Into a channels-last copy: V channels a thread, always the same ones, which the copy's channels divide into at most as
// many vectors as there are threads. A tile is written from end to end.
template <class T, int V>
__device__ void gather_lines(T* staged, const T* source, const Map& m, int tile_rows, int tile_columns, int pitch,
                             int wide) {
  const int WORDS = V * sizeof(T) / 4;
  LINES_MEMORY(T)
  int vectors = m.staged.c / V;
  int beside = 32 * LINE_WARPS / vectors;
  int v;
  int begin = split(thread_of_block(), vectors, &v);
  // in bytes
  int place[V];
  Vector<T, V> kept;
#pragma unroll
  for (int e = 0; e < V; ++e) {
    place[e] = places[v * V + e];
    kept.item[e] = place[e] < 0 ? T(0) : T(~T(0));
    place[e] = place[e] < 0 ? 0 : place[e] * (int)sizeof(T);
  }
  const Vector<uint32, WORDS> mask = *(const Vector<uint32, WORDS>*)&kept;
  int of_row = m.factor.d * m.factor.h * m.size.c * pitch;
  EACH_TILE {
    TILE_VALUES
    int lead = read_lines(lines, source, m, first_row, rows, first_column, columns, pitch, wide);
    __syncthreads();
    if (begin < beside) {
      int column, more_columns;
      int row = split(begin, columns, &column), more_rows = split(beside, columns, &more_columns);
      T* out = staged + (first_row * m.staged.w + first_column) * m.staged.c + begin * m.staged.c + v * V;
      for (int position = begin; position < rows * columns; position += beside) {
        const char* from = (const char*)(lines + row * of_row + column * m.step.w + lead);
        Vector<T, V> vector;
#pragma unroll
        for (int e = 0; e < V; ++e) vector.item[e] = *(const T*)(from + place[e]);
        Vector<uint32, WORDS> words = *(const Vector<uint32, WORDS>*)&vector;
#pragma unroll
        for (int e = 0; e < WORDS; ++e) words.item[e] &= mask.item[e];
        *(Vector<uint32, WORDS>*)out = words;
        out += beside * m.staged.c;
        row += more_rows;
        column += more_columns;
        if (column >= columns) {
          column -= columns;
          ++row;
        }
      }
    }
    __syncthreads();
  }
}

// Into a channels-first copy: a warp writes a row of one channel after the other.
template <class T>
__device__ void gather_planes(T* staged, const T* source, const Map& m, int tile_rows, int tile_columns, int pitch,
                              int wide) {
  __shared__ int64 to[MOST_ROWS];
  LINES_MEMORY(T)
  int of_row = m.factor.d * m.factor.h * m.size.c * pitch;
  EACH_TILE {
    TILE_VALUES
    int mine = thread_of_block();
    if (mine < rows) {
      int64 n, d, h;
      n = divide(divide(first_row + mine, m.staged.h, &h), m.staged.d, &d);
      to[mine] = n * m.staged_stride.n + d * m.staged_stride.d + h * m.staged_stride.h + first_column;
    }
    int lead = read_lines(lines, source, m, first_row, rows, first_column, columns, pitch, wide);
    __syncthreads();
    // neighbouring rows of a channel are neighbours in memory
    for (int number = threadIdx.y; number < rows * m.staged.c; number += LINE_WARPS) {
      int row;
      int channel = split(number, rows, &row);
      T* out = staged + to[row] + channel * m.staged_stride.c;
      int place = places[channel];
      const T* from = lines + row * of_row + place + lead;
      for (int column = threadIdx.x; column < columns; column += 32) {
        out[column] = place < 0 ? T(0) : from[column * m.step.w];
      }
    }
    __syncthreads();
  }
}

#define LINES(name, function, T)                                                                                   \
  extern "C" __global__ void __launch_bounds__(32 * LINE_WARPS)                                                    \
      name(T* staged, const T* source, MAP_PARAMETERS, int tile_rows, int tile_columns, int pitch, int wide) {     \
    Map map = MAP_VALUES;                                                                                          \
    function(staged, source, map, tile_rows, tile_columns, pitch, wide);                                           \
  }
#define GATHERS(name, T, V)                                                                                          \
  extern "C" __global__ void gather_rows_##name(T* staged, const T* source, MAP_PARAMETERS, int block_rows) {        \
    Map map = MAP_VALUES;                                                                                            \
    gather_rows<T>(staged, source, map, block_rows);                                                                 \
  }                                                                                                                  \
  extern "C" __global__ void gather_channels_##name(T* staged, const T* source, MAP_PARAMETERS, int block_rows) {    \
    Map map = MAP_VALUES;                                                                                            \
    gather_channels<T, V, false>(staged, source, map, block_rows);                                                 \
  }                                                                                                                  \
  extern "C" __global__ void gather_wide_##name(T* staged, const T* source, MAP_PARAMETERS, int block_rows) {        \
    Map map = MAP_VALUES;                                                                                            \
    gather_channels<T, V, true>(staged, source, map, block_rows);                                                    \
  }                                                                                                                  \
  LINES(gather_lines_##name, (gather_lines<T, V>), T)                                                                \
  LINES(gather_planes_##name, gather_planes<T>, T)
// Copies move bits; what is added has a type.
GATHERS(bytes2, uint16, 8)
GATHERS(bytes4, uint32, 4)
GATHERS(bytes8, uint64, 2)
LINES(gather_quads_bytes2, (gather_lines<uint16, 4>), uint16)

// --- scatter ----------------------------------------------------------------------------------------------------------

// Rows (n, c, d, h) of the operand, along w.
template <class T>
__device__ void scatter_rows(T* target, const T* staged, const Map& m, int block_rows, int add) {
  __shared__ int64 from[MOST_ROWS], to[MOST_ROWS];
  int64 rows = (int64)m.size.n * m.size.c * m.size.d * m.size.h;
  T zero = narrow<T>(Accumulator<T>(0));
  BLOCK_ROWS(start, rows) {
    int mine = thread_of_block();
    if (mine < block_rows && start + mine < rows) {
      int64 n, c, d, h;
      n = divide(divide(divide(start + mine, m.size.h, &h), m.size.d, &d), m.size.c, &c);
      int f_d, f_h;
      int place_d = split((int)d + m.shift.d, m.step.d, &f_d), place_h = split((int)h + m.shift.h, m.step.h, &f_h);
      bool present = f_d < m.factor.d && f_h < m.factor.h && place_d < m.staged.d && place_h < m.staged.h;
      int64 channel = (int64)(f_d * m.factor.h + f_h) * m.factor.w * m.size.c + c;
      from[mine] = present ? n * m.staged_stride.n + channel * m.staged_stride.c + place_d * m.staged_stride.d +
                                 place_h * m.staged_stride.h
                           : -1;
      to[mine] = n * m.stride.n + c * m.stride.c + d * m.stride.d + h * m.stride.h;
    }
    __syncthreads();
    EACH_ITEM(row, w, start, rows, m.size.w) {
      int f_w;
      int place = split(w + m.shift.w, m.step.w, &f_w);
      T* out = target + to[row] + w * m.stride.w;
      if (from[row] >= 0 && f_w < m.factor.w && place < m.staged.w) {
        T value = staged[from[row] + place * m.staged_stride.w + (int64)f_w * m.size.c * m.staged_stride.c];
        *out = add ? narrow<T>(widen(*out) + widen(value)) : value;
      } else if (!add) {
        *out = zero;
      }
    }
    __syncthreads();
  }
}

// Rows (n, d, h) of a channels-last operand, along w and c: V channels a thread, which the operand's channels divide.
template <class T, int V>
__device__ void scatter_channels(T* target, const T* staged, const Map& m, int block_rows, int add) {
  __shared__ int64 from[MOST_ROWS], to[MOST_ROWS];
  int64 rows = (int64)m.size.n * m.size.d * m.size.h;
  int vectors = m.size.c / V;
  int items = m.size.w * vectors;
  T zero = narrow<T>(Accumulator<T>(0));
  BLOCK_ROWS(start, rows) {
    int mine = thread_of_block();
    if (mine < block_rows && start + mine < rows) {
      int64 n, d, h;
      n = divide(divide(start + mine, m.size.h, &h), m.size.d, &d);
      int f_d, f_h;
      int place_d = split((int)d + m.shift.d, m.step.d, &f_d), place_h = split((int)h + m.shift.h, m.step.h, &f_h);
      bool present = f_d < m.factor.d && f_h < m.factor.h && place_d < m.staged.d && place_h < m.staged.h;
      from[mine] = present ? n * m.staged_stride.n + (int64)(f_d * m.factor.h + f_h) * m.factor.w * m.size.c +
                                 place_d * m.staged_stride.d + place_h * m.staged_stride.h
                           : -1;
      to[mine] = n * m.stride.n + d * m.stride.d + h * m.stride.h;
    }
    __syncthreads();
    EACH_ITEM(row, item, start, rows, items) {
      int v, f_w;
      int w = split(item, vectors, &v);
      int place = split(w + m.shift.w, m.step.w, &f_w);
      Vector<T, V>* out = (Vector<T, V>*)(target + to[row] + w * m.stride.w + v * V);
      bool present = from[row] >= 0 && f_w < m.factor.w && place < m.staged.w;
      if (add && !present) continue;
      Vector<T, V> vector;
      if (present) {
        vector = *(const Vector<T, V>*)(staged + from[row] + place * m.staged_stride.w + (int64)f_w * m.size.c + v * V);
      } else {
#pragma unroll
        for (int e = 0; e < V; ++e) vector.item[e] = zero;
      }
      if (add) {
        Vector<T, V> before = *out;
#pragma unroll
        for (int e = 0; e < V; ++e) vector.item[e] = narrow<T>(widen(before.item[e]) + widen(vector.item[e]));
      }
      *out = vector;
    }
    __syncthreads();
  }
}

#define SCATTERS(name, T)                                                                                             \
  extern "C" __global__ void scatter_rows_##name(T* target, const T* staged, MAP_PARAMETERS, int block_rows, int add) { \
    Map map = MAP_VALUES;                                                                                             \
    scatter_rows<T>(target, staged, map, block_rows, add);                                                            \
  }                                                                                                                   \
  extern "C" __global__ void scatter_channels_##name(T* target, const T* staged, MAP_PARAMETERS, int block_rows,      \
                                                     int add) {                                                       \
    Map map = MAP_VALUES;                                                                                             \
    scatter_channels<T, 16 / sizeof(T)>(target, staged, map, block_rows, add);                                        \
  }
FOR_FLOAT_TYPES(SCATTERS)

// --- transposition ----------------------------------------------------------------------------------------------------
//
// out[b][j][i] = in[b][i][j], or += with `add`, for `batch` matrices of rows x columns, and zero for i from rows to
// padded_rows; pitches and distances of matrices in elements. Block (32, 8), one tile of TILE x TILE at a time; with
// PAIR 2, for 16-bit types, two elements at a time: columns, padded_rows, pitches, distances are even then.

template <class T, int PAIR>
__device__ void transpose(T* out, const T* in, int64 batch, int64 rows, int64 columns, int64 padded_rows,
                          int64 in_pitch, int64 in_distance, int64 out_pitch, int64 out_distance, int add) {
  const int TILE = 32 * PAIR;
  const int LINES = 8;
  typedef Vector<T, PAIR> Pair;
  // an odd number of words a line: a column lies in different banks
  __shared__ T tile[TILE][TILE + PAIR];
  T zero = narrow<T>(Accumulator<T>(0));
  int64 across = (columns + TILE - 1) / TILE, down = (padded_rows + TILE - 1) / TILE;
  for (int64 index = blockIdx.x; index < batch * across * down; index += gridDim.x) {
    int64 tile_row, tile_column;
    int64 b = divide(divide(index, across, &tile_column), down, &tile_row);
    int64 first_row = tile_row * TILE, first_column = tile_column * TILE;
    int lane = threadIdx.x * PAIR;
    const T* from = in + b * in_distance;
#pragma unroll
    for (int line = threadIdx.y; line < TILE; line += LINES) {
      Pair pair;
#pragma unroll
      for (int e = 0; e < PAIR; ++e) pair.item[e] = zero;
      int64 row = first_row + line, column = first_column + lane;
      if (row < rows && column < columns) pair = *(const Pair*)(from + row * in_pitch + column);
      *(Pair*)&tile[line][lane] = pair;
    }
    __syncthreads();
    T* to = out + b * out_distance;
#pragma unroll
    for (int line = threadIdx.y; line < TILE; line += LINES) {
      int64 row = first_column + line, column = first_row + lane;
      if (row < columns && column < padded_rows) {
        Pair* place = (Pair*)(to + row * out_pitch + column);
        Pair pair;
#pragma unroll
        for (int e = 0; e < PAIR; ++e) pair.item[e] = tile[lane + e][line];
        if (add) {
          Pair before = *place;
#pragma unroll
          for (int e = 0; e < PAIR; ++e) pair.item[e] = narrow<T>(widen(before.item[e]) + widen(pair.item[e]));
        }
        *place = pair;
      }
    }
    __syncthreads();
  }
}

#define TRANSPOSES(name, T, PAIR)                                                                                  \
  extern "C" __global__ void transpose_##name(T* out, const T* in, int64 batch, int64 rows, int64 columns,         \
                                              int64 padded_rows, int64 in_pitch, int64 in_distance,                \
                                              int64 out_pitch, int64 out_distance, int add) {                      \
    transpose<T, PAIR>(out, in, batch, rows, columns, padded_rows, in_pitch, in_distance, out_pitch, out_distance, \
                       add);                                                                                       \
  }
TRANSPOSES(f32, float, 1)
TRANSPOSES(f64, double, 1)
TRANSPOSES(f16, __half, 1)
TRANSPOSES(bf16, __nv_bfloat16, 1)
TRANSPOSES(pairs_f16, __half, 2)
TRANSPOSES(pairs_bf16, __nv_bfloat16, 2)
