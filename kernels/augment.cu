// Images of different sizes to one batch: crop, resample, flip, colour jitter, normalize, cast, layout, padding.
//
// Image i is uint8 (sizes[2i], sizes[2i + 1], C) at pixels + offsets[i], packed, at any address. Its row of parameters:
// top, left, height and width of the crop in pixels, flip (0 or not), the factors brightness, contrast and saturation,
// and the shift hue. flcuda/reference.py says what they do; colours are jittered in this order, in levels (0 to 255).
// Resampling is by a triangle as wide as a pixel of the coarser of both grids, cut off at the image's edge and scaled
// to a sum of 1. It takes pixels outside of the crop, as Pillow's resize with a box does; one direction after the
// other, floats between. out[i, c, y, x] lies at the given strides (elements) and is level * scale_c + shift_c;
// channels from C on are 0.
//
// A thread makes a column of LINES rows of the output: it goes down the rows of the input, resamples each horizontally
// and adds it to the rows of the output under way, of which there are two at a time. What it reads lies in shared
// memory, as it is in the image: while threads resample some rows of the input, the next ones are on their way there.
// A row that is too long for that comes in segments. Grid (images * bands * column_tiles), column tiles fastest; block
// (x, y), x whole warps and at least tile_width, x * y at most THREADS. The x threads at one y are a group: LINES rows
// of the block's y * LINES, with a share of the shared memory.
//
// - augment_T_C: no jitter.
// - augment_jitter_T_C: with it, for C 1 and 3. Where an image has a contrast other than 1, `partial` (images, bands *
//   column_tiles) has what augment_means_C wrote; if it is null, contrasts are left alone.
// - augment_means_C: the sums of the grey levels, after brightness, of a block's pixels; the same launch shape. Images
//   whose contrast is 1 are left out.
//
// `vector`: 16 or 8 where a pixel of the output is so many bytes and so aligned; 6 where it is three elements of 16
// bits, and four pixels of a row, from a multiple of four on, are three words of 8 bytes, so aligned; else 0.
// A crop outside of the image gives NaN. Reads are of whole 16 bytes from a multiple of 16 on, each with a byte of the
// image in it; bytes of others do not count.

#include "common.cuh"

const int THREADS = 224;
const int LINES = 28;     // rows of the output that a thread makes, at most MOST_LINES
const int ROWS = 24;      // most rows of the input that come to shared memory at once, for a group
const int BYTES = 36864;  // of the input in shared memory: of all groups, rows in use and rows on their way
const int BLOCKS = 4;     // of THREADS on a multiprocessor, for the number of registers
const int MOST_LINES = 32;
const int MOST_GROUPS = THREADS / 32;
const int TAPS = 5;     // most pixels of the input under one of the output whose weights a thread keeps
const int AT_ONCE = 4;  // pixels whose weights it makes as it goes, if there are more
const int CHUNK = 16;   // bytes that are copied at once
const int BEYOND = 32;  // bytes behind all rows: a thread reads TAPS pixels where fewer have a weight
const int LAST = 0x7fffffff;
const int PARAMETERS = 9;
enum Parameter { TOP, LEFT, HEIGHT, WIDTH, FLIP, BRIGHTNESS, CONTRAST, SATURATION, HUE };
const float WHITE = 255.0f;

// --- resampling -------------------------------------------------------------------------------------------------------

// One axis. Positions are relative to `base`, so that they keep their digits in a large image.
struct Axis {
  float first, scale, support, inverse;
  int base, size;

