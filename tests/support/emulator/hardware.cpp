// What hardware.h declares.
#include "hardware.h"

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
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace emulator {

constexpr size_t STACK_BYTES = 256 << 10;
// The shared address of the dynamic memory. Descriptors of wgmma have 18 bits for an address.
constexpr unsigned DYNAMIC_ADDRESS = 1024;

Index thread_index, block_index, block_size, grid_size;
alignas(1024) unsigned char dynamic_memory[SHARED_BYTES];

namespace {

size_t dynamic_bytes;

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
  bool (*ready)(const void*) = nullptr;
  const void* ready_of;
  Groups copies, bulk, bulk_writes;  // bulk: what reads shared memory
};

struct Warp {
  unsigned live = 0, arrived = 0, generation = 0;
  const char* name = nullptr;
  void* lanes[WARP];  // the arguments of a collective; null where a lane has exited
  RunLanes run;
  const void* run_of;  // lies on the stack of the first lane
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
  std::map<unsigned, TransactionBarrier> barriers;
  std::vector<std::shared_ptr<Work>> copies;  // those that may complete at any time
  Place scheduler;
  Fiber* current = nullptr;
  void (*kernel)(const void*);
  const void* kernel_of;
  std::exception_ptr error;
};
Block block;
std::mt19937 chance;
bool toss() { return chance() % 2; }

Fiber& fiber() { return *block.current; }
Warp& warp() { return block.warps[thread_index.x / WARP]; }

void run_collective(Warp& warp) {
  warp.run(warp.run_of, warp.lanes);
  warp.arrived = 0;
  ++warp.generation;
}

void enter() {
  try {
    block.kernel(block.kernel_of);
  } catch (...) {
    block.error = std::current_exception();
  }
  Fiber& self = fiber();
  self.running = false;
  Warp& own = warp();
  if (--own.live && own.arrived == own.live) run_collective(own);
  self.place.switch_to(block.scheduler);
}

std::string waiting() {
  std::map<std::string, std::string> threads;
  for (const Fiber& fiber : block.fibers) {
    if (fiber.running) threads[fiber.waits_for] += " " + std::to_string(fiber.index.x);
  }
  std::string text = "nobody can go on; threads wait for";
  for (const auto& [what, who] : threads) text += "\n  " + what + ":" + who;
  return text;
}

// Completes one of the copies, any of them.
bool complete_copy() {
  if (block.copies.empty()) return false;
  std::swap(block.copies[chance() % block.copies.size()], block.copies.back());
  const auto copy = std::move(block.copies.back());
  block.copies.pop_back();
  copy->finish();
  return true;
}

void run_block(unsigned threads, char* stacks) {
  std::memset(dynamic_memory, 0xff, sizeof dynamic_memory);  // NaN in every type
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
  std::iota(order.begin(), order.end(), 0u);
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
        if (fiber.ready && !fiber.ready(fiber.ready_of)) continue;
        fiber.ready = nullptr;
        block.current = &fiber;
        thread_index = fiber.index;
        block.scheduler.switch_to(fiber.place);
        if (block.error) std::rethrow_exception(block.error);
        moved = true;
      }
    }
    if (live && (!moved || chance() % delay == 0)) moved |= complete_copy();
    if (live && !moved) fail(waiting().c_str());
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

}  // namespace

void fail(const char* message) {
  throw std::runtime_error("block " + std::to_string(block_index.x) + ", thread " +
                           std::to_string(thread_index.x) + ": " + message);
}

const char* launch(unsigned grid, unsigned threads, size_t shared_memory, unsigned seed,
                   bool shuffled, void (*run)(const void*), const void* of) {
  static std::string message;
  const std::unique_ptr<char[]> stacks(new char[threads * STACK_BYTES]);
  chance.seed(seed);
  grid_size = {grid, 1, 1};
  block_size = {threads, 1, 1};
  dynamic_bytes = shared_memory;
  try {
    std::vector<unsigned> order(grid);
    std::iota(order.begin(), order.end(), 0u);
    if (shuffled) std::shuffle(order.begin(), order.end(), chance);
    for (const unsigned i : order) {
      block_index = {i, 0, 0};
      block = Block();
      block.kernel = run;
      block.kernel_of = of;
      run_block(threads, stacks.get());
    }
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}

// ---- threads that meet or wait ----

void wait_until(const char* what, bool (*ready)(const void*), const void* of) {
  Fiber& self = fiber();
  self.waits_for = what;
  self.ready = ready;
  self.ready_of = of;
  self.place.switch_to(block.scheduler);
}

void arrive(int barrier, unsigned threads) {
  Meeting& meeting = block.meetings[barrier];
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    ++meeting.generation;
  }
}

