// Runs the kernels of a file of kernels/ on a processor: a fiber a thread, a block after the other. A barrier goes on with
// the next fiber until all threads of the block, or of the warp, have reached it; threads that have ended do not count.
// Conversions of 16-bit types round to nearest even. Include folders: kernels/, and one with an empty cuda_fp16.h and
// cuda_bf16.h.
//
// Whoever includes this first defines KERNEL_FILE, KERNELS, a list of KERNEL(name), and perhaps INSTANCES of templates.
// Arrays in shared memory are static. For a file whose shared memory is an extern array, define __shared__ as nothing.

#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#ifndef __shared__
#define __shared__ static
#endif
#define __launch_bounds__(...)

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> ended;
static int running;

// Those who wait for each other: a block, or a warp.
struct Group {
  int members, arrived, generation;
  void release_if_complete() {
    if (arrived == 0 || arrived < members) return;
    arrived = 0;
    ++generation;
  }
  void wait() {
    int mine = generation;
    ++arrived;
    release_if_complete();
    while (generation == mine) swapcontext(&fibers[running], &scheduler);
  }
  void leave() {
    --members;
    release_if_complete();
  }
};
static Group block_group;
static std::vector<Group> warp_groups;
static std::vector<std::vector<char>> exchanged;
static void __syncthreads() { block_group.wait(); }

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct uint4 {
  unsigned x, y, z, w;
};

template <class To, class From>
static To as(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "same size");
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static float __bfloat162float(__nv_bfloat16 value) { return as<float>((uint32_t)value.bits << 16); }
static __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t word = as<uint32_t>(value);
  if ((word & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {(uint16_t)((word + 0x7fffu + ((word >> 16) & 1u)) >> 16)};
}
static float __half2float(__half value) {
  uint32_t sign = (value.bits & 0x8000u) << 16, exponent = (value.bits >> 10) & 31u, mantissa = value.bits & 1023u;
  if (exponent == 31) return as<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) return as<float>(sign | as<uint32_t>((float)mantissa * 5.9604644775390625e-08f));
  return as<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}
static __half __float2half_rn(float value) {
  uint32_t word = as<uint32_t>(value);
  uint16_t sign = (word >> 16) & 0x8000u;
  word &= 0x7fffffffu;
  if (word > 0x7f800000u) return {0x7fff};
  if (word >= 0x477ff000u) return {(uint16_t)(sign | 0x7c00u)};
  // below the smallest normal number the addition rounds where the last bit is
  if (word < 0x38800000u) return {(uint16_t)(sign | (as<uint32_t>(as<float>(word) + 0.5f) - 0x3f000000u))};
  return {(uint16_t)(sign | ((word + 0xfffu + ((word >> 13) & 1u) - 0x38000000u) >> 13))};
}

// what common.cuh names and these kernels do not call
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static __half __double2half(double value) { return __float2half_rn((float)value); }
static __nv_bfloat16 __double2bfloat16(double value) { return __float2bfloat16_rn((float)value); }
static unsigned __float_as_uint(float value) { return as<uint32_t>(value); }
static long long __double_as_longlong(double value) { return as<long long>(value); }
static float __int_as_float(int value) { return as<float>(value); }
static double __longlong_as_double(long long value) { return as<double>(value); }
static int __ffs(int value) { return __builtin_ffs(value); }
static unsigned __umulhi(unsigned a, unsigned b) { return ((uint64_t)a * b) >> 32; }

