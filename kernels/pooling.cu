// Pooling of dense images, nchw or nhwc. Outputs are overwritten (=). Windows start at o * stride - padding; all of them
// hold at least one place of the image. Element kernels take any launch shape of one dimension (grid-stride).
// The index of a window is the place of its maximum, row * kernel_w + column: in small_indices (at most 256 places; 255 with
// batch norm) or, when that is null, in large_indices. Backward passes gather: no atomics.
//
// Max pooling of y = relu(batch norm of x) never stores the batch norm's result: that is monotonic in x, so the largest x of
// a window (the smallest, where the channel's scale is negative) is the one, and is normalised alone. It is kept too: from it
// and the windows' gradients the sums of the batch norm's backward pass follow, from a quarter of the bytes. A window whose
// largest is not above zero has the index NOTHING: no gradient goes through it. Of places whose x differ and whose y round to
// the same number the one with the larger x is the maximum. Vectors are (channels), in float (double for double).
//
// Kernels named 3x3 are for windows of 3 x 3 with stride 2 and padding 1 only, and not for double. They move LANES neighbours at a time, which
// must be aligned: of nhwc the channels, of nchw the columns, a multiple of LANES of them. nhwc: blocks of at least
// channels / LANES threads. Any grid of one dimension. They begin at the end of memory: whoever wrote or read the arrays
// before has the end still in the second-level cache.
//
// POOL_PART and POOL_KIND, where defined, say which of the kernels and for which dtype: to compile all takes seconds.

#include "batch_norm.cuh"

struct PoolSizes {
  int64 n, c, h, w, oh, ow, kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w;
  int nhwc;

  __device__ int64 place(int64 image, int64 channel, int64 y, int64 x, int64 height, int64 width) const {
    return nhwc ? ((image * height + y) * width + x) * c + channel : ((image * c + channel) * height + y) * width + x;
  }
  // The coordinates of element i of an array of height and width, in its memory order.
  __device__ void coordinates(int64 i, int64 height, int64 width, int64* image, int64* channel, int64* y,
                              int64* x) const {
    int64 inner, middle, outer;
    i = divide(i, nhwc ? c : width, &inner);
    i = divide(i, nhwc ? width : height, &middle);
    *image = divide(i, nhwc ? height : c, &outer);
    *channel = nhwc ? inner : outer;
    *y = nhwc ? outer : middle;
    *x = nhwc ? middle : inner;
  }
};

// The windows [first, last) along one side that hold a place.
__device__ inline void windows(int64 place, int64 kernel, int64 stride, int64 padding, int64 count, int64* first,
                               int64* last) {
  int64 padded = place + padding;
  int64 ignored;
  *first = padded < kernel ? 0 : divide(padded - kernel, stride, &ignored) + 1;
  *last = divide(padded, stride, &ignored) + 1;
  if (*last > count) *last = count;
}

template <class T, int N>
struct Signs;
template <class T, int N>
struct NoSigns;

// --- what is pooled, and what becomes of a gradient ----------------------------------------------------------------------

const int NOTHING = 255;
const int NOTHING_LARGE = -1;

// The image itself. NaN wins, and of several the last; when nothing is above minus infinity the first place of the image is
// the maximum.
template <class T>
struct Plain {
  typedef Accumulator<T> A;
  template <int N>
  using Turn = NoSigns<T, N>;
  struct Channel {};
  static const bool KEEPS = false;
  T* y;
  T* largest;
  __device__ Channel channel(int64) const { return Channel(); }
  __device__ static A key(T x, const Channel&) { return widen(x); }
  __device__ static bool better(A value, A best) { return value > best || is_nan(value); }
  __device__ static bool finish(A best, const Channel&, T* y, T*) {
    *y = narrow<T>(best);
    return true;
  }
};

// relu of the batch norm of the image. `largest` = the x of each window's maximum.
template <class T>
struct Normalized {
  typedef Accumulator<T> A;
  template <int N>
  using Turn = Signs<T, N>;
  struct Channel {
    A sign, scale, mean, bias;
    __device__ A normalized(A x) const { return (x - mean) * scale + bias; }
  };
  static const bool KEEPS = true;
  T* y;
  T* largest;
  const A* weight;
  const A* bias;
  const A* mean;
  const A* inverse;
  __device__ Channel channel(int64 c) const {
    A scale = inverse[c] * weight[c];
    return Channel{scale < 0 ? A(-1) : A(1), scale, mean[c], bias[c]};
  }
  __device__ static A key(T x, const Channel& channel) { return widen(x) * channel.sign; }
  __device__ static bool better(A value, A best) { return value > best; }
  __device__ static bool finish(A best, const Channel& channel, T* y, T* largest) {
    A x = best * channel.sign;
    *largest = narrow<T>(x);
    A value = channel.normalized(x);
    bool some = !(value <= A(0));  // NaN counts as above zero, as relu has it
    *y = narrow<T>(some ? value : A(0));
    return some;
  }
};

// The gradient of the image itself.
template <class T>
struct PlainGradient {
  typedef Accumulator<T> A;
  struct Channel {};
  static const bool READS = false;
  const T* x;
  __device__ Channel channel(int64) const { return Channel(); }
  __device__ static T finish(A sum, T, const Channel&) { return narrow<T>(sum); }
};

