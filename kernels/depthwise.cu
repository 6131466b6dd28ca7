// Convolutions in which each channel has filters of its own (groups = channels), packed NCHW, filters packed.
//
// With m filters a channel, filter k belongs to channel k / m:
//   y[n, k, p, q] = sum over r, s of x[n, k / m, p * stride - top + r * dilation, q * stride - left + s * dilation]
//                                    * w[k, r, s]
// where x is zero outside of its plane; dx and dw are the gradients. All operands are T but the output, which is O; sums
// are float, in an order that the sizes and the launch alone decide. Outputs are written (=), or with `add` added to
// (+=, rounded once). Sizes of a plane, with padding, fit into 31 bits; offsets of planes have 64.
//
// general_forward_, general_data_ and general_filter_ take everything; grid any (general_filter_: see there), block 256.
//
// The other kernels are for one filter a channel, FILTER x FILTER with FILTER 3, 5 or 7, no dilation, and the same
// STRIDE, 1 or 2, both ways. They are instances of templates; a compilation with -DDEPTHWISE_FILTER=... makes one set.
// A block takes a tile, for `images` images one after the other: `planes` channels (several only of whole planes), all
// columns, and `groups` groups of ROWS rows; a thread takes one column of one group, so that a warp reads and writes
// neighbours. The input's tile lies in shared memory, with a border of zeros: rows of `pitch` floats, planes of
// `plane_pitch`, the input's column 0 at `lead`. Zeros of the border are multiplied too: an infinite factor gives NaN.
// Grid (tiles of rows * groups of channels * chunks of images), block x at least planes * groups * columns, at most
// MOST_THREADS. Shared: planes * plane_pitch floats, and behind them what a kernel says. A tile has at most 2^16 floats.
// `vector`: the input's address and width are multiples of 16 bytes, pitch, plane_pitch and lead of 4 floats.
// - correlate_: y, or with FLIP dx of STRIDE 1, whose input is dy; top and left are what the input is padded by, and may
//   be negative; lead >= left. A column is one of the output. With `staged` the output goes by way of planes * groups *
//   ROWS * out_width floats of shared memory, which is better where rows are no whole sectors.
// - spread_: dx of STRIDE 2. With u = h + top and v = w + left, a thread takes the pairs of both in a column of v / 2,
//   and ROWS pairs of rows; pairs are counted from top / 2 and left / 2, and `columns` is how many there are;
//   lead >= FILTER / 2 - left / 2. Shared memory behind: planes * groups * 2 * ROWS * out_width floats.
// - filter_: of dw the sums of each tile: partial[chunk, tile of rows, channel, tap], floats. Shared memory is used again
//   at the end: taps * (row_length + planes * parts) floats, `taps` at once, `row_length` at least the threads of a
//   block, `parts` threads a sum.
// - sum_partials_ then adds them up, in order, over the first dimension of partial (splits, count); grid-stride.

#include "common.cuh"

const int MOST_THREADS = 384;
const int GENERAL_THREADS = 256;
const int GENERAL_TAPS = 4;

extern __shared__ float4 shared_vectors[];

template <class O>
__device__ inline void put(O* place, float value, int add) {
  if (add) value += widen(*place);
  *place = narrow<O>(value);
}

// --- any geometry -----------------------------------------------------------------------------------------------------

struct Geometry {
  int channels, filters_each, height, width, filter_height, filter_width, out_height, out_width;
  int stride_h, stride_w, top, left, dilation_h, dilation_w;
};

#define GEOMETRY_PARAMETERS                                                                                        \
  int channels, int filters_each, int height, int width, int filter_height, int filter_width, int out_height,       \
      int out_width, int stride_h, int stride_w, int top, int left, int dilation_h, int dilation_w
#define GEOMETRY_VALUES                                                                                            \
  {channels,  filters_each, height,   width, filter_height, filter_width, out_height,                                \
   out_width, stride_h,     stride_w, top,   left,          dilation_h,   dilation_w}

// The part [first, end) of the filter that meets a line of `size` where its tap 0 is at `start`.
__device__ inline void taps_inside(int start, int dilation, int taps, int size, int* first, int* end) {
  *first = start >= 0 ? 0 : (-start + dilation - 1) / dilation;
  int count = start >= size ? 0 : (size - 1 - start) / dilation + 1;
  *end = count < taps ? count : taps;
}

