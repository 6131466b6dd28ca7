// The kernels of kernels/augment.cu on a processor: see kernels_on_host.h.

#include <cmath>
#include <cstdint>

struct alignas(8) uint2 {
  unsigned x, y;
};

static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  uint64_t bytes = (uint64_t)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(bytes >> (8 * (selector >> (4 * i) & 7u)) & 255u) << (8 * i);
  return result;
}
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31u));
}
static float __uint_as_float(unsigned value);
static void __syncwarp();

#define KERNEL_FILE "augment.cu"
#define OF_TYPE(suffix)                                                                                    \
  KERNEL(augment_##suffix##_1) KERNEL(augment_##suffix##_3) KERNEL(augment_##suffix##_4)                   \
  KERNEL(augment_jitter_##suffix##_1) KERNEL(augment_jitter_##suffix##_3)
#define KERNELS OF_TYPE(f32) OF_TYPE(f16) OF_TYPE(bf16) KERNEL(augment_means_1) KERNEL(augment_means_3)

#include "kernels_on_host.h"

static float __uint_as_float(unsigned value) { return as<float>(value); }
static void __syncwarp() { warp_groups[running / 32].wait(); }