// That of what goes into the batch norm. means (2, channels): of the gradient, and of its product with x normalised.
template <class T>
struct NormalizedGradient {
  typedef Accumulator<T> A;
  struct Channel {
    A scale, mean, first, slope;
  };
  static const bool READS = true;
  const T* x;
  const A* weight;
  const A* mean;
  const A* inverse;
  const A* means;
  int64 channels;
  __device__ Channel channel(int64 c) const {
    return Channel{weight[c] * inverse[c], mean[c], means[c], inverse[c] * means[channels + c]};
  }
  __device__ static T finish(A sum, T x, const Channel& c) {
    return narrow<T>((sum - c.first - (widen(x) - c.mean) * c.slope) * c.scale);
  }
};

// --- max pooling, any window --------------------------------------------------------------------------------------------

template <class T, class Pool>
__device__ void max_pool_forward(const Pool& pool, uint8* small_indices, int* large_indices, const T* x,
                                 const PoolSizes& s) {
  GRID_STRIDE(i, s.n * s.c * s.oh * s.ow) {
    int64 image, c, oy, ox;
    s.coordinates(i, s.oh, s.ow, &image, &c, &oy, &ox);
    typename Pool::Channel channel = pool.channel(c);
    int64 top = oy * s.stride_h - s.padding_h, left = ox * s.stride_w - s.padding_w;
    int64 begin_h = top < 0 ? -top : 0, begin_w = left < 0 ? -left : 0;
    int64 end_h = s.h - top < s.kernel_h ? s.h - top : s.kernel_h;
    int64 end_w = s.w - left < s.kernel_w ? s.w - left : s.kernel_w;
    auto best = minus_infinity<Accumulator<T>>();
    int64 index = begin_h * s.kernel_w + begin_w;
    for (int64 ky = begin_h; ky < end_h; ++ky) {
      for (int64 kx = begin_w; kx < end_w; ++kx) {
        auto value = Pool::key(x[s.place(image, c, top + ky, left + kx, s.h, s.w)], channel);
        if (Pool::better(value, best)) {
          best = value;
          index = ky * s.kernel_w + kx;
        }
      }
    }
    T y, largest;
    bool some = Pool::finish(best, channel, &y, &largest);
    pool.y[i] = y;
    if (Pool::KEEPS) pool.largest[i] = largest;
    if (small_indices) {
      small_indices[i] = (uint8)(some ? index : NOTHING);
    } else {
      large_indices[i] = some ? (int)index : NOTHING_LARGE;
    }
  }
}

template <class T, class Gradient>
__device__ void max_pool_backward(const Gradient& gradient, T* dx, const T* dy, const uint8* small_indices,
                                  const int* large_indices, const PoolSizes& s) {
  GRID_STRIDE(i, s.n * s.c * s.h * s.w) {
    int64 image, c, y, x, first_h, last_h, first_w, last_w;
    s.coordinates(i, s.h, s.w, &image, &c, &y, &x);
    windows(y, s.kernel_h, s.stride_h, s.padding_h, s.oh, &first_h, &last_h);
    windows(x, s.kernel_w, s.stride_w, s.padding_w, s.ow, &first_w, &last_w);
    Accumulator<T> sum = 0;
    for (int64 oy = first_h; oy < last_h; ++oy) {
      for (int64 ox = first_w; ox < last_w; ++ox) {
        int64 window = s.place(image, c, oy, ox, s.oh, s.ow);
        int64 ky = y + s.padding_h - oy * s.stride_h, kx = x + s.padding_w - ox * s.stride_w;
        int64 index = small_indices ? small_indices[window] : large_indices[window];
        if (index == ky * s.kernel_w + kx) sum += widen(dy[window]);
      }
    }
    dx[i] = Gradient::finish(sum, Gradient::READS ? gradient.x[i] : narrow<T>(Accumulator<T>(0)), gradient.channel(c));
  }
}

// --- max pooling, 3 x 3 with stride 2 and padding 1 ---------------------------------------------------------------------

template <class T>
constexpr int LANES = sizeof(T) > 4 ? 2 : 4;
const int POOL_THREADS = 256;
// How many blocks a multiprocessor has at once, at least: by the registers for all vectors of an item in flight. With batch
// norm there are its vectors too.
template <class T>
constexpr int POOL_BLOCKS = sizeof(T) == 2 ? 4 : 2;
template <class T>
constexpr int NORMALIZED_BLOCKS = sizeof(T) == 2 ? 3 : 2;

template <class T, int N>
struct alignas(N * sizeof(T)) Lanes {
  T values[N];
  __device__ static Lanes load(const T* place) { return *(const Lanes*)place; }
  __device__ void store(T* place) const { *(Lanes*)place = *this; }
};

// How the threads of a block share the LANES of nhwc: each keeps its channels.
struct ChannelLanes {
  int lane, group, groups;
  __device__ ChannelLanes(int64 channels, int width) {
    int vectors = (int)channels / width;
    groups = blockDim.x / vectors;
    lane = threadIdx.x % vectors;
    group = threadIdx.x / vectors;
  }
  __device__ bool idle() const { return group >= groups; }
  __device__ int64 first() const { return (int64)blockIdx.x * groups + group; }
  __device__ int64 step() const { return (int64)gridDim.x * groups; }
};

