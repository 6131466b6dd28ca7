// The kernels of kernels/finite.cu on a processor. See kernels_on_host.h.

#define KERNEL_FILE "finite.cu"
#define OF_FORMAT(name) KERNEL(find_invalid_##name) KERNEL(find_invalid_sums_##name)
#define KERNELS                                                                                              \
  OF_FORMAT(f16) OF_FORMAT(bf16) OF_FORMAT(f32) OF_FORMAT(f64) KERNEL(finish_invalid) KERNEL(find_invalid_list) \
      KERNEL(join_flags)

#include "kernels_on_host.h"