template <class T, class O>
__device__ void general_forward(O* y, const T* x, const T* w, int64 count, int add, const Geometry& g) {
  int plane = g.height * g.width, taps = g.filter_height * g.filter_width;
  GRID_STRIDE(i, count) {
    int64 column, row, filter, channel, ignored;
    int64 line = divide(i, g.out_width, &column);
    int64 out_plane = divide(line, g.out_height, &row);
    int64 image = divide(out_plane, (int64)g.channels * g.filters_each, &filter);
    channel = divide(filter, g.filters_each, &ignored);
    const T* from = x + (image * g.channels + channel) * plane;
    const T* factors = w + filter * taps;
    int h = (int)row * g.stride_h - g.top, v = (int)column * g.stride_w - g.left;
    int r0, r1, s0, s1;
    taps_inside(h, g.dilation_h, g.filter_height, g.height, &r0, &r1);
    taps_inside(v, g.dilation_w, g.filter_width, g.width, &s0, &s1);
    float sum = 0.0f;
    for (int r = r0; r < r1; ++r) {
      const T* values = from + (h + r * g.dilation_h) * g.width + v;
      for (int s = s0; s < s1; ++s) sum += widen(values[s * g.dilation_w]) * widen(factors[r * g.filter_width + s]);
    }
    put(y + i, sum, add);
  }
}

// The first of the taps by which an output line at `place`, padding included, reaches a position; `every` or more: none.
__device__ inline int first_tap(int place, int dilation, int stride, int every) {
  int tap = 0;
  while (tap < every && (place - tap * dilation) % stride != 0) ++tap;
  return tap;
}

// Of the taps, only each `every_h`-th and `every_w`-th can reach a position: stride / gcd(stride, dilation).
template <class T, class O>
__device__ void general_data(O* dx, const T* dy, const T* w, int64 count, int add, const Geometry& g, int every_h,
                             int every_w) {
  int plane = g.out_height * g.out_width, taps = g.filter_height * g.filter_width;
  GRID_STRIDE(i, count) {
    int64 column, row, channel;
    int64 line = divide(i, g.width, &column);
    int64 in_plane = divide(line, g.height, &row);
    int64 image = divide(in_plane, g.channels, &channel);
    int h = (int)row + g.top, v = (int)column + g.left;
    int r0 = first_tap(h, g.dilation_h, g.stride_h, every_h), s0 = first_tap(v, g.dilation_w, g.stride_w, every_w);
    if (r0 == every_h) r0 = g.filter_height;
    if (s0 == every_w) s0 = g.filter_width;
    float sum = 0.0f;
    for (int each = 0; each < g.filters_each; ++each) {
      int64 filter = channel * g.filters_each + each;
      const T* from = dy + (image * g.channels * g.filters_each + filter) * plane;
      const T* factors = w + filter * taps;
      for (int r = r0; r < g.filter_height; r += every_h) {
        int up = h - r * g.dilation_h;
        if (up < 0) break;
        up /= g.stride_h;
        if (up >= g.out_height) continue;
        for (int s = s0; s < g.filter_width; s += every_w) {
          int across = v - s * g.dilation_w;
          if (across < 0) break;
          across /= g.stride_w;
          if (across >= g.out_width) continue;
          sum += widen(from[up * g.out_width + across]) * widen(factors[r * g.filter_width + s]);
        }
      }
    }
    put(dx + i, sum, add);
  }
}

