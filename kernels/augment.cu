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
// A block takes one image, `tile_width` columns and `steps` times blockDim.y * LINES rows of the output. It puts the
// input's columns under these, resampled vertically, into shared memory (a warp takes neighbouring bytes, so channels
// do not matter there), a segment at a time if they are many. Then each thread resamples its column horizontally, for
// LINES rows at once. Grid (images * bands * column_tiles), column tiles fastest; block (x, y), x whole warps and at
// least tile_width, x * y at most THREADS.
//
// - augment_T_C: no jitter.
// - augment_jitter_T_C: with it, for C 1 and 3. Where an image has a contrast other than 1, `partial` (images, bands *
//   column_tiles) has what augment_means_C wrote; if it is null, contrasts are left alone.
// - augment_means_C: the sums of the grey levels, after brightness, of a block's pixels; the same launch shape. Images
//   whose contrast is 1 are left out.
//
// `vector`: 16 or 8 where a pixel of the output is so many bytes and so aligned, else 0.
// A crop outside of the image gives NaN, and reads nothing outside of the image.

#include "common.cuh"

const int THREADS = 256;
const int LINES = 2;      // rows of the output that a thread resamples at once
const int WORDS = 1;      // words of four bytes of the input's row that a thread has under way
const int PLACES = 1536;  // elements of the input's row, of all groups of rows, in shared memory
const int BLOCKS = 4;     // of THREADS on a multiprocessor, for the number of registers
const int PARAMETERS = 9;
enum Parameter { TOP, LEFT, HEIGHT, WIDTH, FLIP, BRIGHTNESS, CONTRAST, SATURATION, HUE };
const float WHITE = 255.0f;

struct alignas(4 * LINES) Lines {
  float value[LINES];
};

// Shared memory has 32 / LINES elements across its banks: one is left out after each such row, so that a stride of a
// power of two meets different banks.
__device__ inline int place(int i) { return i + i / (32 / LINES); }

// --- resampling -------------------------------------------------------------------------------------------------------

// One axis. Positions are relative to `base`, so that they keep their digits in a large image.
struct Axis {
  float first, scale, support, inverse;
  int base, size;

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

// Byte `b` as a float: 2^23 + byte, less 2^23. Exact, and cheaper than a conversion.
template <int B>
__device__ inline float level(uint32 word) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + B)) - 8388608.0f;
}

// Four bytes at any address, by two aligned words; the four bytes behind must be there as well.
__device__ inline uint32 load_word(const uint8* at) {
  uint32 beyond = (uint32)(uint64)at & 3u;
  const uint32* words = (const uint32*)(at - beyond);  // not from a number: the compiler would not know the memory
  return __funnelshift_r(words[0], words[1], beyond * 8u);
}

// The first `count` of four bytes, zeros behind them.
__device__ inline uint32 load_bytes(const uint8* at, int64 count) {
  uint32 word = 0;
#pragma unroll 1
  for (int b = 0; b < 4 && b < count; ++b) word |= (uint32)at[b] << (8 * b);
  return word;
}

struct Picture {
  const uint8* pixels;
  int height, row_bytes;
};

// What a thread sums up: LINES rows of the output of WORDS words of bytes, and of each row the weights.
struct Sums {
  float value[WORDS][4][LINES], total[LINES];
};

// Adds rows [y0, y1), `at` in row y0 on, of the words `word`, `word` + 32, ... below `words`. Unless WHOLE, a word may
// reach beyond the `rest` bytes that are left of the image.
template <bool WHOLE>
__device__ inline void add_rows(Sums* sums, const uint8* at, int64 rest, int row_bytes, const Axis& rows, int y0,
                                int y1, float centre, int word, int words) {
  float apart = rows.scale * rows.inverse;
#pragma unroll(WHOLE ? 2 : 1)
  for (int y = y0; y < y1; ++y) {
    uint32 four[WORDS];
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
      four[j] = 0;
      if (word + 32 * j < words) four[j] = WHOLE ? load_word(at + 128 * j) : load_bytes(at + 128 * j, rest - 128 * j);
    }
    float distance = rows.distance(y, centre);
    float weight[LINES];
#pragma unroll
    for (int l = 0; l < LINES; ++l) {
      weight[l] = triangle(distance - (float)l * apart);
      sums->total[l] += weight[l];
    }
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
      float levels[4] = {level<0>(four[j]), level<1>(four[j]), level<2>(four[j]), level<3>(four[j])};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int l = 0; l < LINES; ++l) sums->value[j][b][l] += weight[l] * levels[b];
      }
    }
    at += row_bytes;
    rest -= row_bytes;
  }
}