// Goes through the items of images, rows and columns of them, from one backwards in even steps, with a division at the
// beginning only. Rows and columns fit into 31 bits.
struct Backwards {
  int64 image, images;
  int row, column, rows, columns, row_step, column_step;
  __device__ Backwards(int64 item, int64 step, int64 rows_, int64 columns_) : rows((int)rows_), columns((int)columns_) {
    int64 rest, line = divide(item, columns_, &rest);
    column = (int)rest;
    image = divide(line, rows_, &rest);
    row = (int)rest;
    line = divide(step, columns_, &rest);
    column_step = (int)rest;
    images = divide(line, rows_, &rest);
    row_step = (int)rest;
  }
  __device__ void next() {
    column -= column_step;
    row -= row_step;
    image -= images;
    if (column < 0) {
      column += columns;
      row -= 1;
    }
    if (row < 0) {
      row += rows;
      image -= 1;
    }
  }
};

// The sign of an element's value turned where a channel's is negative, for LANES of them together.
template <class T, int N>
struct Signs {
  static constexpr int WORDS = N * sizeof(T) / 4;
  uint32 words[WORDS];
  template <class Channel>
  __device__ explicit Signs(const Channel (&channels)[N]) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      int bit = 8 * sizeof(T) * (i + 1) - 1;
      if (channels[i].sign < 0) words[bit / 32] |= 1u << bit % 32;
    }
  }
  __device__ void turn(Lanes<T, N>& lanes) const {
    uint32 turned[WORDS];
    memcpy(turned, &lanes, sizeof(lanes));
#pragma unroll
    for (int i = 0; i < WORDS; ++i) turned[i] ^= words[i];
    memcpy(&lanes, turned, sizeof(lanes));
  }
};
template <class T, int N>
struct NoSigns {
  template <class Channel>
  __device__ explicit NoSigns(const Channel (&)[N]) {}
  __device__ void turn(Lanes<T, N>&) const {}
};

__device__ inline int64 clamp(int64 place, int64 size) { return place < 0 ? 0 : place < size ? place : size - 1; }

// The windows of output rows 2 * pair and 2 * pair + 1: places of the rows that they read, and what a row counts in an index.
// Rows and columns outside the image are read as their neighbours, which are in the window too.
struct WindowRows {
  int64 rows[5];
  int codes[2][3];
  __device__ WindowRows(int64 pair, int64 h) {
#pragma unroll
    for (int r = 0; r < 5; ++r) rows[r] = clamp(4 * pair - 1 + r, h);
#pragma unroll
    for (int window = 0; window < 2; ++window) {
#pragma unroll
      for (int ky = 0; ky < 3; ++ky) {
        codes[window][ky] = 3 * (int)(rows[2 * window + ky] - (4 * pair - 1 + 2 * window));
      }
    }
  }
};

template <class T, class Pool>
struct Best {
  Accumulator<T> value;
  int index;
  __device__ void add(Accumulator<T> other, int other_index, bool first) {
    if (first || Pool::better(other, value)) {
      value = other;
      index = other_index;
    }
  }
};

template <class T, class Pool>
__device__ void max_pool_3x3_nhwc(const Pool& pool, uint8* indices, const T* x, int64 n, int64 c, int64 h, int64 w,
                                  int64 oh, int64 ow) {
  const int L = LANES<T>;
  ChannelLanes lanes(c, L);
  if (lanes.idle()) return;
  int64 first_channel = (int64)lanes.lane * L;
  typename Pool::Channel channels[L];
#pragma unroll
  for (int i = 0; i < L; ++i) channels[i] = pool.channel(first_channel + i);
  typename Pool::template Turn<L> turn(channels);
  int64 pairs = (oh + 1) / 2, items = n * pairs * ow, line = w * c;
  if (lanes.first() >= items) return;
  for (Backwards at(items - 1 - lanes.first(), lanes.step(), pairs, ow); at.image >= 0; at.next()) {
    // Rows and columns outside the image are read as their neighbours, which are in the window too.
    bool has_left = at.column > 0, has_right = 2 * (int64)at.column + 1 < w;
    int64 left = has_left ? c : 0, right = has_right ? c : 0;
    int codes[3] = {has_left ? 0 : 1, 1, has_right ? 2 : 1};
    const T* from[5];
    int rows[5];  // counted from the first window's first
    from[1] = x + ((at.image * h + 4 * (int64)at.row) * w + 2 * (int64)at.column) * c + first_channel;
    rows[1] = 1;
    from[0] = at.row > 0 ? from[1] - line : from[1];
    rows[0] = at.row > 0 ? 0 : 1;
#pragma unroll
    for (int r = 2; r < 5; ++r) {
      bool inside = 4 * (int64)at.row - 1 + r < h;
      from[r] = inside ? from[r - 1] + line : from[r - 1];
      rows[r] = inside ? r : rows[r - 1];
    }
    Lanes<T, L> values[5][3];
#pragma unroll
    for (int r = 0; r < 5; ++r) {
      values[r][0] = Lanes<T, L>::load(from[r] - left);
      values[r][1] = Lanes<T, L>::load(from[r]);
      values[r][2] = Lanes<T, L>::load(from[r] + right);
    }
#pragma unroll
    for (int r = 0; r < 5; ++r) {
#pragma unroll
      for (int k = 0; k < 3; ++k) turn.turn(values[r][k]);
    }
    Best<T, Pool> best[2][L];
#pragma unroll
    for (int r = 0; r < 5; ++r) {
#pragma unroll
      for (int i = 0; i < L; ++i) {
        Best<T, Pool> row;
#pragma unroll
        for (int k = 0; k < 3; ++k) row.add(widen(values[r][k].values[i]), codes[k], k == 0);
        if (r < 3) best[0][i].add(row.value, 3 * rows[r] + row.index, r == 0);
        if (r >= 2) best[1][i].add(row.value, 3 * (rows[r] - 2) + row.index, r == 2);
      }
    }
    int64 first_place = ((at.image * oh + 2 * (int64)at.row) * ow + at.column) * c + first_channel;
#pragma unroll
    for (int window = 0; window < 2; ++window) {
      if (2 * (int64)at.row + window >= oh) break;
      Lanes<T, L> y, largest;
      Lanes<uint8, L> index;
#pragma unroll
      for (int i = 0; i < L; ++i) {
        bool some = Pool::finish(best[window][i].value, channels[i], &y.values[i], &largest.values[i]);
        index.values[i] = (uint8)(some ? best[window][i].index : NOTHING);
      }
      int64 place = first_place + window * ow * c;
      y.store(pool.y + place);
      if (Pool::KEEPS) largest.store(pool.largest + place);
      index.store(indices + place);
    }
  }
}

