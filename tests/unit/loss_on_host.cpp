// The kernels of kernels/loss.cu on a processor. See kernels_on_host.h.

#include <cmath>

using std::exp;
using std::log;

#define KERNEL_FILE "loss.cu"
#define OF_KIND(name) \
  KERNEL(cross_entropy_forward_##name) KERNEL(cross_entropy_backward_##name) KERNEL(top1_count_##name)
#define KERNELS OF_KIND(f32) OF_KIND(f64) OF_KIND(f16) OF_KIND(bf16)

#include "kernels_on_host.h"