// Puts bytes [first, first + count) of the input's rows, resampled to LINES rows of the output for each group of rows,
// into shared memory, `each` places a group. `line` is the first group's first row.
__device__ inline void resample_rows(Lines* shared, const Picture& picture, const Axis& rows, int first, int count,
                                     int line, int out_height, int each) {
  const int ACROSS = 32 * WORDS;
  int thread = threadIdx.y * blockDim.x + threadIdx.x;
  int words = (count + 3) / 4;
  int chunks = (words + ACROSS - 1) / ACROSS;
  for (int task = thread / 32; task < chunks * (int)blockDim.y; task += blockDim.x * blockDim.y / 32) {
    int group = task / chunks;
    int word = (task - group * chunks) * ACROSS + thread % 32;
    int top = line + group * LINES;
    if (top >= out_height) break;
    int bottom = top + LINES < out_height ? top + LINES : out_height;
    int y0 = rows.begin(top), y1 = rows.end(bottom - 1);
    float centre = rows.centre(top);
    int64 start = (int64)y0 * picture.row_bytes + first + 4 * word;
    const uint8* at = picture.pixels + start;
    int64 rest = (int64)picture.height * picture.row_bytes - start;
    Sums sums = {};
    // The last row's words, and one more, are inside of the image: nearly always.
    if (rest - (int64)(y1 - 1 - y0) * picture.row_bytes >= 4 * ACROSS)
      add_rows<true>(&sums, at, rest, picture.row_bytes, rows, y0, y1, centre, word, words);
    else
      add_rows<false>(&sums, at, rest, picture.row_bytes, rows, y0, y1, centre, word, words);
#pragma unroll
    for (int l = 0; l < LINES; ++l) sums.total[l] = 1.0f / sums.total[l];
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
      if (word + 32 * j >= words) break;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        Lines result;
#pragma unroll
        for (int l = 0; l < LINES; ++l) result.value[l] = sums.value[j][b][l] * sums.total[l];
        shared[place(group * each + 4 * (word + 32 * j) + b)] = result;
      }
    }
  }
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

struct Output {
  int height, width, tile_width, column_tiles, bands, steps;
  int64 image_stride, channel_stride, row_stride, column_stride;
  int channels, vector;
  float scale[4], shift[4];
};