// Grid (filters * groups of GENERAL_TAPS taps of a row of the filter, splits): a block takes one group, and of the batch
// `images` from split * images on. partial is (splits, filters, taps). Shared: GENERAL_TAPS * GENERAL_THREADS floats.
template <class T>
__device__ void general_filter(float* partial, const T* x, const T* dy, int batch, int images, const Geometry& g) {
  float(*sums)[GENERAL_THREADS] = (float(*)[GENERAL_THREADS])shared_vectors;
  int filters = g.channels * g.filters_each, positions = g.out_height * g.out_width;
  int across = (g.filter_width + GENERAL_TAPS - 1) / GENERAL_TAPS;
  int index = blockIdx.x;
  int s = index % across * GENERAL_TAPS;
  index /= across;
  int r = index % g.filter_height;
  int filter = index / g.filter_height;
  int channel = filter / g.filters_each;
  int begin = blockIdx.y * images;
  int end = batch - begin < images ? batch : begin + images;
  float sum[GENERAL_TAPS];
#pragma unroll
  for (int t = 0; t < GENERAL_TAPS; ++t) sum[t] = 0.0f;
  for (int image = begin; image < end; ++image) {
    const T* from = x + ((int64)image * g.channels + channel) * g.height * g.width;
    const T* factors = dy + ((int64)image * filters + filter) * positions;
    for (int place = threadIdx.x; place < positions; place += GENERAL_THREADS) {
      int row = place / g.out_width, column = place - row * g.out_width;
      int h = row * g.stride_h - g.top + r * g.dilation_h;
      int v = column * g.stride_w - g.left + s * g.dilation_w;
      if (h < 0 || h >= g.height) continue;
      float factor = widen(factors[place]);
#pragma unroll
      for (int t = 0; t < GENERAL_TAPS; ++t) {
        int place_w = v + t * g.dilation_w;
        if (s + t < g.filter_width && place_w >= 0 && place_w < g.width)
          sum[t] += factor * widen(from[h * g.width + place_w]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < GENERAL_TAPS; ++t) sums[t][threadIdx.x] = sum[t];
  __syncthreads();
  for (int width = GENERAL_THREADS / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) {
#pragma unroll
      for (int t = 0; t < GENERAL_TAPS; ++t) sums[t][threadIdx.x] += sums[t][threadIdx.x + width];
    }
    __syncthreads();
  }
  int tap = threadIdx.x;
  if (tap < GENERAL_TAPS && s + tap < g.filter_width) {
    int64 place = ((int64)blockIdx.y * filters + filter) * g.filter_height + r;
    partial[place * g.filter_width + s + tap] = sums[tap][0];
  }
}

template <class O>
__device__ void sum_partials(O* dw, const float* partial, int64 splits, int64 count, int add) {
  GRID_STRIDE(i, count) {
    float sum = 0.0f;
#pragma unroll 8
    for (int64 split = 0; split < splits; ++split) sum += partial[split * count + i];
    put(dw + i, sum, add);
  }
}

// --- square filters, one a channel ------------------------------------------------------------------------------------

struct Tile {
  int channels, batch, height, width, out_height, out_width, top, left;
  int planes, groups, row_tiles, images, columns, lead, pitch, plane_pitch, vector;
};

#define TILE_PARAMETERS                                                                                             \
  int channels, int batch, int height, int width, int out_height, int out_width, int top, int left, int planes,      \
      int groups, int row_tiles, int images, int columns, int lead, int pitch, int plane_pitch, int vector
#define TILE_VALUES                                                                                                 \
  {channels, batch,     height, width,   out_height, out_width, top,         left,  planes,                          \
   groups,   row_tiles, images, columns, lead,       pitch,     plane_pitch, vector}

// e / divisor for e * divisor < 2^32: what a tile holds.
struct Divider {
  uint32 magic;
  __device__ explicit Divider(int divisor) : magic(divisor == 1 ? 0u : 0xffffffffu / (uint32)divisor + 1u) {}
  __device__ int of(int e) const { return magic ? (int)__umulhi((uint32)e, magic) : e; }
};

// What a block and a thread of it work on.
struct Work {
  int tile, chunk, channel, count;  // the first channel, and how many there are
  int begin, end;                   // images
  int plane, group, column;
  bool live;

  __device__ explicit Work(const Tile& g) {
    int index = blockIdx.x;
    tile = index % g.row_tiles;
    index /= g.row_tiles;
    int channel_groups = (g.channels + g.planes - 1) / g.planes;
    channel = index % channel_groups * g.planes;
    chunk = index / channel_groups;
    count = g.channels - channel < g.planes ? g.channels - channel : g.planes;
    begin = chunk * g.images;
    end = g.batch - begin < g.images ? g.batch : begin + g.images;
    int item = threadIdx.x;
    plane = item / (g.groups * g.columns);
    item -= plane * g.groups * g.columns;
    group = item / g.columns;
    column = item - group * g.columns;
    live = plane < count;
  }
};

// Where a column of the tile lies in its row: with STRIDE 2 all even ones, then all odd ones, so that neighbours of
// the output read neighbours.
template <int STRIDE>
__device__ inline int column_place(int column, int pitch) {
  return STRIDE == 1 ? column : (column & 1) * (pitch / 2) + column / 2;
}

// Reads what a filter's row covers of a line of shared memory, from where its even and its odd columns begin.
template <int FILTER, int STRIDE>
__device__ inline void read_window(float (&value)[FILTER], const float* even, const float* odd) {
#pragma unroll
  for (int s = 0; s < FILTER; ++s) value[s] = STRIDE == 1 ? even[s] : s % 2 ? odd[s / 2] : even[s / 2];
}

__device__ inline void clear_tile(const Tile& g) {
  float* shared = (float*)shared_vectors;
  for (int i = threadIdx.x; i < g.planes * g.plane_pitch; i += blockDim.x) shared[i] = 0.0f;
}

// Puts rows `row` + [0, rows) of `count` planes at `from`, those that are there, into shared memory.
// A thread has LOADS elements under way, or half as many vectors.
template <int STRIDE, int LOADS, class T>
__device__ void load_tile(const T* from, const Tile& g, int count, int row, int rows) {
  const int VECTOR = 16 / sizeof(T);
  const int LOADS_OF_VECTORS = LOADS / 2;
  float* shared = (float*)shared_vectors;
  int first = row > 0 ? row : 0;
  int last = row + rows < g.height ? row + rows : g.height;
  if (last <= first) return;
  int here = last - first;
  int whole = g.height * g.width;
  float* to = shared + (first - row) * g.pitch;
  from += first * g.width;
  if (g.vector) {
    int across = g.width / VECTOR;
    Divider by_plane(here * across), by_row(across);
    int total = count * here * across;
    for (int begin = threadIdx.x; begin < total; begin += LOADS_OF_VECTORS * blockDim.x) {
      uint4 words[LOADS_OF_VECTORS];
#pragma unroll
      for (int load = 0; load < LOADS_OF_VECTORS; ++load) {
        int e = begin + load * blockDim.x;
        int plane = by_plane.of(e);
        if (e < total) words[load] = *(const uint4*)(from + plane * whole + (e - plane * here * across) * VECTOR);
      }
#pragma unroll
      for (int load = 0; load < LOADS_OF_VECTORS; ++load) {
        int e = begin + load * blockDim.x;
        if (e >= total) break;
        int plane = by_plane.of(e);
        int rest = e - plane * here * across;
        int line = by_row.of(rest);
        int column = g.lead + (rest - line * across) * VECTOR;
        const T* values = (const T*)&words[load];
        float* place = to + plane * g.plane_pitch + line * g.pitch;
#pragma unroll
        for (int part = 0; part < VECTOR; part += 4) {
          if (STRIDE == 1) {
            float4 four;
            four.x = widen(values[part]);
            four.y = widen(values[part + 1]);
            four.z = widen(values[part + 2]);
            four.w = widen(values[part + 3]);
            *(float4*)(place + column + part) = four;
          } else {
            float2 even, odd;
            even.x = widen(values[part]);
            even.y = widen(values[part + 2]);
            odd.x = widen(values[part + 1]);
            odd.y = widen(values[part + 3]);
            *(float2*)(place + (column + part) / 2) = even;
            *(float2*)(place + (column + part) / 2 + g.pitch / 2) = odd;
          }
        }
      }
    }
  } else {
    Divider by_plane(here * g.width), by_row(g.width);
    int total = count * here * g.width;
    for (int begin = threadIdx.x; begin < total; begin += LOADS * blockDim.x) {
      T values[LOADS];
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        int e = begin + load * blockDim.x;
        int plane = by_plane.of(e);
        if (e < total) values[load] = from[plane * whole + e - plane * here * g.width];
      }
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        int e = begin + load * blockDim.x;
        if (e >= total) break;
        int plane = by_plane.of(e);
        int rest = e - plane * here * g.width;
        int line = by_row.of(rest);
        int column = g.lead + rest - line * g.width;
        to[plane * g.plane_pitch + line * g.pitch + column_place<STRIDE>(column, g.pitch)] = widen(values[load]);
      }
    }
  }
}