  Axis() = default;
  __device__ Axis(float start, float length, int out_size, int in_size) {
    size = in_size;
    base = (int)fminf(fmaxf(floorf(start), 0.0f), (float)(size - 1));
    first = start - (float)base;
    scale = length / (float)out_size;
    support = fmaxf(scale, 1.0f);
    inverse = 1.0f / support;
  }
  __device__ float centre(int i) const { return first + ((float)i + 0.5f) * scale; }
  // The input's elements [begin, end) under element i of the output.
  __device__ int begin(int i) const { return inside(floorf(centre(i) - support + 0.5f)); }
  __device__ int end(int i) const { return inside(floorf(centre(i) + support + 0.5f)); }
  __device__ int inside(float position) const {
    return base + (int)fminf(fmaxf(position, -(float)base), (float)(size - base));
  }
  // The distance of the input's element k from a centre, in units of the support.
  __device__ float distance(int k, float from) const { return ((float)(k - base) + 0.5f - from) * inverse; }
};

__device__ inline float triangle(float distance) { return fmaxf(1.0f - fabsf(distance), 0.0f); }

// Byte `b` of a word as a float: 2^23 + byte, less 2^23. Exact, and cheaper than a conversion.
__device__ inline float level(uint32 word, int b) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + b)) - 8388608.0f;
}

// When all rows of the input before `end` are in both sums of a column, a row of the output is `first` times the first
// sum and `last` times the second. Where the output's grid is finer, the sums are the last two rows; else the first sum
// is all there is to it, and `last` is 0. `next` is the end of the row after this one, LAST if there is none.
struct alignas(16) Line {
  float first, last;
  int end, next;
};

// Where a row of the input lies in shared memory, and its weights in both sums: for the row of the output that ends
// next and for the one after that.
struct alignas(16) Row {
  int place;
  float first, second;
};

__device__ inline Line line_of(const Axis& rows, int line, bool is_last) {
  int begin = rows.begin(line), end = rows.end(line);
  float centre = rows.centre(line);
  Line result = {1.0f, 0.0f, end, is_last ? LAST : rows.end(line + 1)};
  float total = 0.0f;
  if (rows.scale < 1.0f) {
    result.first = end - 2 >= begin ? triangle(rows.distance(end - 2, centre)) : 0.0f;
    result.last = end - 1 >= begin ? triangle(rows.distance(end - 1, centre)) : 0.0f;
    total = result.first + result.last;
  } else {
#pragma unroll 1
    for (int y = begin; y < end; ++y) total += triangle(rows.distance(y, centre));
  }
  // A sum of nothing is not a number.
  float factor = total > 0.0f ? 1.0f / total : quiet_nan<float>();
  result.first *= factor;
  result.last *= factor;
  return result;
}

// Adds N pixels of C bytes, the first at byte `at` of shared memory, with their weights.
template <int N, int C>
__device__ inline void add_pixels(float* sum, const uint8* shared, int at, const float* weights) {
  const int IN = (N * C + 6) / 4, OUT = (N * C + 3) / 4;
  const uint32* words = (const uint32*)(shared + (at & ~3));
  uint32 raw[IN + 1];
#pragma unroll
  for (int i = 0; i < IN; ++i) raw[i] = words[i];
  raw[IN] = 0;
#pragma unroll
  for (int i = 0; i < OUT; ++i) raw[i] = __funnelshift_r(raw[i], raw[i + 1], (uint32)at * 8u);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < C; ++c) sum[c] += weights[n] * level(raw[(n * C + c) / 4], (n * C + c) % 4);
  }
}

// --- the way to shared memory -----------------------------------------------------------------------------------------

// CHUNK bytes, both places aligned so; on their way until wait_for_copies.
__device__ inline void copy_chunk(uint8* to, const uint8* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32)__cvta_generic_to_shared(to)), "l"(from)
               : "memory");
#else
  *(uint4*)to = *(const uint4*)from;
#endif
}

// Of those that this thread has begun.
__device__ inline void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

struct Picture {
  const uint8* pixels;
  int height, row_bytes;

  __device__ const uint8* row(int y) const { return pixels + (int64)y * row_bytes; }
};

struct Output {
  int height, width, tile_width, column_tiles, bands;
  int64 image_stride, channel_stride, row_stride, column_stride;
  int channels, vector;
  float scale[4], shift[4];
};