void meet(int barrier, unsigned threads) {
  Meeting& meeting = block.meetings[barrier];
  const unsigned before = meeting.generation;
  arrive(barrier, threads);
  if (meeting.generation == before) {
    wait_until(barrier ? "a named barrier" : "__syncthreads()",
               [&meeting, before] { return meeting.generation != before; });
  }
}

void collective(const char* name, void* argument, RunLanes run, const void* of) {
  Warp& own = warp();
  if (own.arrived == 0) {
    own.name = name;
    std::fill_n(own.lanes, WARP, nullptr);
    own.run = run;
    own.run_of = of;
  } else if (own.name != name) {
    fail((std::string("reaches ") + name + " while lanes of its warp are at " + own.name).c_str());
  }
  own.lanes[lane()] = argument;
  if (++own.arrived == own.live) return run_collective(own);
  wait_until(name, [&own, before = own.generation] { return own.generation != before; });
}

unsigned ballot(bool vote) {
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

// ---- shared memory ----

unsigned shared_address(const void* pointer) {
  return unsigned(static_cast<const unsigned char*>(pointer) - dynamic_memory) + DYNAMIC_ADDRESS;
}

void* shared_memory(unsigned address, unsigned bytes) {
  const unsigned offset = address - DYNAMIC_ADDRESS;
  if (offset < SHARED_BYTES && offset + bytes > dynamic_bytes) {
    const std::string which = "shared address " + std::to_string(address);
    fail((which + " lies behind the dynamic memory").c_str());
  }
  if (address % bytes) fail("a shared address is not aligned");
  return dynamic_memory + int32_t(offset);
}

namespace {

TransactionBarrier& barrier_at(unsigned address) {
  const auto found = block.barriers.find(address);
  if (found == block.barriers.end()) fail("an mbarrier is used before its initialisation");
  return found->second;
}

}  // namespace

void begin_barrier(unsigned address, int arrivals) {
  block.barriers[address] = {arrivals, arrivals};
}

void arrive_transaction(unsigned address, unsigned bytes) {
  TransactionBarrier& barrier = barrier_at(address);
  if (barrier.pending == 0) fail("an mbarrier has too many arrivals");
  barrier.bytes += bytes;
  --barrier.pending;
  barrier.end_phase_if_complete();
}

void wait_transaction(unsigned address, unsigned parity) {
  TransactionBarrier& at = barrier_at(address);
  wait_until("an mbarrier", [&at, parity] { return at.phase % 2 != parity; });
}

namespace {

// Calls f(register, address) for the two elements of each.
template <class F>
void move_matrices(const char* name, unsigned* registers, int count, bool transposed,
                   unsigned address, F f) {
  struct Argument {
    unsigned address;
    unsigned* registers;
  } argument = {address, registers};
  collective(name, argument, [=](Argument** lanes) {
    for (int lane = 0; lane < WARP; ++lane) {
      for (int i = 0; i < 2 * count; ++i) {
        const int row = transposed ? lane % 4 * 2 + i % 2 : lane / 4;
        const int column = transposed ? lane / 4 : lane % 4 * 2 + i % 2;
        const unsigned line = lanes[i / 2 * 8 + row]->address;
        if (line % 16) fail("a row of a matrix is not aligned");
        f(reinterpret_cast<unsigned short*>(&lanes[lane]->registers[i / 2])[i % 2],
          *shared_pointer<unsigned short>(line + column * 2));
      }
    }
  });
}

}  // namespace

void load_matrices(unsigned* registers, int count, bool transposed, unsigned address) {
  move_matrices("ldmatrix", registers, count, transposed, address,
                [](auto& element, auto& memory) { element = memory; });
}

void store_matrices(const unsigned* registers, int count, bool transposed, unsigned address) {
  move_matrices("stmatrix", const_cast<unsigned*>(registers), count, transposed, address,
                [](auto& element, auto& memory) { memory = element; });
}

// ---- copies ----

namespace {

std::shared_ptr<Work> begin_copy(std::function<void()> run) {
  auto work = std::make_shared<Work>(Work{std::move(run)});
  block.copies.push_back(work);
  return work;
}

// A copy of `bytes` bytes that an mbarrier counts.
void begin_counted_copy(unsigned barrier, unsigned bytes, std::function<void()> run) {
  barrier_at(barrier);
  begin_copy([=] {
    run();
    barrier_at(barrier).bytes -= bytes;
    barrier_at(barrier).end_phase_if_complete();
  });
}

// A copy from shared memory, which may be read long before `write` gets what was there.
void begin_bulk(unsigned src, unsigned bytes, std::function<void(const char*)> write) {
  auto data = std::make_shared<std::vector<char>>(bytes);
  auto read = begin_copy([=] { std::memcpy(data->data(), shared_memory(src, 16), data->size()); });
  fiber().bulk.add(read);
  fiber().bulk_writes.add(begin_copy([=] {
    read->finish();
    write(data->data());
  }));
}

// The address with the swizzle of a tile whose rows have 128 or 64 bytes. The hardware applies it
// to the bits of the address.
unsigned swizzle(unsigned address, int row_bytes) {
  return address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4);
}

EmulatedMap map_of(const Tile& tile) { return *static_cast<const EmulatedMap*>(tile.map); }

// Calls f(pointer into shared memory, pointer into the tensor or null outside of it, bytes).
template <class F>
void for_elements(const EmulatedMap& map, unsigned smem, const int (&at)[4], F f) {
  if (!map.base) fail("a tensor map without an array is used");
  const int item = map.strides[0], row_bytes = map.box_columns * item;
  if (smem % (8 * row_bytes)) fail("a tile of TMA is not aligned");
  const auto inside = [&](int i, long long x) { return x >= 0 && x < (long long)map.dims[i]; };
  for (int row = 0; row < map.box_rows; ++row) {
    char* line = map.base + (at[1] + row) * (long long)map.strides[1] +
                 at[2] * (long long)map.strides[2] + at[3] * (long long)map.strides[3];
    const bool valid = inside(1, at[1] + row) && inside(2, at[2]) && inside(3, at[3]);
    for (int column = 0; column < map.box_columns; ++column) {
      const unsigned address = swizzle(smem + row * row_bytes + column * item, row_bytes);
      f(shared_pointer<char>(address),
        valid && inside(0, at[0] + column) ? line + (at[0] + column) * (long long)item : nullptr,
        item);
    }
  }
}

}  // namespace