// Writes `rows` rows of each of `count` planes, from `row` on, from a buffer of `buffer_rows` rows a plane.
template <class O>
__device__ void flush_tile(O* to, const float* buffer, int count, int row, int rows, int buffer_rows, int height,
                           int width, int add) {
  int each = rows * width;
  Divider by_plane(each);
  int total = count * each;
  to += row * width;
#pragma unroll 4
  for (int e = threadIdx.x; e < total; e += blockDim.x) {
    int plane = by_plane.of(e);
    int rest = e - plane * each;
    put(to + plane * height * width + rest, buffer[plane * buffer_rows * width + rest], add);
  }
}

template <int FILTER, int STRIDE, int ROWS, bool FLIP, class T, class O>
__device__ void correlate(O* out, const T* in, const T* w, int add, int staged, const Tile& g) {
  const int TAPS = FILTER * FILTER;
  float* shared = (float*)shared_vectors;
  float* buffer = shared + g.planes * g.plane_pitch;
  Work work(g);
  int tile_rows = g.groups * ROWS;
  int row = work.tile * tile_rows;
  int rows = g.out_height - row < tile_rows ? g.out_height - row : tile_rows;
  int whole = g.out_height * g.out_width;
  clear_tile(g);
  float factor[TAPS];
#pragma unroll
  for (int t = 0; t < TAPS; ++t)
    factor[t] = work.live ? widen(w[(int64)(work.channel + work.plane) * TAPS + (FLIP ? TAPS - 1 - t : t)]) : 0.0f;
  int start = work.column * STRIDE + g.lead - g.left;
  const float* even = shared + work.plane * g.plane_pitch + work.group * ROWS * STRIDE * g.pitch;
  const float* odd = even + column_place<STRIDE>(start + 1, g.pitch);
  even += column_place<STRIDE>(start, g.pitch);
  O* previous = out;
  __syncthreads();
  for (int image = work.begin; image < work.end; ++image) {
    int64 plane = (int64)image * g.channels + work.channel;
    load_tile<STRIDE, 8>(in + plane * g.height * g.width, g, work.count, row * STRIDE - g.top,
                      (rows - 1) * STRIDE + FILTER);
    if (staged && image > work.begin)
      flush_tile(previous, buffer, work.count, row, rows, tile_rows, g.out_height, g.out_width, add);
    __syncthreads();
    O* to = out + plane * whole;
    if (work.live) {
      float sum[ROWS];
#pragma unroll
      for (int t = 0; t < ROWS; ++t) sum[t] = 0.0f;
#pragma unroll
      for (int line = 0; line < (ROWS - 1) * STRIDE + FILTER; ++line) {
        float value[FILTER];
        read_window<FILTER, STRIDE>(value, even + line * g.pitch, odd + line * g.pitch);
#pragma unroll
        for (int t = 0; t < ROWS; ++t) {
          int r = line - t * STRIDE;
          if (r >= 0 && r < FILTER) {
#pragma unroll
            for (int s = 0; s < FILTER; ++s) sum[t] += factor[r * FILTER + s] * value[s];
          }
        }
      }
      int first = work.group * ROWS;
#pragma unroll
      for (int t = 0; t < ROWS; ++t) {
        if (first + t < rows) {
          if (staged)
            buffer[(work.plane * tile_rows + first + t) * g.out_width + work.column] = sum[t];
          else
            put(to + work.plane * whole + (row + first + t) * g.out_width + work.column, sum[t], add);
        }
      }
    }
    previous = to;
    __syncthreads();
  }
  if (staged) flush_tile(previous, buffer, work.count, row, rows, tile_rows, g.out_height, g.out_width, add);
}