// Rows of the input in shared memory together: pixels [from, until) of rows [y, y + rows).
struct Stage {
  int y, rows, from, until;
};

// What a group makes and reads: rows of the output from `line` on, `lines` of them, of rows [begin, bottom) of the
// input, pixels [first, end). They come in `count` stages: `depth` rows at a time, `pitch` bytes each, or a row in
// `segments` of `width` pixels, if not even one fits.
struct Part {
  const float* given;
  Picture picture;
  Axis rows, columns;
  int image, first_column, end_column, flip;
  int line, lines, begin, bottom, first, end, width, segments, pitch, depth, count;
  // How many rows and chunks the group's threads are on their way from one chunk to the next.
  int row_stride, chunk_stride;

  __device__ Stage stage(int i) const {
    int part = 0, row = i;
    if (segments > 1) {
      row = i / segments;
      part = i - row * segments;
    }
    int y = begin + row * depth;
    int from = first + part * width;
    return {y, bottom - y < depth ? bottom - y : depth, from, end - from < width ? end : from + width};
  }
};

// Group `group` of this block.
template <int C>
__device__ inline Part part_of(const uint8* pixels, const int64* offsets, const int* sizes, const float* parameters,
                               const Output& output, int group, int bytes) {
  Part part;
  int index = blockIdx.x;
  int tile = index % output.column_tiles;
  index /= output.column_tiles;
  int band = index % output.bands;
  int image = index / output.bands;
  const float* given = parameters + (int64)image * PARAMETERS;
  int height = sizes[2 * image], width = sizes[2 * image + 1];
  part.given = given;
  part.image = image;
  part.picture = {pixels + offsets[image], height, width * C};
  part.rows = Axis(given[TOP], given[HEIGHT], output.height, height);
  part.columns = Axis(given[LEFT], given[WIDTH], output.width, width);
  part.line = (band * (int)blockDim.y + group) * LINES;
  part.lines = output.height - part.line < LINES ? output.height - part.line : LINES;
  part.begin = part.lines > 0 ? part.rows.begin(part.line) : 0;
  part.bottom = part.lines > 0 ? part.rows.end(part.line + part.lines - 1) : 0;

  int first = tile * output.tile_width;
  int end = first + output.tile_width < output.width ? first + output.tile_width : output.width;
  part.first_column = first;
  part.end_column = end;
  // The output's column of a flipped image is the one on the other side.
  part.flip = given[FLIP] != 0.0f;
  part.first = part.columns.begin(part.flip ? output.width - end : first);
  part.end = part.columns.end(part.flip ? output.width - 1 - first : end - 1);
  // A crop that is not inside of the image may have columns that do not rise.
  if (part.end < part.first) part.end = part.first;
  part.width = part.end - part.first;
  part.segments = 1;
  if (part.width > (bytes - 2 * CHUNK) / C) {
    part.width = (bytes - 2 * CHUNK) / C;
    part.segments = (part.end - part.first - 1) / part.width + 1;
  }
  // A row's first byte may be any of a chunk.
  int chunks = (part.width * C + 2 * CHUNK - 2) / CHUNK;
  part.pitch = chunks * CHUNK;
  part.depth = part.segments > 1 ? 1 : bytes / part.pitch < ROWS ? bytes / part.pitch : ROWS;
  part.count = 0;
  if (part.begin < part.bottom) part.count = ((part.bottom - part.begin - 1) / part.depth + 1) * part.segments;
  part.row_stride = blockDim.x / chunks;
  part.chunk_stride = blockDim.x - part.row_stride * chunks;
  return part;
}

// The chunks of a stage that a thread copies, the first one CHUNK * `chunk` bytes into row `row`.
struct Chunks {
  const uint8* start;
  int row, place, row_bytes, pitch, row_stride, stride;