void copy_async(unsigned dst, const void* src, bool valid) {
  fiber().copies.add(begin_copy([=] {
    void* const to = shared_memory(dst, 16);
    valid ? std::memcpy(to, src, 16) : std::memset(to, 0, 16);
  }));
}
void commit_copies() { fiber().copies.commit(); }
void wait_copies(int newest) { fiber().copies.wait(newest); }

void load_tile(unsigned dst, const Tile& tile, unsigned barrier) {
  const EmulatedMap map = map_of(tile);
  const unsigned bytes = map.box_columns * map.box_rows * int(map.strides[0]);
  begin_counted_copy(barrier, bytes, [=] {
    for_elements(map, dst, tile.at, [](char* to, char* from, int size) {
      from ? std::memcpy(to, from, size) : std::memset(to, 0, size);
    });
  });
}

void store_tile(const Tile& tile, unsigned src) {
  fiber().bulk.add(begin_copy([=, map = map_of(tile)] {
    for_elements(map, src, tile.at, [](char* from, char* to, int size) {
      if (to) std::memcpy(to, from, size);
    });
  }));
}

void load_bulk(unsigned dst, const void* src, unsigned bytes, unsigned barrier) {
  begin_counted_copy(barrier, bytes, [=] { std::memcpy(shared_memory(dst, 16), src, bytes); });
}
void store_bulk(void* dst, unsigned src, unsigned bytes) {
  begin_bulk(src, bytes, [=](const char* data) { std::memcpy(dst, data, bytes); });
}
void add_bulk(float* dst, unsigned src, unsigned bytes) {
  begin_bulk(src, bytes, [=](const char* data) {
    for (unsigned i = 0; i < bytes / 4; ++i) dst[i] += reinterpret_cast<const float*>(data)[i];
  });
}
void commit_bulk() {
  fiber().bulk.commit();
  fiber().bulk_writes.commit();
}
void wait_bulk_read(int newest) { fiber().bulk.wait(newest); }
void wait_bulk(int newest) {
  wait_bulk_read(newest);
  fiber().bulk_writes.wait(newest);
}

// ---- matrix products ----

float float_of(unsigned short bits, bool bfloat16) {
  if (bfloat16) return __builtin_bit_cast(float, unsigned(bits) << 16);
  return float(__builtin_bit_cast(_Float16, bits));
}