// g.height and g.width are those of dy, g.out_height and g.out_width those of dx.
template <int FILTER, int ROWS, class T, class O>
__device__ void spread(O* dx, const T* dy, const T* w, int add, const Tile& g) {
  const int TAPS = FILTER * FILTER;
  const int HALF = FILTER / 2;
  float* shared = (float*)shared_vectors;
  float* buffer = shared + g.planes * g.plane_pitch;
  Work work(g);
  int tile_rows = g.groups * ROWS;
  int pair = g.top / 2 + work.tile * tile_rows, first_column = g.left / 2;
  int row = 2 * pair - g.top;
  int end = row + 2 * tile_rows < g.out_height ? row + 2 * tile_rows : g.out_height;
  if (row < 0) row = 0;
  clear_tile(g);
  float factor[TAPS];
#pragma unroll
  for (int t = 0; t < TAPS; ++t)
    factor[t] = work.live ? widen(w[(int64)(work.channel + work.plane) * TAPS + t]) : 0.0f;
  const float* from =
      shared + work.plane * g.plane_pitch + work.group * ROWS * g.pitch + g.lead + first_column + work.column;
  int column = 2 * (first_column + work.column) - g.left;
  O* previous = dx;
  __syncthreads();
  for (int image = work.begin; image < work.end; ++image) {
    int64 plane = (int64)image * g.channels + work.channel;
    load_tile<1, 8>(dy + plane * g.height * g.width, g, work.count, pair - HALF, tile_rows + HALF);
    if (image > work.begin)
      flush_tile(previous, buffer, work.count, row, end - row, 2 * tile_rows, g.out_height, g.out_width, add);
    __syncthreads();
    if (work.live) {
      float sum[2 * ROWS][2];
#pragma unroll
      for (int t = 0; t < 2 * ROWS; ++t) sum[t][0] = sum[t][1] = 0.0f;
#pragma unroll
      for (int line = 0; line < ROWS + HALF; ++line) {
        float value[HALF + 1];
#pragma unroll
        for (int s = 0; s <= HALF; ++s) value[s] = from[line * g.pitch - s];
#pragma unroll
        for (int t = 0; t < ROWS; ++t) {
          int up = t + HALF - line;
          if (up >= 0 && up <= HALF) {
#pragma unroll
            for (int tap = 0; tap < 2 * FILTER; ++tap) {
              int r = 2 * up + tap / FILTER, s = tap % FILTER;
              if (r < FILTER) sum[2 * t + tap / FILTER][s % 2] += factor[r * FILTER + s] * value[s / 2];
            }
          }
        }
      }
      int first = 2 * (pair + work.group * ROWS) - g.top;
#pragma unroll
      for (int t = 0; t < 2 * ROWS; ++t) {
        int place = first + t;
        if (place >= row && place < end) {
          float* line = buffer + (work.plane * 2 * tile_rows + place - row) * g.out_width;
          if (column >= 0 && column < g.out_width) line[column] = sum[t][0];
          if (column + 1 < g.out_width) line[column + 1] = sum[t][1];
        }
      }
    }
    previous = dx + plane * g.out_height * g.out_width;
    __syncthreads();
  }
  flush_tile(previous, buffer, work.count, row, end - row, 2 * tile_rows, g.out_height, g.out_width, add);
}