  __device__ Chunks(const uint8* first, const Part& part, int first_row, int chunk) {
    start = first;
    row = first_row;
    place = chunk * CHUNK;
    row_bytes = part.picture.row_bytes;
    pitch = part.pitch;
    row_stride = part.row_stride;
    stride = part.chunk_stride * CHUNK;
  }
  __device__ const uint8* from() const {
    const uint8* at = start + (uint64)(uint32)row * (uint32)row_bytes;
    return at - (uint32)(uint64)at % CHUNK + place;
  }
  __device__ int to() const { return row * pitch + place; }
  __device__ void next() {
    row += row_stride;
    place += stride;
    if (place >= pitch) {
      place -= pitch;
      ++row;
    }
  }
};

// The threads of a group copy a stage; `row` and `chunk` are where a thread begins. Chunks are whole, and so have bytes
// of other pixels, unless the image ends there.
template <int C>
__device__ inline void copy_stage(uint8* to, const Part& part, const Stage& stage, int row, int chunk) {
  const uint8* start = part.picture.row(stage.y) + (int64)stage.from * C;
  const uint8* end = part.picture.row(part.picture.height);
  Chunks chunks(start, part, row, chunk);
  if (end - start >= (int64)(stage.rows - 1) * chunks.row_bytes + chunks.pitch) {
#pragma unroll 1
    for (; chunks.row < stage.rows; chunks.next()) copy_chunk(to + chunks.to(), chunks.from());
  } else {
#pragma unroll 1
    for (; chunks.row < stage.rows; chunks.next()) {
      const uint8* from = chunks.from();
#pragma unroll 1
      for (int b = 0; b < CHUNK && from + b < end; ++b) to[chunks.to() + b] = from[b];
    }
  }
}

// Row `row` of a stage. `lines` are those of the part.
template <int C>
__device__ inline Row row_of(const Part& part, const Stage& stage, int row, const Line* lines) {
  const Axis& rows = part.rows;
  int y = stage.y + row;
  int before = (int)((uint64)(part.picture.row(y) + (int64)stage.from * C) % CHUNK);
  Row result = {row * part.pitch + before, 0.0f, 1.0f};
  if (rows.scale < 1.0f) return result;
  // The first one that does not end before, by bisection.
  int line = 0;
#pragma unroll
  for (int step = MOST_LINES / 2; step > 0; step /= 2) {
    if (line + step < part.lines && lines[line + step - 1].end <= y) line += step;
  }
  result.first = triangle(rows.distance(y, rows.centre(part.line + line)));
  result.second = triangle(rows.distance(y, rows.centre(part.line + line + 1)));
  return result;
}

// --- colours ----------------------------------------------------------------------------------------------------------

__device__ inline float clamp_level(float value) { return fminf(fmaxf(value, 0.0f), WHITE); }

template <int C>
__device__ inline float grey(const float* pixel) {
  return C == 1 ? pixel[0] : 0.2989f * pixel[0] + 0.587f * pixel[1] + 0.114f * pixel[2];
}

// Adds to the hue of a pixel: to HSV and back, as torchvision does it.
__device__ inline void shift_hue(float* pixel, float shift) {
  float r = pixel[0], g = pixel[1], b = pixel[2];
  float most = fmaxf(r, fmaxf(g, b)), least = fminf(r, fminf(g, b));
  float range = most - least;
  if (range == 0.0f) return;
  float s = range / most;
  float divisor = 1.0f / range;
  float rc = (most - r) * divisor, gc = (most - g) * divisor, bc = (most - b) * divisor;
  float sextant = most == r ? bc - gc : most == g ? 2.0f + rc - bc : 4.0f + gc - rc;
  float h = sextant / 6.0f + shift;
  h = (h - floorf(h)) * 6.0f;
  float whole = floorf(h);
  float f = h - whole;
  int i = (int)whole;
  float p = clamp_level(most * (1.0f - s));
  float q = clamp_level(most * (1.0f - s * f));
  float t = clamp_level(most * (1.0f - s * (1.0f - f)));
  pixel[0] = i == 1 ? q : i == 2 || i == 3 ? p : i == 4 ? t : most;
  pixel[1] = i == 0 || i == 6 ? t : i == 3 ? q : i == 4 || i == 5 ? p : most;
  pixel[2] = i == 2 ? t : i == 5 ? q : i == 3 || i == 4 ? most : p;
}

