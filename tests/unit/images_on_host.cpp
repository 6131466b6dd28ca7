// The kernels of kernels/images.cu on a processor. See kernels_on_host.h.

#define KERNEL_FILE "images.cu"
#define KERNELS KERNEL(gather_bytes)

#include "kernels_on_host.h"