template <class T, class Pool>
__device__ void max_pool_3x3_nchw(const Pool& pool, uint8* indices, const T* x, int64 n, int64 c, int64 h, int64 w,
                                  int64 oh, int64 ow) {
  const int L = LANES<T>, O = L / 2;  // columns that are read, and windows
  int64 pairs = (oh + 1) / 2, vectors = w / L, items = n * c * pairs * vectors;
  GRID_STRIDE(item, items) {
    int64 vector, pair, channel_number;
    int64 plane_number = divide(divide(items - 1 - item, vectors, &vector), pairs, &pair);
    divide(plane_number, c, &channel_number);
    typename Pool::Channel channel = pool.channel(channel_number);
    WindowRows rows(pair, h);
    const T* plane = x + plane_number * h * w;
    int64 left = clamp(vector * L - 1, w);
    Lanes<T, L> values[5];
    T before[5];
#pragma unroll
    for (int r = 0; r < 5; ++r) {
      values[r] = Lanes<T, L>::load(plane + rows.rows[r] * w + vector * L);
      before[r] = plane[rows.rows[r] * w + left];
    }
    Best<T, Pool> best[2][O];
#pragma unroll
    for (int r = 0; r < 5; ++r) {
#pragma unroll
      for (int o = 0; o < O; ++o) {
        Best<T, Pool> row;
        T first = o == 0 ? before[r] : values[r].values[o == 0 ? 0 : 2 * o - 1];
        row.add(Pool::key(first, channel), o == 0 && vector == 0 ? 1 : 0, true);
        row.add(Pool::key(values[r].values[2 * o], channel), 1, false);
        row.add(Pool::key(values[r].values[2 * o + 1], channel), 2, false);
        if (r < 3) best[0][o].add(row.value, rows.codes[0][r < 3 ? r : 0] + row.index, r == 0);
        if (r >= 2) best[1][o].add(row.value, rows.codes[1][r < 2 ? 0 : r - 2] + row.index, r == 2);
      }
    }
#pragma unroll
    for (int window = 0; window < 2; ++window) {
      int64 oy = 2 * pair + window;
      if (oy >= oh) break;
      Lanes<T, O> y, largest;
      Lanes<uint8, O> index;
#pragma unroll
      for (int o = 0; o < O; ++o) {
        bool some = Pool::finish(best[window][o].value, channel, &y.values[o], &largest.values[o]);
        index.values[o] = (uint8)(some ? best[window][o].index : NOTHING);
      }
      int64 place = (plane_number * oh + oy) * ow + vector * O;
      y.store(pool.y + place);
      if (Pool::KEEPS) largest.store(pool.largest + place);
      index.store(indices + place);
    }
  }
}

// Where place (row, column) of a window lies in its index, when the window is there.
__device__ inline int code(bool there, int row, int column) { return there ? 3 * row + column : NOTHING - 1; }

// The gradient of a square of four places from the four windows that hold them, of which `right` and `below` may not be there;
// sums run over the windows by rows.
template <class A>
__device__ void square(A sums[2][2], const A dy[2][2], const int index[2][2], bool right, bool below) {
  A zero = 0;
  sums[0][0] = index[0][0] == 4 ? dy[0][0] : zero;
  sums[0][1] = index[0][0] == 5 ? dy[0][0] : zero;
  sums[0][1] += index[0][1] == code(right, 1, 0) ? dy[0][1] : zero;
  sums[1][0] = index[0][0] == 7 ? dy[0][0] : zero;
  sums[1][0] += index[1][0] == code(below, 0, 1) ? dy[1][0] : zero;
  sums[1][1] = index[0][0] == 8 ? dy[0][0] : zero;
  sums[1][1] += index[0][1] == code(right, 2, 0) ? dy[0][1] : zero;
  sums[1][1] += index[1][0] == code(below, 0, 2) ? dy[1][0] : zero;
  sums[1][1] += index[1][1] == code(right && below, 0, 0) ? dy[1][1] : zero;
}

