// CUDA C++ on a CPU: as much of the language as the kernels of attention use. A launch runs its
// blocks one after the other. The threads of a block are fibers of one thread of the CPU, which
// takes turns at the points where threads meet or wait.
//
// It is made to find mistakes. Asynchronous work (copies, wgmma) is done late or early by chance,
// warps run in random order, and shared memory begins as NaN. A block in which nobody can go on
// ends with a message about who waits for what.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#undef INT_MAX  // a constant of attention/fp16x3/rows.cuh

namespace emulator {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t SHARED_BYTES = 227 << 10;
// The shared address of the dynamic memory. Descriptors of wgmma have 18 bits for an address.
constexpr uint32_t DYNAMIC_ADDRESS = 1024;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
inline Index thread_index, block_index, block_size, grid_size;

alignas(1024) inline unsigned char dynamic_memory[SHARED_BYTES];
inline size_t dynamic_bytes;

[[noreturn]] inline void fail(const std::string& message) {
  throw std::runtime_error("block " + std::to_string(block_index.x) + ", thread " +
                           std::to_string(thread_index.x) + ": " + message);
}

// ---- asynchronous work ----

// Work that is done at the latest when somebody waits for it.
struct Work {
  std::function<void()> run;
  void finish() {
    if (run) std::exchange(run, nullptr)();
  }
};

// Groups of it, as in cp.async.commit_group and wait_group.
struct Groups {
  std::vector<std::shared_ptr<Work>> open;
  std::deque<std::vector<std::shared_ptr<Work>>> committed;

