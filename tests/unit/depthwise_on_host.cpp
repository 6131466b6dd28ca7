// The kernels of kernels/depthwise.cu on a processor: the general ones, and for each filter and stride the others, named
// by kind, types, filter, stride and rows. See kernels_on_host.h.

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

#define __shared__
#define KERNEL_FILE "depthwise.cu"

#define OF_FILTER(types, T, O, F)                                          \
  CORRELATE_KERNEL(forward_##types##_##F##_1_7, F, 1, 7, false, T, O)      \
  CORRELATE_KERNEL(forward_##types##_##F##_1_4, F, 1, 4, false, T, O)      \
  CORRELATE_KERNEL(forward_##types##_##F##_2_7, F, 2, 7, false, T, O)      \
  CORRELATE_KERNEL(forward_##types##_##F##_2_4, F, 2, 4, false, T, O)      \
  CORRELATE_KERNEL(backward_data_##types##_##F##_1_7, F, 1, 7, true, T, O) \
  CORRELATE_KERNEL(backward_data_##types##_##F##_1_4, F, 1, 4, true, T, O) \
  SPREAD_KERNEL(backward_data_##types##_##F##_2_4, F, 4, T, O)             \
  SPREAD_KERNEL(backward_data_##types##_##F##_2_2, F, 2, T, O)             \
  FILTER_KERNEL(backward_filter_##types##_##F##_1_7, F, 1, 7, T)           \
  FILTER_KERNEL(backward_filter_##types##_##F##_1_4, F, 1, 4, T)           \
  FILTER_KERNEL(backward_filter_##types##_##F##_2_7, F, 2, 7, T)           \
  FILTER_KERNEL(backward_filter_##types##_##F##_2_4, F, 2, 4, T)
#define OF_TYPES(types, T, O) OF_FILTER(types, T, O, 3) OF_FILTER(types, T, O, 5) OF_FILTER(types, T, O, 7)
#define INSTANCES                                                                    \
  OF_TYPES(float_float, float, float) OF_FILTER(__half___half, __half, __half, 5)    \
  OF_FILTER(__nv_bfloat16_float, __nv_bfloat16, float, 3)

#define NAMES_OF_ROWS(kind, types, F) \
  KERNEL(kind##_##types##_##F##_1_7) KERNEL(kind##_##types##_##F##_1_4) KERNEL(kind##_##types##_##F##_2_4)
#define NAMES_OF_FILTER(types, F)                                                                          \
  NAMES_OF_ROWS(forward, types, F) NAMES_OF_ROWS(backward_data, types, F)                                  \
  NAMES_OF_ROWS(backward_filter, types, F) KERNEL(forward_##types##_##F##_2_7)                             \
  KERNEL(backward_data_##types##_##F##_2_2) KERNEL(backward_filter_##types##_##F##_2_7)
#define NAMES_OF_GENERAL(types) KERNEL(general_forward_##types) KERNEL(general_data_##types)
#define KERNELS                                                                                            \
  NAMES_OF_FILTER(float_float, 3) NAMES_OF_FILTER(float_float, 5) NAMES_OF_FILTER(float_float, 7)          \
  NAMES_OF_FILTER(__half___half, 5) NAMES_OF_FILTER(__nv_bfloat16_float, 3) NAMES_OF_GENERAL(f32)          \
  NAMES_OF_GENERAL(f16) NAMES_OF_GENERAL(bf16) NAMES_OF_GENERAL(f16_f32) NAMES_OF_GENERAL(bf16_f32)        \
  KERNEL(general_filter_f32) KERNEL(general_filter_f16) KERNEL(general_filter_bf16)                        \
  KERNEL(sum_partials_f32) KERNEL(sum_partials_f16) KERNEL(sum_partials_bf16)

#include "kernels_on_host.h"

// all that a block may have
float4 shared_vectors[3072 + 64];
extern "C" void* shared_memory() { return shared_vectors; }