template <int FILTER, int STRIDE, int ROWS, class T>
__device__ void filter_sums(float* partial, const T* x, const T* dy, int taps, int row_length, int parts,
                            const Tile& g) {
  const int TAPS = FILTER * FILTER;
  float* shared = (float*)shared_vectors;
  Work work(g);
  int tile_rows = g.groups * ROWS;
  int row = work.tile * tile_rows;
  int rows = g.out_height - row < tile_rows ? g.out_height - row : tile_rows;
  int whole = g.out_height * g.out_width;
  clear_tile(g);
  int start = work.column * STRIDE + g.lead - g.left;
  const float* even = shared + work.plane * g.plane_pitch + work.group * ROWS * STRIDE * g.pitch;
  const float* odd = even + column_place<STRIDE>(start + 1, g.pitch);
  even += column_place<STRIDE>(start, g.pitch);
  float sum[TAPS];
#pragma unroll
  for (int t = 0; t < TAPS; ++t) sum[t] = 0.0f;
  int first = work.group * ROWS;
  __syncthreads();
  for (int image = work.begin; image < work.end; ++image) {
    int64 plane = (int64)image * g.channels + work.channel;
    const T* given = dy + (plane + work.plane) * whole + (row + first) * g.out_width + work.column;
    float factor[ROWS];
#pragma unroll
    for (int t = 0; t < ROWS; ++t) factor[t] = work.live && first + t < rows ? widen(given[t * g.out_width]) : 0.0f;
    load_tile<STRIDE, FILTER == 5 ? 4 : 8>(x + plane * g.height * g.width, g, work.count, row * STRIDE - g.top,
                      (rows - 1) * STRIDE + FILTER);
    __syncthreads();
    if (work.live) {
#pragma unroll
      for (int line = 0; line < (ROWS - 1) * STRIDE + FILTER; ++line) {
        float value[FILTER];
        read_window<FILTER, STRIDE>(value, even + line * g.pitch, odd + line * g.pitch);
#pragma unroll
        for (int t = 0; t < ROWS; ++t) {
          int r = line - t * STRIDE;
          if (r >= 0 && r < FILTER) {
#pragma unroll
            for (int s = 0; s < FILTER; ++s) sum[r * FILTER + s] += factor[t] * value[s];
          }
        }
      }
    }
    __syncthreads();
  }
  // the sums of a plane's threads: of each tap a row, `parts` threads add up a part each, one adds up the parts
  int each = g.groups * g.columns;
  float* totals = shared + taps * row_length;
  int64 out = ((int64)(work.chunk * g.row_tiles + work.tile) * g.channels + work.channel) * TAPS;
  for (int done = 0; done < TAPS; done += taps) {
    int now = TAPS - done < taps ? TAPS - done : taps;
#pragma unroll
    for (int t = 0; t < TAPS; ++t) {
      if (t >= done && t < done + now) shared[(t - done) * row_length + threadIdx.x] = sum[t];
    }
    __syncthreads();
    int sums = now * work.count;
    for (int i = threadIdx.x; i < sums * parts; i += blockDim.x) {
      int part = i % parts, index = i / parts;
      int plane = index / now, tap = index - plane * now;
      const float* from = shared + tap * row_length + plane * each;
      float total = 0.0f;
#pragma unroll 4
      for (int k = part; k < each; k += parts) total += from[k];
      totals[i] = total;
    }
    __syncthreads();
    for (int index = threadIdx.x; index < sums; index += blockDim.x) {
      int plane = index / now, tap = index - plane * now;
      float total = 0.0f;
      for (int part = 0; part < parts; ++part) total += totals[index * parts + part];
      partial[out + plane * TAPS + done + tap] = total;
    }
  }
}