template <class T, int C>
__device__ inline void store(T* to, const float* pixel, const Output& output) {
  const int MOST = 16 / sizeof(T);
  alignas(16) T values[MOST];
#pragma unroll
  for (int c = 0; c < MOST; ++c) values[c] = narrow<T>(0.0f);
#pragma unroll
  for (int c = 0; c < C; ++c) values[c] = narrow<T>(pixel[c] * output.scale[c] + output.shift[c]);
  if (output.vector == 16) {
    *(uint4*)to = *(const uint4*)values;
  } else if (output.vector == 8) {
    *(uint2*)to = *(const uint2*)values;
  } else {
#pragma unroll
    for (int c = 0; c < C; ++c) to[c * output.channel_stride] = values[c];
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
  __shared__ float sums[THREADS];
  int thread = threadIdx.y * blockDim.x + threadIdx.x;
  int threads = blockDim.x * blockDim.y;
  sums[thread] = value;
  for (int i = threads + thread; i < THREADS; i += threads) sums[i] = 0.0f;
  __syncthreads();
  for (int width = THREADS / 2; width > 0; width /= 2) {
    if (thread < width) {
      for (int i = thread; i < width; i += threads) sums[i] += sums[i + width];
    }
    __syncthreads();
  }
  if (thread == 0) *result = sums[0];
}

// With MEANS the result is `partial`, else `out`.
template <class T, int C, bool JITTER, bool MEANS>
__device__ void augment(T* out, float* partial, const uint8* __restrict__ pixels, const int64* offsets,
                        const int* sizes, const float* parameters, const Output& output) {
  __shared__ Lines shared[PLACES + PLACES / (32 / LINES)];
  int index = blockIdx.x;
  int tile = index % output.column_tiles;
  index /= output.column_tiles;
  int band = index % output.bands;
  int image = index / output.bands;
  const float* given = parameters + (int64)image * PARAMETERS;
  if (MEANS && given[CONTRAST] == 1.0f) return;
  Picture picture = {pixels + offsets[image], sizes[2 * image], sizes[2 * image + 1] * C};
  Axis rows(given[TOP], given[HEIGHT], output.height, picture.height);
  Axis columns(given[LEFT], given[WIDTH], output.width, sizes[2 * image + 1]);
  float contrast = !JITTER || MEANS || partial == nullptr ? 1.0f : given[CONTRAST];
  float mean = contrast != 1.0f ? mean_level(partial, image, output) : 0.0f;

  int first_column = tile * output.tile_width;
  int end_column = first_column + output.tile_width < output.width ? first_column + output.tile_width : output.width;
  int first = columns.begin(first_column), end = columns.end(end_column - 1);
  int column = first_column + threadIdx.x;
  bool live = column < end_column;
  int k0 = columns.begin(column), k1 = columns.end(column);
  float centre = columns.centre(column);
  // The output's column of a flipped image is the one on the other side.
  T* to = out + image * output.image_stride +
          (given[FLIP] != 0.0f ? output.width - 1 - column : column) * output.column_stride;
  int each = PLACES / blockDim.y;
  int segment = each / C & ~3;
  float levels = 0.0f;

  for (int step = 0; step < output.steps; ++step) {
    int line = (band * output.steps + step) * blockDim.y * LINES;
    if (line >= output.height) break;
    int row = line + threadIdx.y * LINES;
    float sum[LINES][C], total = 0.0f;
#pragma unroll
    for (int l = 0; l < LINES; ++l) {
#pragma unroll
      for (int c = 0; c < C; ++c) sum[l][c] = 0.0f;
    }
    for (int from = first; from < end; from += segment) {
      int until = end - from < segment ? end : from + segment;
      resample_rows(shared, picture, rows, from * C, (until - from) * C, line, output.height, each);
      __syncthreads();
      if (live && row < output.height) {
        int k_end = k1 < until ? k1 : until;
#pragma unroll 2
        for (int k = k0 > from ? k0 : from; k < k_end; ++k) {
          float weight = triangle(columns.distance(k, centre));
          total += weight;
          int i = threadIdx.y * each + (k - from) * C;
#pragma unroll
          for (int c = 0; c < C; ++c) {
            Lines values = shared[place(i + c)];
#pragma unroll
            for (int l = 0; l < LINES; ++l) sum[l][c] += weight * values.value[l];
          }
        }
      }
      __syncthreads();
    }
    if (!live) continue;
    total = 1.0f / total;
#pragma unroll
    for (int l = 0; l < LINES; ++l) {
      if (row + l >= output.height) break;
      float* pixel = sum[l];
#pragma unroll
      for (int c = 0; c < C; ++c) pixel[c] *= total;
      if (JITTER && given[BRIGHTNESS] != 1.0f) brighten<C>(pixel, given[BRIGHTNESS]);
      if (MEANS) {
        levels += grey<C>(pixel);
        continue;
      }
      if (JITTER) colour<C>(pixel, contrast, mean, given[SATURATION], given[HUE]);
      store<T, C>(to + (row + l) * output.row_stride, pixel, output);
    }
  }
  if (MEANS) sum_of_block(partial + blockIdx.x, levels);
}

#define AUGMENT_KERNEL(name, T, C, JITTER, MEANS)                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                    \
      name(T* out, float* partial, const uint8* pixels, const int64* offsets, const int* sizes,                    \
           const float* parameters, int height, int width, int tile_width, int column_tiles, int bands, int steps, \
           int64 image_stride, int64 channel_stride, int64 row_stride, int64 column_stride, int channels,          \
           int vector, float scale_0, float scale_1, float scale_2, float scale_3, float shift_0, float shift_1,   \
           float shift_2, float shift_3) {                                                                         \
    augment<T, C, JITTER, MEANS>(out, partial, pixels, offsets, sizes, parameters,                                 \
                                 {height, width, tile_width, column_tiles, bands, steps, image_stride,             \
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