  void add(std::shared_ptr<Work> work) { open.push_back(std::move(work)); }
  void commit() { committed.push_back(std::exchange(open, {})); }
  // Finishes all groups but the newest.
  void wait(size_t newest) {
    for (; committed.size() > newest; committed.pop_front()) {
      for (auto& work : committed.front()) work->finish();
    }
  }
};

// ---- the threads of a block ----

// A place to go on from. The first time a fiber needs a context with a stack; later switches by
// _setjmp() need no system calls.
struct Place {
  ucontext_t context;
  jmp_buf jump;
  bool begun = true;
  void switch_to(Place& other) {
    if (_setjmp(jump)) return;
    if (std::exchange(other.begun, true)) _longjmp(other.jump, 1);
    setcontext(&other.context);
  }
};

struct Fiber {
  Place place;
  Index index;
  bool running = false;
  const char* waits_for = "";
  std::function<bool()> ready;
  Groups copies, bulk, bulk_writes;  // bulk: what reads shared memory
};

struct Warp {
  unsigned live = 0, arrived = 0, generation = 0;
  const char* name = nullptr;
  void* lanes[WARP];  // the arguments of a collective; null where a lane has exited
  std::function<void()> run;
  Groups products;
};

struct Meeting {  // a barrier of the block
  unsigned arrived = 0, generation = 0;
};

struct TransactionBarrier {  // an mbarrier
  int expected, pending;
  int64_t bytes = 0;
  unsigned phase = 0;
  void end_phase_if_complete() {
    if (pending == 0 && bytes == 0) {
      pending = expected;
      ++phase;
    }
  }
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::map<int, Meeting> meetings;
  std::map<uint32_t, TransactionBarrier> barriers;
  std::vector<std::shared_ptr<Work>> copies;  // those that may complete at any time
  Place scheduler;
  Fiber* current = nullptr;
  std::function<void()> kernel;
  std::exception_ptr error;
};
inline Block block;
inline std::mt19937 chance;
inline bool toss() { return chance() % 2; }

inline Fiber& fiber() { return *block.current; }
inline int lane() { return thread_index.x % WARP; }
inline Warp& warp() { return block.warps[thread_index.x / WARP]; }

// Lets other threads run until the condition holds.
__attribute__((noinline)) inline void wait_until(const char* what, std::function<bool()> ready) {
  Fiber& self = fiber();
  self.waits_for = what;
  self.ready = std::move(ready);
  self.place.switch_to(block.scheduler);
}

inline void run_collective(Warp& warp) {
  std::exchange(warp.run, nullptr)();
  warp.arrived = 0;
  ++warp.generation;
}

// All live lanes of a warp meet. The last one calls run(lanes), with an Argument* of each lane, or
// null for one that has exited.
template <class Argument, class Run>
__attribute__((noinline)) void collective(const char* name, Argument& argument, Run run) {
  Warp& own = warp();
  if (own.arrived == 0) {
    own.name = name;
    std::fill_n(own.lanes, WARP, nullptr);
    own.run = [&own, run] { run(reinterpret_cast<Argument**>(own.lanes)); };
  } else if (own.name != name) {
    fail(std::string("reaches ") + name + " while lanes of its warp are at " + own.name);
  }
  own.lanes[lane()] = const_cast<std::remove_const_t<Argument>*>(&argument);
  if (++own.arrived == own.live) return run_collective(own);
  wait_until(name, [&own, before = own.generation] { return own.generation != before; });
}

inline void enter() {
  try {
    block.kernel();
  } catch (...) {
    block.error = std::current_exception();
  }
  Fiber& self = fiber();
  self.running = false;
  Warp& own = warp();
  if (--own.live && own.arrived == own.live) run_collective(own);
  self.place.switch_to(block.scheduler);
}

inline std::string waiting() {
  std::map<std::string, std::string> threads;
  for (const Fiber& fiber : block.fibers) {
    if (fiber.running) threads[fiber.waits_for] += " " + std::to_string(fiber.index.x);
  }
  std::string text = "nobody can go on; threads wait for";
  for (const auto& [what, who] : threads) text += "\n  " + what + ":" + who;
  return text;
}

// Completes one of the copies, any of them.
inline bool complete_copy() {
  if (block.copies.empty()) return false;
  std::swap(block.copies[chance() % block.copies.size()], block.copies.back());
  const auto copy = std::move(block.copies.back());
  block.copies.pop_back();
  copy->finish();
  return true;
}

inline void run_block(unsigned threads, char* stacks, std::function<void()> kernel) {
  std::memset(dynamic_memory, 0xff, sizeof dynamic_memory);  // NaN in every type
  block = Block();
  block.kernel = std::move(kernel);
  block.fibers.resize(threads);
  block.warps.resize((threads + WARP - 1) / WARP);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    ucontext_t& context = fiber.place.context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + i * STACK_BYTES;
    context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&context, enter, 0);
    fiber.place.begun = false;
    fiber.index.x = i;
    fiber.running = true;
    ++block.warps[i / WARP].live;
  }
  const unsigned delay = 1 << chance() % 8;  // of copies, on average
  std::vector<unsigned> order(block.warps.size());
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  for (bool live = true, moved = true; live; moved = false) {
    live = false;
    std::shuffle(order.begin(), order.end(), chance);
    for (const unsigned warp : order) {
      const bool pause = chance() % 4 == 0;
      for (unsigned i = warp * WARP; i < std::min(threads, (warp + 1) * WARP); ++i) {
        Fiber& fiber = block.fibers[i];
        live |= fiber.running;
        if (!fiber.running) continue;
        if (pause) {
          moved = true;
          continue;
        }
        if (fiber.ready && !fiber.ready()) continue;
        fiber.ready = nullptr;
        block.current = &fiber;
        thread_index = fiber.index;
        block.scheduler.switch_to(fiber.place);
        if (block.error) std::rethrow_exception(block.error);
        moved = true;
      }
    }
    if (live && (!moved || chance() % delay == 0)) moved |= complete_copy();
    if (live && !moved) fail(waiting());
  }
  while (complete_copy()) {
  }
  for (Fiber& fiber : block.fibers) {
    for (Groups* groups : {&fiber.copies, &fiber.bulk, &fiber.bulk_writes}) {
      groups->commit();
      groups->wait(0);
    }
  }
}

// ---- shared memory ----

inline uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const unsigned char*>(pointer) - dynamic_memory) + DYNAMIC_ADDRESS;
}

// The pointer of an address in dynamic or, before or behind it, in static memory.
template <typename T>
T* shared_pointer(uint32_t address) {
  const uint32_t offset = address - DYNAMIC_ADDRESS;
  if (offset < SHARED_BYTES && offset + sizeof(T) > dynamic_bytes) {
    fail("shared address " + std::to_string(address) + " lies behind the dynamic memory");
  }
  if (address % sizeof(T)) fail("a shared address is not aligned");
  return reinterpret_cast<T*>(dynamic_memory + int32_t(offset));
}

}  // namespace emulator

