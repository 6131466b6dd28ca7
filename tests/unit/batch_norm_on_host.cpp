// The kernels of kernels/batch_norm.cu on a processor, of all types, orders and widths. See kernels_on_host.h.

#include <cmath>

#define KERNEL_FILE "batch_norm.cu"
#define EACH_KIND(X, width, order) \
  X(width, order, f32) X(width, order, f64) X(width, order, f16) X(width, order, bf16)
#define EACH(X) \
  EACH_KIND(X, vector, nhwc) EACH_KIND(X, vector, nchw) EACH_KIND(X, scalar, nhwc) EACH_KIND(X, scalar, nchw)
#define INSTANCES EACH(NORM_KERNELS)
#define KERNELS_OF(width, order, kind)                                                                         \
  KERNEL(batch_norm_statistics_##width##_##order##_##kind) KERNEL(batch_norm_apply_##width##_##order##_##kind) \
      KERNEL(batch_norm_apply_raw_##width##_##order##_##kind)                                                  \
          KERNEL(batch_norm_apply_normalised_##width##_##order##_##kind)                                       \
              KERNEL(batch_norm_sums_##width##_##order##_##kind)                                               \
                  KERNEL(batch_norm_sums_raw_##width##_##order##_##kind)                                       \
                      KERNEL(batch_norm_sums_normalised_##width##_##order##_##kind)                            \
                          KERNEL(batch_norm_backward_##width##_##order##_##kind)                               \
                              KERNEL(batch_norm_backward_normalised_##width##_##order##_##kind)
#define KERNELS EACH(KERNELS_OF) KERNEL(batch_norm_inverse_f32) KERNEL(batch_norm_inverse_f64)

#include "kernels_on_host.h"