template <int C>
__device__ inline void brighten(float* pixel, float factor) {
#pragma unroll
  for (int c = 0; c < C; ++c) pixel[c] = clamp_level(pixel[c] * factor);
}

// All but the brightness.
template <int C>
__device__ inline void colour(float* pixel, float contrast, float mean, float saturation, float hue) {
  if (contrast != 1.0f) {
#pragma unroll
    for (int c = 0; c < C; ++c) pixel[c] = clamp_level(contrast * pixel[c] + (1.0f - contrast) * mean);
  }
  if (C == 3 && saturation != 1.0f) {
    float level = grey<C>(pixel);
#pragma unroll
    for (int c = 0; c < C; ++c) pixel[c] = clamp_level(saturation * pixel[c] + (1.0f - saturation) * level);
  }
  if (C == 3 && hue != 0.0f) shift_hue(pixel, hue);
}

// --- the kernels ------------------------------------------------------------------------------------------------------

template <class T>
__device__ inline uint32 bits(T value) {
  return *(const uint16*)&value;
}

// How pixels of three elements of 16 bits, one a lane, become words of 8 bytes, of which the first 24 lanes have one:
// what of which lane goes into both halves.
struct Packing {
  int front[2], back[2];
  uint32 selector[2];

  __device__ Packing(int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Of three halves for two pixels: front of the one, back of the one and front of the other, the rest.
      int half = 2 * lane + i;
      int pixel = half / 3 * 2, third = half % 3;
      front[i] = third == 0 ? pixel : pixel + 1;
      back[i] = third == 2 ? pixel + 1 : pixel;
      selector[i] = third == 0 ? 0x3210u : third == 1 ? 0x1054u : 0x5432u;
    }
  }
  template <class T>
  __device__ uint2 packed(const T* values) const {
    uint32 first = bits(values[0]) | bits(values[1]) << 16, second = bits(values[2]);
    uint32 halves[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32 low = __shfl_sync(0xffffffffu, first, front[i]);
      halves[i] = __byte_perm(low, __shfl_sync(0xffffffffu, second, back[i]), selector[i]);
    }
    return {halves[0], halves[1]};
  }
};

template <class T, int C>
__device__ inline void store(T* to, const T* values, const Output& output) {
  if (output.vector == 16) {
    *(uint4*)to = *(const uint4*)values;
  } else if (output.vector == 8) {
    *(uint2*)to = *(const uint2*)values;
  } else {
#pragma unroll
    for (int c = 0; c < C; ++c) to[c * output.channel_stride] = values[c];
#pragma unroll 1
    for (int c = C; c < output.channels; ++c) to[c * output.channel_stride] = narrow<T>(0.0f);
  }
}

// The mean grey level of an image, from the sums of its blocks, in order.
__device__ inline float mean_level(const float* partial, int image, const Output& output) {
  __shared__ float mean;
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    int blocks = output.bands * output.column_tiles;
    float sum = 0.0f;
    for (int block = 0; block < blocks; ++block) sum += partial[(int64)image * blocks + block];
    mean = sum / ((float)output.height * (float)output.width);
  }
  __syncthreads();
  return mean;
}

__device__ inline void sum_of_block(float* result, float value) {
  const int PLACES = 256;  // a power of two
  __shared__ float sums[PLACES];
  int thread = threadIdx.y * blockDim.x + threadIdx.x;
  int threads = blockDim.x * blockDim.y;
  sums[thread] = value;
  for (int i = threads + thread; i < PLACES; i += threads) sums[i] = 0.0f;
  __syncthreads();
  for (int width = PLACES / 2; width > 0; width /= 2) {
    for (int i = thread; i < width; i += threads) sums[i] += sums[i + width];
    __syncthreads();
  }
  if (thread == 0) *result = sums[0];
}