// ---- the language ----

#define __device__
#define __host__
#define __global__ static
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __builtin_assume(x)
#define __CUDA_ARCH__ 900

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

// common/types.cuh defines these names, as other types of the same sizes.
#define uint8_t cuda_uint8_t
#define uint16_t cuda_uint16_t
#define uint32_t cuda_uint32_t
#define uint64_t cuda_uint64_t
#define int64_t cuda_int64_t

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename A, typename B>
constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(a) : T(b);
}
template <typename A, typename B>
constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) > T(b) ? T(a) : T(b);
}

inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __fmul_rn(float a, float b) { return a * b; }  // -ffp-contract=off
inline float __fdiv_rn(float a, float b) { return a / b; }  // -ffp-contract=off
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float rsqrtf(float x) { return 1.f / __builtin_sqrtf(x); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned __int128>(a) * b >> 64;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }

// Byte number i of the result is that of (b, a) which the hexadecimal digit i of s names.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> (s >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return emulator::shared_address(pointer);
}

template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}
template <typename T>
T atomicMax(T* address, T value) {
  const T before = *address;
  *address = std::max(before, value);
  return before;
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  const unsigned before = *address;
  *address = before >= last ? 0 : before + 1;
  return before;
}

namespace emulator {

// Barrier 0 is that of all threads, the others are named barriers.
inline void arrive(int barrier, unsigned threads) {
  Meeting& meeting = block.meetings[barrier];
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    ++meeting.generation;
  }
}
inline void meet(int barrier, unsigned threads) {
  Meeting& meeting = block.meetings[barrier];
  const unsigned before = meeting.generation;
  arrive(barrier, threads);
  if (meeting.generation == before) {
    wait_until(barrier ? "a named barrier" : "__syncthreads()",
               [&meeting, before] { return meeting.generation != before; });
  }
}

template <typename T>
T shuffle(T value, int from) {
  struct Argument {
    T value;
    int from;
    T result;
  } argument = {value, from, value};
  collective("a shuffle", argument, [](Argument** lanes) {
    for (int i = 0; i < WARP; ++i) {
      if (lanes[i] && lanes[lanes[i]->from]) lanes[i]->result = lanes[lanes[i]->from]->value;
    }
  });
  return argument.result;
}

// The bits of all lanes.
inline unsigned ballot(bool vote) {
  struct Argument {
    bool vote;
    unsigned result;
  } argument = {vote, 0};
  collective("a vote", argument, [](Argument** lanes) {
    unsigned bits = 0;
    for (int i = 0; i < WARP; ++i) bits |= unsigned(lanes[i] && lanes[i]->vote) << i;
    for (int i = 0; i < WARP; ++i) {
      if (lanes[i]) lanes[i]->result = bits;
    }
  });
  return argument.result;
}

// Calls the kernel for all blocks. Returns the message of a failure, or null.
template <class Kernel>
const char* launch(unsigned grid, unsigned threads, size_t shared_memory, unsigned seed,
                   Kernel kernel) {
  static std::string message;
  const std::unique_ptr<char[]> stacks(new char[threads * STACK_BYTES]);
  chance.seed(seed);
  grid_size = {grid, 1, 1};
  block_size = {threads, 1, 1};
  dynamic_bytes = shared_memory;
  try {
    for (unsigned i = 0; i < grid; ++i) {
      block_index = {i, 0, 0};
      run_block(threads, stacks.get(), kernel);
    }
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(0, blockDim.x); }
inline void __syncwarp() { emulator::ballot(false); }
inline unsigned __ballot_sync(unsigned, bool vote) { return emulator::ballot(vote); }
inline bool __any_sync(unsigned, bool vote) { return emulator::ballot(vote); }
inline bool __all_sync(unsigned, bool vote) { return !emulator::ballot(!vote); }
template <typename T>
T __shfl_sync(unsigned, T value, int from, int width = emulator::WARP) {
  return emulator::shuffle(value, emulator::lane() / width * width + from % width);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const int lane = emulator::lane();
  return emulator::shuffle(value, lane < delta ? lane : lane - delta);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::shuffle(value, emulator::lane() ^ mask);
}