// --- instances --------------------------------------------------------------------------------------------------------

#define GENERAL_KERNELS(suffix, T, O)                                                                              \
  extern "C" __global__ void __launch_bounds__(GENERAL_THREADS)                                                    \
      general_forward_##suffix(O* y, const T* x, const T* w, int64 count, int add, GEOMETRY_PARAMETERS) {          \
    Geometry geometry = GEOMETRY_VALUES;                                                                           \
    general_forward<T, O>(y, x, w, count, add, geometry);                                                          \
  }                                                                                                                \
  extern "C" __global__ void __launch_bounds__(GENERAL_THREADS)                                                    \
      general_data_##suffix(O* dx, const T* dy, const T* w, int64 count, int add, int every_h, int every_w,        \
                            GEOMETRY_PARAMETERS) {                                                                 \
    Geometry geometry = GEOMETRY_VALUES;                                                                           \
    general_data<T, O>(dx, dy, w, count, add, geometry, every_h, every_w);                                         \
  }
#define GENERAL_FILTER_KERNEL(suffix, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(GENERAL_THREADS)                                                    \
      general_filter_##suffix(float* partial, const T* x, const T* dy, int batch, int images, GEOMETRY_PARAMETERS) { \
    Geometry geometry = GEOMETRY_VALUES;                                                                           \
    general_filter<T>(partial, x, dy, batch, images, geometry);                                                    \
  }
#define SUM_PARTIALS_KERNEL(suffix, O)                                                                             \
  extern "C" __global__ void __launch_bounds__(GENERAL_THREADS)                                                    \
      sum_partials_##suffix(O* dw, const float* partial, int64 splits, int64 count, int add) {                     \
    sum_partials<O>(dw, partial, splits, count, add);                                                              \
  }