// What the threads of a warp, all 32 of them, tell each other.
template <class T>
static T from_lane(T value, int lane) {
  Group& warp = warp_groups[running / 32];
  exchanged[running].assign((char*)&value, (char*)&value + sizeof(T));
  warp.wait();
  // Modulo the warp's width, as the hardware has it.
  std::memcpy(&value, exchanged[running / 32 * 32 + (lane & 31)].data(), sizeof(T));
  warp.wait();
  return value;
}
template <class T>
static T __shfl_down_sync(unsigned, T value, int distance) {
  int lane = running % 32;
  return from_lane(value, lane + distance < 32 ? lane + distance : lane);
}
template <class T>
static T __shfl_sync(unsigned, T value, int lane) {
  return from_lane(value, lane);
}
static int __any_sync(unsigned, int value) {
  int any = 0;
  for (int lane = 0; lane < 32; ++lane) any |= from_lane(value, lane);
  return any != 0;
}
static int __syncthreads_or(int value) {
  static int votes[2], round_of_votes;
  int round = round_of_votes;
  if (value) votes[round] = 1;
  __syncthreads();
  int any = votes[round];
  round_of_votes = 1 - round;
  votes[1 - round] = 0;
  __syncthreads();
  return any;
}
static void __threadfence() {}
template <class T>
static T atomicAdd(T* place, T value) {
  T before = *place;
  *place += value;
  return before;
}
static int atomicMin(int* place, int value) {
  int before = *place;
  if (value < before) *place = value;
  return before;
}

#include KERNEL_FILE
#ifdef INSTANCES
INSTANCES
#endif

struct Kernel {
  void (*call)(void (*)(), void**);
  void (*function)();
};

template <class... A, size_t... I>
static void invoke(void (*function)(A...), void** arguments, std::index_sequence<I...>) {
  function(*(A*)arguments[I]...);
}
template <class... A>
static void call(void (*function)(), void** arguments) {
  invoke((void (*)(A...))function, arguments, std::index_sequence_for<A...>());
}
template <class... A>
static Kernel kernel(void (*function)(A...)) {
  return {call<A...>, (void (*)())function};
}

#define KERNEL(name) {#name, kernel(name)},
static const std::map<std::string, Kernel> kernels = {KERNELS};

static Kernel launched;
static void** given;

static void fiber(int thread) {
  launched.call(launched.function, given);
  ended[thread] = 1;
  warp_groups[thread / 32].leave();
  block_group.leave();
  swapcontext(&fibers[thread], &scheduler);
}

// Returns 0, or 1 when there is no such kernel. `arguments` has the address of each.
extern "C" int run(const char* name, int grid_x, int grid_y, int block_x, int block_y, void** arguments) {
  const size_t STACK = 32768;
  static std::vector<std::vector<char>> stacks;
  auto found = kernels.find(name);
  if (found == kernels.end()) return 1;
  launched = found->second;
  given = arguments;
  int threads = block_x * block_y;
  stacks.resize(threads, std::vector<char>(STACK));
  gridDim = {(unsigned)grid_x, (unsigned)grid_y, 1};
  blockDim = {(unsigned)block_x, (unsigned)block_y, 1};
  for (int block = 0; block < grid_x * grid_y; ++block) {
    blockIdx = {(unsigned)(block % grid_x), (unsigned)(block / grid_x), 0};
    fibers.assign(threads, ucontext_t());
    ended.assign(threads, 0);
    block_group = {threads, 0, 0};
    warp_groups.clear();
    for (int left = threads; left > 0; left -= 32) warp_groups.push_back({left < 32 ? left : 32, 0, 0});
    exchanged.resize(threads);
    for (int thread = 0; thread < threads; ++thread) {
      getcontext(&fibers[thread]);
      fibers[thread].uc_stack.ss_sp = stacks[thread].data();
      fibers[thread].uc_stack.ss_size = STACK;
      fibers[thread].uc_link = &scheduler;
      makecontext(&fibers[thread], (void (*)())fiber, 1, thread);
    }
    for (bool going = true; going;) {
      going = false;
      for (running = 0; running < threads; ++running) {
        if (ended[running]) continue;
        going = true;
        threadIdx = {(unsigned)(running % block_x), (unsigned)(running / block_x), 0};
        swapcontext(&scheduler, &fibers[running]);
      }
    }
  }
  return 0;
}
