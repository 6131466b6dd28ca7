// The kernels of kernels/optimizer.cu on a processor. See kernels_on_host.h.

#include <cmath>

#define KERNEL_FILE "optimizer.cu"
#define KERNELS_OF(name) KERNEL(sgd_update_##name) KERNEL(adam_update_##name)
#define KERNELS                                                                                            \
  KERNELS_OF(f32) KERNELS_OF(f64) KERNELS_OF(f16) KERNELS_OF(bf16) KERNEL(advance_steps) KERNEL(clip_factor) \
  KERNEL(commit_statistics_bytes4) KERNEL(commit_statistics_bytes8) KERNEL(scaler_update)

#include "kernels_on_host.h"