// A thread's column of the output: pixels [first, end) of the input's rows are under it.
template <class T, int C, bool JITTER, bool MEANS>
struct Column {
  int first, end;
  float centre, factor, weights[TAPS];
  // For the row of the output that ends next and the one after that, see Line; and of a row of the input.
  float sums[2][C], sum[C];

  const Line* line;
  int line_end;

  const float* given;
  float contrast, mean, levels;
  T* to;
  bool live, packs;
  Packing packing;

  __device__ Column(int lane) : packing(lane) {}

  // Above `column`, of pixels [from, until) of the input.
  __device__ void place(const Axis& columns, int column, int from, int until) {
    end = columns.end(column);
    end = end < until ? end : until;
    first = columns.begin(column);
    // A crop that is not inside of the image may have columns that do not rise.
    first = first < from ? from : first < end ? first : end;
    centre = columns.centre(column);
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < TAPS; ++n) {
      weights[n] = first + n < end ? triangle(columns.distance(first + n, centre)) : 0.0f;
      total += weights[n];
    }
#pragma unroll 1
    for (int k = first + TAPS; k < end; ++k) total += triangle(columns.distance(k, centre));
    factor = total > 0.0f ? 1.0f / total : quiet_nan<float>();
#pragma unroll
    for (int n = 0; n < TAPS; ++n) weights[n] *= factor;
#pragma unroll
    for (int c = 0; c < C; ++c) sum[c] = sums[0][c] = sums[1][c] = 0.0f;
  }

  __device__ void next_sums() {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      sums[0][c] = sums[1][c];
      sums[1][c] = 0.0f;
    }
  }

  __device__ void add(const Row& row, const float* level) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      sums[0][c] += row.first * level[c];
      sums[1][c] += row.second * level[c];
    }
  }

  // A row of the output.
  __device__ void finish(const Output& output) {
    Line ended = *line++;
    line_end = ended.next;
    float pixel[C];
#pragma unroll
    for (int c = 0; c < C; ++c) pixel[c] = ended.first * sums[0][c] + ended.last * sums[1][c];
    if (JITTER && given[BRIGHTNESS] != 1.0f) brighten<C>(pixel, given[BRIGHTNESS]);
    if (MEANS) {
      if (live) levels += grey<C>(pixel);
      return;
    }
    if (JITTER) colour<C>(pixel, contrast, mean, given[SATURATION], given[HUE]);
    const int MOST = 16 / sizeof(T);
    alignas(16) T values[MOST];
#pragma unroll
    for (int c = 0; c < MOST; ++c) values[c] = narrow<T>(0.0f);
#pragma unroll
    for (int c = 0; c < C; ++c) values[c] = narrow<T>(pixel[c] * output.scale[c] + output.shift[c]);
    if (packs) {
      uint2 word = packing.packed(values);
      if (live) *(uint2*)to = word;
    } else if (live) {
      store<T, C>(to, values, output);
    }
    to += output.row_stride;
  }

  // Takes the rows of a stage, which lie from `shared` on, by N pixels each. FINER: the output has more rows.
  template <int N, bool FINER>
  __device__ void march(const uint8* shared, const Row* rows, const Stage& stage, const Output& output) {
    int offset = (first - stage.from) * C;
    int row = 0;
#pragma unroll 1
    while (true) {
      // The rows before the next one of the output ends; one at a time where several may end.
      int until = line_end - stage.y < stage.rows ? line_end - stage.y : stage.rows;
      if (FINER && row < until) {
        next_sums();
        until = row + 1;
      }
#pragma unroll 1
      for (; row < until; ++row) {
        Row now = rows[row];
        float level[C] = {};
        add_pixels<N, C>(level, shared, now.place + offset, weights);
        add(now, level);
      }
      if (line_end <= stage.y + row) {
        finish(output);
        if (!FINER) next_sums();
      } else if (!FINER || row >= stage.rows) {
        break;
      }
    }
  }

  // Likewise, by any number of pixels. A row that comes in segments is complete with the one that ends at `whole`.
  __device__ void march_far(const uint8* shared, const Row* rows, const Stage& stage, const Axis& columns, int whole,
                            bool finer, const Output& output) {
    int from = first < stage.from ? stage.from : first;
    int until = end < stage.until ? end : stage.until;
#pragma unroll 1
    for (int row = 0;;) {
      if (line_end <= stage.y + row) {
        finish(output);
        if (!finer) next_sums();
        continue;
      }
      if (row >= stage.rows) break;
      Row now = rows[row++];
#pragma unroll 1
      for (int k = from; k < until; k += AT_ONCE) {
        float some[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) some[n] = k + n < until ? triangle(columns.distance(k + n, centre)) : 0.0f;
        add_pixels<AT_ONCE, C>(sum, shared, now.place + (k - stage.from) * C, some);
      }
      if (stage.until < whole) break;
      if (finer) next_sums();
#pragma unroll
      for (int c = 0; c < C; ++c) sum[c] *= factor;
      add(now, sum);
#pragma unroll
      for (int c = 0; c < C; ++c) sum[c] = 0.0f;
    }
  }
};