template <class T, class Gradient>
__device__ void max_pool_3x3_backward_nhwc(const Gradient& gradient, T* dx, const T* dy, const uint8* indices, int64 n,
                                           int64 c, int64 h, int64 w, int64 oh, int64 ow) {
  typedef Accumulator<T> A;
  const int L = LANES<T>;
  ChannelLanes lanes(c, L);
  if (lanes.idle()) return;
  int64 first_channel = (int64)lanes.lane * L;
  typename Gradient::Channel channels[L];
#pragma unroll
  for (int i = 0; i < L; ++i) channels[i] = gradient.channel(first_channel + i);
  int64 items = n * oh * ow;
  if (lanes.first() >= items) return;
  for (Backwards at(items - 1 - lanes.first(), lanes.step(), oh, ow); at.image >= 0; at.next()) {
    bool right = at.column + 1 < ow, below = at.row + 1 < oh;
    bool inside_w = 2 * (int64)at.column + 1 < w, inside_h = 2 * (int64)at.row + 1 < h;
    Lanes<T, L> windows[2][2], values[2][2];
    Lanes<uint8, L> index[2][2];
    int64 window = ((at.image * oh + at.row) * ow + at.column) * c + first_channel;
    int64 corner = ((at.image * h + 2 * (int64)at.row) * w + 2 * (int64)at.column) * c + first_channel;
    int64 next_window = right ? c : 0, next_place = inside_w ? c : 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      int64 from = row && below ? window + ow * c : window;
      windows[row][0] = Lanes<T, L>::load(dy + from);
      windows[row][1] = Lanes<T, L>::load(dy + from + next_window);
      index[row][0] = Lanes<uint8, L>::load(indices + from);
      index[row][1] = Lanes<uint8, L>::load(indices + from + next_window);
      if (Gradient::READS) {
        int64 place = row && inside_h ? corner + w * c : corner;
        values[row][0] = Lanes<T, L>::load(gradient.x + place);
        values[row][1] = Lanes<T, L>::load(gradient.x + place + next_place);
      }
    }
    Lanes<T, L> results[2][2];
#pragma unroll
    for (int i = 0; i < L; ++i) {
      A sums[2][2], gradients[2][2];
      int places[2][2];
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        gradients[at / 2][at % 2] = widen(windows[at / 2][at % 2].values[i]);
        places[at / 2][at % 2] = index[at / 2][at % 2].values[i];
      }
      square(sums, gradients, places, right, below);
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        results[at / 2][at % 2].values[i] =
            Gradient::finish(sums[at / 2][at % 2], values[at / 2][at % 2].values[i], channels[i]);
      }
    }
    results[0][0].store(dx + corner);
    if (inside_w) results[0][1].store(dx + corner + c);
    if (inside_h) results[1][0].store(dx + corner + w * c);
    if (inside_w && inside_h) results[1][1].store(dx + corner + (w + 1) * c);
  }
}

template <class T, class Gradient>
__device__ void max_pool_3x3_backward_nchw(const Gradient& gradient, T* dx, const T* dy, const uint8* indices, int64 n,
                                           int64 c, int64 h, int64 w, int64 oh, int64 ow) {
  typedef Accumulator<T> A;
  const int L = LANES<T>, O = L / 2;
  int64 vectors = w / L, items = n * c * oh * vectors;
  GRID_STRIDE(item, items) {
    int64 vector, oy, channel_number;
    int64 plane = divide(divide(items - 1 - item, vectors, &vector), oh, &oy);
    divide(plane, c, &channel_number);
    typename Gradient::Channel channel = gradient.channel(channel_number);
    bool right = (vector + 1) * O < ow, below = oy + 1 < oh, inside_h = 2 * oy + 1 < h;
    A windows[2][O + 1];
    int index[2][O + 1];
    Lanes<T, L> values[2];
    int64 corner = (plane * h + 2 * oy) * w + vector * L;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      int64 window = (plane * oh + oy + (row && below)) * ow + vector * O;
      Lanes<T, O> own = Lanes<T, O>::load(dy + window);
      Lanes<uint8, O> own_index = Lanes<uint8, O>::load(indices + window);
#pragma unroll
      for (int o = 0; o < O; ++o) {
        windows[row][o] = widen(own.values[o]);
        index[row][o] = own_index.values[o];
      }
      windows[row][O] = widen(dy[window + (right ? O : 0)]);
      index[row][O] = indices[window + (right ? O : 0)];
      if (Gradient::READS) values[row] = Lanes<T, L>::load(gradient.x + corner + (row && inside_h) * w);
    }
    Lanes<T, L> results[2];
#pragma unroll
    for (int o = 0; o < O; ++o) {
      A sums[2][2];
      A gradients[2][2] = {{windows[0][o], windows[0][o + 1]}, {windows[1][o], windows[1][o + 1]}};
      int places[2][2] = {{index[0][o], index[0][o + 1]}, {index[1][o], index[1][o + 1]}};
      square(sums, gradients, places, o + 1 < O || right, below);
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        results[at / 2].values[2 * o + at % 2] =
            Gradient::finish(sums[at / 2][at % 2], values[at / 2].values[2 * o + at % 2], channel);
      }
    }
    results[0].store(dx + corner);
    if (inside_h) results[1].store(dx + corner + w);
  }
}

// --- the batch norm's sums from the windows -----------------------------------------------------------------------------

const int WINDOW_THREADS = 512;
template <bool NHWC>
constexpr int WINDOW_BLOCKS = NHWC ? 1 : 2;

