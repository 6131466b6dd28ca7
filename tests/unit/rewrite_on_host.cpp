// The kernels of kernels/rewrite.cu on a processor. See kernels_on_host.h.

#define KERNEL_FILE "rewrite.cu"
#define GATHER_KERNELS(T) \
  KERNEL(gather_rows_##T) KERNEL(gather_channels_##T) KERNEL(gather_wide_##T) KERNEL(gather_lines_##T) \
      KERNEL(gather_planes_##T)
#define SCATTER_KERNELS(T) KERNEL(scatter_rows_##T) KERNEL(scatter_channels_##T) KERNEL(transpose_##T)
#define KERNELS                                                                                         \
  GATHER_KERNELS(bytes2) GATHER_KERNELS(bytes4) GATHER_KERNELS(bytes8) SCATTER_KERNELS(f32)             \
      SCATTER_KERNELS(f64) SCATTER_KERNELS(f16) SCATTER_KERNELS(bf16) KERNEL(transpose_pairs_f16)       \
          KERNEL(transpose_pairs_bf16) KERNEL(gather_quads_bytes2)

#include "kernels_on_host.h"