// With MEANS the result is `partial`, else `out`.
template <class T, int C, bool JITTER, bool MEANS>
__device__ void augment(T* out, float* partial, const uint8* __restrict__ pixels, const int64* offsets,
                        const int* sizes, const float* parameters, const Output& output) {
  __shared__ uint4 shared[(BYTES + BEYOND) / CHUNK];
  __shared__ Line lines_of_parts[MOST_GROUPS][LINES];
  __shared__ Row rows_of_parts[MOST_GROUPS][2][ROWS];
  __shared__ Part parts[MOST_GROUPS];
  int bytes = BYTES / (int)blockDim.y / (2 * CHUNK) * CHUNK;
  bool leads = threadIdx.x < 32;  // a warp of each group
  const Part& part = parts[threadIdx.y];
  if (leads) {
    Part whole = part_of<C>(pixels, offsets, sizes, parameters, output, threadIdx.y, bytes);
    if (threadIdx.x == 0) parts[threadIdx.y] = whole;
  }
  __syncthreads();
  const float* given = part.given;
  if (MEANS && given[CONTRAST] == 1.0f) return;

  uint8* staged = (uint8*)shared + threadIdx.y * 2 * bytes;
  int chunks = part.pitch / CHUNK;
  int chunk_row = threadIdx.x / chunks, chunk = threadIdx.x - chunk_row * chunks;
  if (part.count > 0) copy_stage<C>(staged, part, part.stage(0), chunk_row, chunk);
  Line* lines = lines_of_parts[threadIdx.y];
  if (leads) {
    int i = threadIdx.x;  // MOST_LINES are not more than a warp
    if (i < part.lines) lines[i] = line_of(part.rows, part.line + i, i == part.lines - 1);
    __syncwarp();
  }

  int lane = threadIdx.x % 32;
  int column = part.first_column + threadIdx.x;
  Column<T, C, JITTER, MEANS> own(lane);
  own.live = column < part.end_column;
  int from_column = own.live ? column : part.end_column - 1;
  own.place(part.columns, part.flip ? output.width - 1 - from_column : from_column, part.first, part.end);
  own.given = given;
  own.contrast = !JITTER || MEANS || partial == nullptr ? 1.0f : given[CONTRAST];
  own.mean = own.contrast != 1.0f ? mean_level(partial, part.image, output) : 0.0f;
  own.levels = 0.0f;
  own.packs = C == 3 && sizeof(T) == 2 && output.vector == 6;
  own.to = out + part.image * output.image_stride + part.line * output.row_stride + column * output.column_stride;
  if (own.packs) {
    // Words of four elements: a lane's own one, if the warp has so many pixels.
    own.to += lane;
    own.live = lane < 24 && lane * 4 < 3 * (part.end_column - column + lane);
  }
  own.line = lines;
  bool finer = part.rows.scale < 1.0f;
  int taps = part.segments > 1 ? TAPS + 1 : 2;
  while (taps <= TAPS && __any_sync(0xffffffffu, own.end - own.first > taps)) ++taps;
  int rounds = 0;
  for (int group = 0; group < blockDim.y; ++group) rounds = rounds < parts[group].count ? parts[group].count : rounds;

  for (int round = 0; round <= rounds; ++round) {
    // Behind the last one, whatever is left of the output ends.
    Stage stage = {LAST - 1, 0, 0, 0};
    if (round < part.count) stage = part.stage(round);
    Row* table = rows_of_parts[threadIdx.y][round % 2];
    if (threadIdx.x < stage.rows) table[threadIdx.x] = row_of<C>(part, stage, threadIdx.x, lines);
    wait_for_copies();
    __syncthreads();
    if (round + 1 < part.count)
      copy_stage<C>(staged + (round + 1) % 2 * bytes, part, part.stage(round + 1), chunk_row, chunk);
    if (round == 0) own.line_end = part.lines > 0 ? lines[0].end : LAST;
    const uint8* now = staged + round % 2 * bytes;
    if (taps == 2 && finer) {
      own.template march<2, true>(now, table, stage, output);
    } else if (taps == 3 && finer) {
      own.template march<3, true>(now, table, stage, output);
    } else if (taps == 2) {
      own.template march<2, false>(now, table, stage, output);
    } else if (taps == 3) {
      own.template march<3, false>(now, table, stage, output);
    } else if (taps == 4 && !finer) {
      own.template march<4, false>(now, table, stage, output);
    } else if (taps == 5 && !finer) {
      own.template march<5, false>(now, table, stage, output);
    } else {
      own.march_far(now, table, stage, part.columns, part.end, finer, output);
    }
  }
  if (MEANS) sum_of_block(partial + blockIdx.x, own.levels);
}