// The first pass of the backward pass, over the windows: dz = dy + dy_2, rounded, which both are null or neither. The sums of
// the gradient where the largest is above zero, and of that times (largest - mean), make dweight, dbias and means; count: of
// the image's elements of a channel. Grid, partial, ticket: as batch_norm.cuh has them, with blocks of WINDOW_THREADS.
template <class T, int V, bool NHWC, int U, int THREADS>
__device__ void window_sums(T* dz, Accumulator<T>* partial, uint32* ticket, const GradientOut<Accumulator<T>>& out,
                            const T* dy, const T* dy_2, const Normalized<T>& pool, int64 count, int64 outer,
                            int64 channels, int64 inner, int lanes) {
  typedef Accumulator<T> A;
  const int OWN = NHWC ? V : 1;
  Walk<V, NHWC, U, THREADS> walk(outer, channels, inner, lanes, gridDim.y);
  out.prefetch(ticket, walk);
  A sum[2][OWN];
#pragma unroll
  for (int c = 0; c < OWN; ++c) sum[0][c] = sum[1][c] = A(0);
  if (walk.active()) {
    typename Normalized<T>::Channel own[OWN];
#pragma unroll
    for (int c = 0; c < OWN; ++c) own[c] = pool.channel(walk.channel + c);
    for (int64 row = blockIdx.y; row * walk.step < walk.count; row += U * (int64)gridDim.y) {
      int64 offset[U];
      int n = walk.seek(row, offset);
      Pack<T, V> largest[U], gradient[U], second[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u >= n) break;
        largest[u] = load_pack<T, V>(pool.largest + offset[u]);
        gradient[u] = load_pack<T, V>(dy + offset[u]);
        if (dy_2) second[u] = load_pack<T, V>(dy_2 + offset[u]);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u >= n) break;
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const typename Normalized<T>::Channel& channel = own[NHWC ? i : 0];
          if (dy_2) gradient[u].e[i] = narrow<T>(widen(gradient[u].e[i]) + widen(second[u].e[i]));
          A x = widen(largest[u].e[i]);
          A value = channel.normalized(x) <= A(0) ? A(0) : widen(gradient[u].e[i]);
          sum[0][NHWC ? i : 0] += value;
          sum[1][NHWC ? i : 0] += value * (x - channel.mean);
        }
        if (dy_2) store_pack<T, V>(dz + offset[u], gradient[u]);
      }
    }
  }
  reduce_sums<A, 2>(partial, sum, walk, lanes);
  if (!is_last_block(ticket + blockIdx.x, gridDim.y)) return;
  A total[2];
  combine_sums<A, 2>(total, partial, walk);
  int64 channel = (int64)blockIdx.x * walk.slots + threadIdx.x;
  if (threadIdx.x < walk.slots && channel < channels) out.write(total[0], total[1], channel, channels, count);
}

// Padding counts as zeros.
template <class T>
__device__ void avg_pool_forward(T* y, const T* x, const PoolSizes& s) {
  GRID_STRIDE(i, s.n * s.c * s.oh * s.ow) {
    int64 image, channel, oy, ox;
    s.coordinates(i, s.oh, s.ow, &image, &channel, &oy, &ox);
    int64 top = oy * s.stride_h - s.padding_h, left = ox * s.stride_w - s.padding_w;
    Accumulator<T> sum = 0;
    for (int64 ky = top < 0 ? -top : 0; ky < s.kernel_h && top + ky < s.h; ++ky) {
      for (int64 kx = left < 0 ? -left : 0; kx < s.kernel_w && left + kx < s.w; ++kx) {
        sum += widen(x[s.place(image, channel, top + ky, left + kx, s.h, s.w)]);
      }
    }
    y[i] = narrow<T>(sum / Accumulator<T>(s.kernel_h * s.kernel_w));
  }
}

template <class T>
__device__ void avg_pool_backward(T* dx, const T* dy, const PoolSizes& s) {
  GRID_STRIDE(i, s.n * s.c * s.h * s.w) {
    int64 image, channel, y, x, first_h, last_h, first_w, last_w;
    s.coordinates(i, s.h, s.w, &image, &channel, &y, &x);
    windows(y, s.kernel_h, s.stride_h, s.padding_h, s.oh, &first_h, &last_h);
    windows(x, s.kernel_w, s.stride_w, s.padding_w, s.ow, &first_w, &last_w);
    Accumulator<T> sum = 0;
    for (int64 oy = first_h; oy < last_h; ++oy) {
      for (int64 ox = first_w; ox < last_w; ++ox) sum += widen(dy[s.place(image, channel, oy, ox, s.oh, s.ow)]);
    }
    dx[i] = narrow<T>(sum / Accumulator<T>(s.kernel_h * s.kernel_w));
  }
}

