// The kernels of kernels/pooling.cu on a processor. See kernels_on_host.h.

#include <cmath>

#define KERNEL_FILE "pooling.cu"
#define OF_LAYOUT(name)                                                                             \
  KERNEL(window_sums_vector_##name) KERNEL(window_sums_scalar_##name) KERNEL(global_avg_pool_##name) \
  KERNEL(global_avg_pool_backward_##name)
#define FAST(name)                                                         \
  KERNEL(max_pool_3x3_forward_##name) KERNEL(max_pool_3x3_backward_##name) \
  KERNEL(normalized_max_pool_3x3_forward_##name) KERNEL(normalized_max_pool_3x3_backward_##name)
#define OF_KIND(name)                                                                                     \
  KERNEL(max_pool_forward_##name) KERNEL(max_pool_backward_##name) KERNEL(avg_pool_forward_##name)         \
  KERNEL(avg_pool_backward_##name) KERNEL(normalized_max_pool_forward_##name)                             \
  KERNEL(normalized_max_pool_backward_##name) KERNEL(global_avg_pool_lanes_##name)                        \
  KERNEL(global_avg_pool_backward_lanes_##name) OF_LAYOUT(nhwc_##name) OF_LAYOUT(nchw_##name)
#define KERNELS                                                                                           \
  OF_KIND(f32) OF_KIND(f64) OF_KIND(f16) OF_KIND(bf16) FAST(nhwc_f32) FAST(nchw_f32) FAST(nhwc_f16)        \
  FAST(nchw_f16) FAST(nhwc_bf16) FAST(nchw_bf16)

#include "kernels_on_host.h"