unsigned short bits_of(float x, bool bfloat16) {
  if (!bfloat16) return __builtin_bit_cast(unsigned short, _Float16(x));
  const unsigned bits = __builtin_bit_cast(unsigned, x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
}

namespace {

// The element of row `row` and step `k` of an operand in shared memory, with its descriptor.
float operand_at(bool bfloat16, unsigned long long descriptor, bool transposed, int row, int k) {
  const unsigned begin = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const unsigned stride = (descriptor >> 32 & 0x3fff) << 4;
  const int row_bytes = descriptor >> 62 == 1 ? 128 : 64;
  const int columns = row_bytes / 2;
  const unsigned address = transposed ? begin + row / columns * leading + k / 8 * stride +
                                            k % 8 * row_bytes + row % columns * 2
                                      : begin + row / 8 * stride + row % 8 * row_bytes + k * 2;
  return float_of(*shared_pointer<unsigned short>(swizzle(address, row_bytes)), bfloat16);
}

// A sum of products as a tensor core rounds it: towards zero (python -m bench precision).
float truncate(double sum) {
  const float nearest = float(sum);
  const bool beyond = std::isfinite(nearest) && std::fabs(nearest) > std::fabs(sum);
  return __builtin_bit_cast(float, __builtin_bit_cast(unsigned, nearest) - beyond);
}

float operand_a[16][16], operand_b[16][256];  // of one product at a time: row and k, k and column

// The operand A that the lanes have in registers.
void set_a(int lane, Registers registers, bool bfloat16) {
  for (int i = 0; i < 8; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, k = lane % 4 * 2 + i % 2 + i / 4 * 8;
    operand_a[row][k] = float_of((*registers)[i / 2] >> i % 2 * 16, bfloat16);
  }
}

// d = a b + (add ? d : 0) for 16 rows and as many columns, in eights, of a warp. The compiler makes
// vectors of a row's columns, each of which is summed in the order of k.
void multiply(const Fragment (&d)[WARP], int columns, bool add) {
  for (int row = 0; row < 16; ++row) {
    const auto at = [&](int column) -> float& {
      return d[row % 8 * 4 + column % 8 / 2][column / 8][row / 8 * 2 + column % 2];
    };
    double sums[256];
    for (int n = 0; n < 8 * columns; ++n) sums[n] = add ? at(n) : 0.f;
    for (int k = 0; k < 16; ++k) {
      const double a = operand_a[row][k];
      for (int n = 0; n < 8 * columns; ++n) sums[n] += a * operand_b[k][n];
    }
    for (int n = 0; n < 8 * columns; ++n) at(n) = truncate(sums[n]);
  }
}

}  // namespace

void add_mma(Fragment d, Registers a, unsigned b0, unsigned b1, bool bfloat16) {
  struct Argument {
    Fragment d;
    Registers a;
    unsigned b[2];
  } argument = {d, a, {b0, b1}};
  collective("mma", argument, [bfloat16](Argument** lanes) {
    Fragment d[WARP];
    for (int lane = 0; lane < WARP; ++lane) {
      d[lane] = lanes[lane]->d;
      set_a(lane, lanes[lane]->a, bfloat16);
      for (int i = 0; i < 4; ++i) {
        operand_b[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] =
            float_of(lanes[lane]->b[i / 2] >> i % 2 * 16, bfloat16);
      }
    }
    multiply(d, 1, true);
  });
}

void add_product(Fragment d, Registers a, const Wgmma& wgmma) {
  struct Argument {
    Fragment d;
    Registers a;
    Wgmma wgmma;
  } argument = {d, a, wgmma};
  collective("wgmma", argument, [](Argument** lanes) {
    struct Product {
      Fragment d[WARP];
      Registers a[WARP];
    } product;
    for (int i = 0; i < WARP; ++i) {
      if (!lanes[i]) fail("wgmma without all lanes");
      if (lanes[i]->wgmma != lanes[0]->wgmma || !lanes[i]->a != !lanes[0]->a) {
        fail("the lanes of a warp disagree on the operands of a wgmma");
      }
      product.d[i] = lanes[i]->d;
      product.a[i] = lanes[i]->a;
    }
    const int first_row = thread_index.x / WARP % 4 * 16;
    warp().products.add(std::make_shared<Work>(Work{[=, of = lanes[0]->wgmma] {
      for (int k = 0; k < 16; ++k) {
        for (int row = 0; row < 16 && !product.a[0]; ++row) {
          operand_a[row][k] = operand_at(of.bfloat16, of.a, of.trans_a, first_row + row, k);
        }
        for (int n = 0; n < 8 * of.columns; ++n) {
          operand_b[k][n] = operand_at(of.bfloat16, of.b, of.trans_b, n, k);
        }
      }
      for (int lane = 0; lane < WARP && product.a[0]; ++lane) {
        set_a(lane, product.a[lane], of.bfloat16);
      }
      multiply(product.d, of.columns, of.add);
    }}));
  });
}

void commit_products() {
  int none = 0;
  collective("wgmma.commit_group", none, [](int**) {
    Groups& products = warp().products;
    products.commit();
    if (products.committed.size() == 1 && toss()) products.wait(0);
  });
}

void wait_products(int newest) {
  int none = 0;
  collective("wgmma.wait_group", none, [=](int**) { warp().products.wait(newest); });
}

}  // namespace emulator