// y (n, c) = the mean over space. nchw: a warp an element, block a multiple of 32; nhwc: grid-stride.
template <class T>
__device__ void global_avg_pool_nchw(T* y, const T* x, int64 n, int64 c, int64 space) {
  int64 row = ((int64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= n * c) return;  // the whole warp
  Accumulator<T> sum = 0;
  for (int64 i = threadIdx.x % 32; i < space; i += 32) sum += widen(x[row * space + i]);
  for (int width = 16; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width);
  if (threadIdx.x % 32 == 0) y[row] = narrow<T>(sum / Accumulator<T>(space));
}

// A block of (32, POOL_ROWS) threads has 32 * L channels of an image: each row of threads a part of the places. A grid of
// n * channel blocks; c is a multiple of L and, of L above 1, arrays are aligned.
const int POOL_ROWS = 8;

template <int L>
__device__ inline bool image_channels(int64 c, int64* image, int64* channel) {
  int64 block;
  *image = divide(blockIdx.x, (c + 32 * L - 1) / (32 * L), &block);
  *channel = (block * 32 + threadIdx.x) * L;
  return *channel < c;
}

template <class T, int L>
__device__ void global_avg_pool_nhwc(T* y, const T* x, int64 c, int64 space) {
  typedef Accumulator<T> A;
  __shared__ A shared[POOL_ROWS][32][L];
  int64 image, channel;
  bool any = image_channels<L>(c, &image, &channel);
  A sums[L];
#pragma unroll
  for (int i = 0; i < L; ++i) sums[i] = 0;
  if (any) {
#pragma unroll 4
    for (int64 place = threadIdx.y; place < space; place += POOL_ROWS) {
      Lanes<T, L> values = Lanes<T, L>::load(x + (image * space + place) * c + channel);
#pragma unroll
      for (int i = 0; i < L; ++i) sums[i] += widen(values.values[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < L; ++i) shared[threadIdx.y][threadIdx.x][i] = sums[i];
  __syncthreads();
  if (threadIdx.y != 0 || !any) return;
  Lanes<T, L> means;
#pragma unroll
  for (int i = 0; i < L; ++i) {
    A sum = 0;
#pragma unroll
    for (int row = 0; row < POOL_ROWS; ++row) sum += shared[row][threadIdx.x][i];
    means.values[i] = narrow<T>(sum / A(space));
  }
  means.store(y + image * c + channel);
}

template <class T, int L>
__device__ void global_avg_pool_backward_nhwc(T* dx, const T* dy, int64 c, int64 space) {
  int64 image, channel;
  if (!image_channels<L>(c, &image, &channel)) return;
  Lanes<T, L> values = Lanes<T, L>::load(dy + image * c + channel);
#pragma unroll
  for (int i = 0; i < L; ++i) values.values[i] = narrow<T>(widen(values.values[i]) / Accumulator<T>(space));
  for (int64 place = threadIdx.y; place < space; place += POOL_ROWS) {
    values.store(dx + (image * space + place) * c + channel);
  }
}

// A warp a row of dx, (rows, space); block a multiple of 32.
template <class T>
__device__ void global_avg_pool_backward_nchw(T* dx, const T* dy, int64 rows, int64 space) {
  int64 row = ((int64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= rows) return;
  T value = narrow<T>(widen(dy[row]) / Accumulator<T>(space));
  for (int64 i = threadIdx.x % 32; i < space; i += 32) dx[row * space + i] = value;
}

// --- instances ----------------------------------------------------------------------------------------------------------

#define SIZES                                                                                                       \
  int64 n, int64 c, int64 h, int64 w, int64 oh, int64 ow, int64 kernel_h, int64 kernel_w, int64 stride_h,           \
      int64 stride_w, int64 padding_h, int64 padding_w, int nhwc
#define SIZE_VALUES \
  PoolSizes { n, c, h, w, oh, ow, kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, nhwc }
#define IMAGE int64 n, int64 c, int64 h, int64 w, int64 oh, int64 ow
#define VECTORS(A) const A *weight, const A *bias, const A *mean, const A *inverse
#define GRADIENT_VECTORS(A) const A *weight, const A *mean, const A *inverse, const A *means
#define ENTRY extern "C" __global__ void
#define FAST_ENTRY(T) ENTRY __launch_bounds__(POOL_THREADS, POOL_BLOCKS<T>)
#define NORMALIZED_ENTRY(T) ENTRY __launch_bounds__(POOL_THREADS, NORMALIZED_BLOCKS<T>)
#define NORMALIZED(T) Normalized<T>{y, largest, weight, bias, mean, inverse}
#define GRADIENT(T) NormalizedGradient<T>{x, weight, mean, inverse, means, c}

// Any window.
#define PART_1(name, T)                                                                                                \
  ENTRY max_pool_forward_##name(T* y, uint8* small_indices, int* large_indices, const T* x, SIZES) {                  \
    max_pool_forward<T>(Plain<T>{y, nullptr}, small_indices, large_indices, x, SIZE_VALUES);                           \
  }                                                                                                                    \
  ENTRY max_pool_backward_##name(T* dx, const T* dy, const uint8* small_indices, const int* large_indices, SIZES) {   \
    max_pool_backward<T>(PlainGradient<T>{nullptr}, dx, dy, small_indices, large_indices, SIZE_VALUES);                \
  }                                                                                                                    \
  ENTRY avg_pool_forward_##name(T* y, const T* x, SIZES) { avg_pool_forward<T>(y, x, SIZE_VALUES); }                  \
  ENTRY avg_pool_backward_##name(T* dx, const T* dy, SIZES) { avg_pool_backward<T>(dx, dy, SIZE_VALUES); }            \
  ENTRY normalized_max_pool_forward_##name(T* y, T* largest, uint8* small_indices, int* large_indices, const T* x,    \
                                            VECTORS(Accumulator<T>), SIZES) {                                          \
    max_pool_forward<T>(NORMALIZED(T), small_indices, large_indices, x, SIZE_VALUES);                                  \
  }                                                                                                                    \
  ENTRY normalized_max_pool_backward_##name(T* dx, const T* dy, const uint8* small_indices, const int* large_indices, \
                                             const T* x, GRADIENT_VECTORS(Accumulator<T>), SIZES) {                    \
    max_pool_backward<T>(GRADIENT(T), dx, dy, small_indices, large_indices, SIZE_VALUES);                              \
  }

// The windows of 3 x 3.
#define PART_2(name, T) PLAIN_INSTANCES(name, T, nhwc) PLAIN_INSTANCES(name, T, nchw)
#define PLAIN_INSTANCES(name, T, layout)                                                               \
  FAST_ENTRY(T) max_pool_3x3_forward_##layout##_##name(T* y, uint8* indices, const T* x, IMAGE) {     \
    max_pool_3x3_##layout<T>(Plain<T>{y, nullptr}, indices, x, n, c, h, w, oh, ow);                    \
  }                                                                                                    \
  FAST_ENTRY(T)                                                                                       \
  max_pool_3x3_backward_##layout##_##name(T* dx, const T* dy, const uint8* indices, IMAGE) {           \
    max_pool_3x3_backward_##layout<T>(PlainGradient<T>{nullptr}, dx, dy, indices, n, c, h, w, oh, ow); \
  }