// Up to 80 registers a thread, so that three blocks of 256 share a multiprocessor, or 128 for 7x7 filters.
#define BOUNDS(FILTER) __launch_bounds__((FILTER) == 7 ? 512 : MOST_THREADS, (FILTER) == 7 ? 1 : 2)

#define CORRELATE_KERNEL(name, FILTER, STRIDE, ROWS, FLIP, T, O)                                                   \
  extern "C" __global__ void BOUNDS(FILTER)                                                       \
      name(O* out, const T* in, const T* w, int add, int staged, TILE_PARAMETERS) {                                \
    Tile tile = TILE_VALUES;                                                                                       \
    correlate<FILTER, STRIDE, ROWS, FLIP, T, O>(out, in, w, add, staged, tile);                                    \
  }
#define SPREAD_KERNEL(name, FILTER, ROWS, T, O)                                                                    \
  extern "C" __global__ void BOUNDS(FILTER)                                                       \
      name(O* dx, const T* dy, const T* w, int add, TILE_PARAMETERS) {                                             \
    Tile tile = TILE_VALUES;                                                                                       \
    spread<FILTER, ROWS, T, O>(dx, dy, w, add, tile);                                                              \
  }
#define FILTER_KERNEL(name, FILTER, STRIDE, ROWS, T)                                                               \
  extern "C" __global__ void BOUNDS(FILTER)                                                       \
      name(float* partial, const T* x, const T* dy, int taps, int row_length, int parts, TILE_PARAMETERS) {        \
    Tile tile = TILE_VALUES;                                                                                       \
    filter_sums<FILTER, STRIDE, ROWS, T>(partial, x, dy, taps, row_length, parts, tile);                           \
  }

#ifdef DEPTHWISE_FILTER
// One direction, filter, stride and pair of types: DEPTHWISE_KIND 0 forward, 1 dx, 2 dw; DEPTHWISE_IN, DEPTHWISE_OUT.
#if DEPTHWISE_KIND == 0
CORRELATE_KERNEL(depthwise_7, DEPTHWISE_FILTER, DEPTHWISE_STRIDE, 7, false, DEPTHWISE_IN, DEPTHWISE_OUT)
CORRELATE_KERNEL(depthwise_4, DEPTHWISE_FILTER, DEPTHWISE_STRIDE, 4, false, DEPTHWISE_IN, DEPTHWISE_OUT)
#elif DEPTHWISE_KIND == 1 && DEPTHWISE_STRIDE == 1
CORRELATE_KERNEL(depthwise_7, DEPTHWISE_FILTER, 1, 7, true, DEPTHWISE_IN, DEPTHWISE_OUT)
CORRELATE_KERNEL(depthwise_4, DEPTHWISE_FILTER, 1, 4, true, DEPTHWISE_IN, DEPTHWISE_OUT)
#elif DEPTHWISE_KIND == 1
SPREAD_KERNEL(depthwise_4, DEPTHWISE_FILTER, 4, DEPTHWISE_IN, DEPTHWISE_OUT)
SPREAD_KERNEL(depthwise_2, DEPTHWISE_FILTER, 2, DEPTHWISE_IN, DEPTHWISE_OUT)
#else
FILTER_KERNEL(depthwise_7, DEPTHWISE_FILTER, DEPTHWISE_STRIDE, 7, DEPTHWISE_IN)
FILTER_KERNEL(depthwise_4, DEPTHWISE_FILTER, DEPTHWISE_STRIDE, 4, DEPTHWISE_IN)
#endif
#else
GENERAL_KERNELS(f32, float, float)
GENERAL_KERNELS(f16, __half, __half)
GENERAL_KERNELS(bf16, __nv_bfloat16, __nv_bfloat16)
GENERAL_KERNELS(f16_f32, __half, float)
GENERAL_KERNELS(bf16_f32, __nv_bfloat16, float)
GENERAL_FILTER_KERNEL(f32, float)
GENERAL_FILTER_KERNEL(f16, __half)
GENERAL_FILTER_KERNEL(bf16, __nv_bfloat16)
SUM_PARTIALS_KERNEL(f32, float)
SUM_PARTIALS_KERNEL(f16, __half)
SUM_PARTIALS_KERNEL(bf16, __nv_bfloat16)
#endif