#define AUGMENT_KERNEL(name, T, C, JITTER, MEANS)                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                    \
      name(T* out, float* partial, const uint8* pixels, const int64* offsets, const int* sizes,                    \
           const float* parameters, int height, int width, int tile_width, int column_tiles, int bands,            \
           int64 image_stride, int64 channel_stride, int64 row_stride, int64 column_stride, int channels,          \
           int vector, float scale_0, float scale_1, float scale_2, float scale_3, float shift_0, float shift_1,   \
           float shift_2, float shift_3) {                                                                         \
    augment<T, C, JITTER, MEANS>(out, partial, pixels, offsets, sizes, parameters,                                 \
                                 {height, width, tile_width, column_tiles, bands, image_stride,                    \
                                  channel_stride, row_stride, column_stride, channels, vector,                     \
                                  {scale_0, scale_1, scale_2, scale_3}, {shift_0, shift_1, shift_2, shift_3}});    \
  }

#define AUGMENT_KERNELS(suffix, T)                                     \
  AUGMENT_KERNEL(augment_##suffix##_1, T, 1, false, false)             \
  AUGMENT_KERNEL(augment_##suffix##_3, T, 3, false, false)             \
  AUGMENT_KERNEL(augment_##suffix##_4, T, 4, false, false)             \
  AUGMENT_KERNEL(augment_jitter_##suffix##_1, T, 1, true, false)       \
  AUGMENT_KERNEL(augment_jitter_##suffix##_3, T, 3, true, false)

AUGMENT_KERNELS(f32, float)
AUGMENT_KERNELS(f16, __half)
AUGMENT_KERNELS(bf16, __nv_bfloat16)
AUGMENT_KERNEL(augment_means_1, float, 1, true, true)
AUGMENT_KERNEL(augment_means_3, float, 3, true, true)