// The windows of 3 x 3 with batch norm.
#define PART_3(name, T)                                                                                                \
  NORMALIZED_INSTANCES(name, T, nhwc)                                                                                  \
  NORMALIZED_INSTANCES(name, T, nchw)
#define NORMALIZED_INSTANCES(name, T, layout)                                                                    \
  NORMALIZED_ENTRY(T)                                                                                            \
  normalized_max_pool_3x3_forward_##layout##_##name(T* y, T* largest, uint8* indices, const T* x,                \
                                                    VECTORS(Accumulator<T>), IMAGE) {                            \
    max_pool_3x3_##layout<T>(NORMALIZED(T), indices, x, n, c, h, w, oh, ow);                                     \
  }                                                                                                              \
  NORMALIZED_ENTRY(T)                                                                                            \
  normalized_max_pool_3x3_backward_##layout##_##name(T* dx, const T* dy, const uint8* indices, const T* x,       \
                                                     GRADIENT_VECTORS(Accumulator<T>), IMAGE) {                  \
    max_pool_3x3_backward_##layout<T>(GRADIENT(T), dx, dy, indices, n, c, h, w, oh, ow);                         \
  }

// The sums from the windows, by vectors and by single elements.
#define PART_5(name, T)                                               \
  SUMS_INSTANCE(vector_nhwc_##name, T, true, 16 / sizeof(T), 2)       \
  SUMS_INSTANCE(vector_nchw_##name, T, false, 16 / sizeof(T), 2)
#define PART_6(name, T)                              \
  SUMS_INSTANCE(scalar_nhwc_##name, T, true, 1, 4)   \
  SUMS_INSTANCE(scalar_nchw_##name, T, false, 1, 4)
#define SUMS_INSTANCE(name, T, NHWC, V, U)                                                                             \
  ENTRY __launch_bounds__(WINDOW_THREADS, WINDOW_BLOCKS<NHWC>) window_sums_##name(                                     \
      T* dz, Accumulator<T>* partial, uint32* ticket, Accumulator<T>* dweight, Accumulator<T>* dbias,                  \
      Accumulator<T>* means, int accumulate, const T* dy, const T* dy_2, T* largest, VECTORS(Accumulator<T>),          \
      int64 count, int64 outer, int64 channels, int64 inner, int lanes) {                                              \
    window_sums<T, V, NHWC, U, WINDOW_THREADS>(                                                                        \
        dz, partial, ticket, {dweight, dbias, means, inverse, accumulate}, dy, dy_2,                                   \
        Normalized<T>{nullptr, largest, weight, bias, mean, inverse}, count, outer, channels, inner, lanes);           \
  }

// The mean over space.
#define PART_4(name, T)                                                                              \
  ENTRY global_avg_pool_nchw_##name(T* y, const T* x, int64 n, int64 c, int64 space) {              \
    global_avg_pool_nchw<T>(y, x, n, c, space);                                                      \
  }                                                                                                  \
  ENTRY global_avg_pool_backward_nchw_##name(T* dx, const T* dy, int64 n, int64 c, int64 space) {   \
    global_avg_pool_backward_nchw<T>(dx, dy, n* c, space);                                           \
  }                                                                                                  \
  GLOBAL_INSTANCES(nhwc, name, T, 1, 1)                                                              \
  GLOBAL_INSTANCES(lanes, name, T, LANES<T>, 16 / sizeof(T))
#define GLOBAL_INSTANCES(kind, name, T, L, BACKWARD_L)                                                 \
  ENTRY global_avg_pool_##kind##_##name(T* y, const T* x, int64 n, int64 c, int64 space) {             \
    global_avg_pool_nhwc<T, L>(y, x, c, space);                                                        \
  }                                                                                                    \
  ENTRY global_avg_pool_backward_##kind##_##name(T* dx, const T* dy, int64 n, int64 c, int64 space) {  \
    global_avg_pool_backward_nhwc<T, BACKWARD_L>(dx, dy, c, space);                                    \
  }

#define TYPE_f32 float
#define TYPE_f64 double
#define TYPE_f16 __half
#define TYPE_bf16 __nv_bfloat16
#define JOINED(part, kind) PART_##part(kind, TYPE_##kind)
#define EXPANDED(part, kind) JOINED(part, kind)

#ifdef POOL_PART
EXPANDED(POOL_PART, POOL_KIND)
#else
#define FOR_FAST_TYPES(X) X(f32, float) X(f16, __half) X(bf16, __nv_bfloat16)
FOR_FLOAT_TYPES(PART_1)
FOR_FAST_TYPES(PART_2)
FOR_FAST_TYPES(PART_3)
FOR_FLOAT_TYPES(PART_4)
FOR_FLOAT_TYPES(PART_5)
FOR_FLOAT_TYPES(PART_6)
#endif
