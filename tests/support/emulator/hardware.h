// What a block of threads needs of a GPU, on a CPU; cuda.h and ptx.h are written with it. A launch
// runs its blocks one after the other. The threads of a block are fibers of one thread of the CPU,
// which takes turns at the points where threads meet or wait.
//
// It is made to find mistakes. Asynchronous work (copies, wgmma) is done late or early by chance,
// warps run in random order, and shared memory begins as NaN. A block in which nobody can go on
// ends with a message about who waits for what.
//
// Each kernel is a library that includes this header, so it declares little; what it declares is
// compiled once (hardware.cpp) and linked into each of them, which thus has a state of its own.
#pragma once
#include <cstddef>

namespace emulator {

constexpr int WARP = 32;
constexpr size_t SHARED_BYTES = 227 << 10;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
extern Index thread_index, block_index, block_size, grid_size;
extern unsigned char dynamic_memory[SHARED_BYTES];

inline int lane() { return thread_index.x % WARP; }

// Calls run(of) for the threads of all blocks, in the order of the blocks or in a random one.
// Returns the message of a failure, or null.
const char* launch(unsigned grid, unsigned threads, size_t shared_memory, unsigned seed,
                   bool shuffled, void (*run)(const void*), const void* of);

template <class Run>
const char* launch(unsigned grid, unsigned threads, size_t shared_memory, unsigned seed,
                   bool shuffled, const Run& run) {
  const auto call = [](const void* of) { (*static_cast<const Run*>(of))(); };
  return launch(grid, threads, shared_memory, seed, shuffled, call, &run);
}

[[noreturn]] void fail(const char* message);  // in a thread of a block

// ---- threads that meet or wait ----

void wait_until(const char* what, bool (*ready)(const void*), const void* of);

// Lets other threads run until the condition holds.
template <class Ready>
void wait_until(const char* what, const Ready& ready) {
  wait_until(what, [](const void* of) { return (*static_cast<const Ready*>(of))(); }, &ready);
}

// Barrier 0 is that of all threads, the others are named barriers.
void arrive(int barrier, unsigned threads);
void meet(int barrier, unsigned threads);

using RunLanes = void (*)(const void* of, void** lanes);
void collective(const char* name, void* argument, RunLanes run, const void* of);

// All live lanes of a warp meet. The last one calls run(lanes), with an Argument* of each lane, or
// null for one that has exited.
template <class Argument, class Run>
void collective(const char* name, Argument& argument, const Run& run) {
  const RunLanes run_lanes = [](const void* of, void** lanes) {
    (*static_cast<const Run*>(of))(reinterpret_cast<Argument**>(lanes));
  };
  collective(name, &argument, run_lanes, &run);
}

unsigned ballot(bool vote);  // the bits of all lanes

// ---- shared memory ----

unsigned shared_address(const void* pointer);
void* shared_memory(unsigned address, unsigned bytes);

// The pointer of an address in dynamic or, before or behind it, in static memory.
template <typename T>
T* shared_pointer(unsigned address) {
  return static_cast<T*>(shared_memory(address, sizeof(T)));
}

void begin_barrier(unsigned address, int arrivals);  // an mbarrier
void arrive_transaction(unsigned address, unsigned bytes);
void wait_transaction(unsigned address, unsigned parity);

// Matrices of 8 x 8 numbers of 16 bits between registers and shared memory. Lane 8 i + j gives the
// address of row j of matrix i.
void load_matrices(unsigned* registers, int count, bool transposed, unsigned address);
void store_matrices(const unsigned* registers, int count, bool transposed, unsigned address);

// ---- copies ----

void copy_async(unsigned dst, const void* src, bool valid);  // 16 bytes, or as many zeros
void commit_copies();
void wait_copies(int newest);

// What tests/support/emulator/__init__.py writes in place of a CUtensorMap.
struct EmulatedMap {
  char* base;
  unsigned long long dims[4], strides[4];  // strides in bytes, of all dimensions
  int box_columns, box_rows;
};

struct Tile {  // of a tensor map
  const void* map;
  int at[4];  // column, row, head, batch
};

void load_tile(unsigned dst, const Tile& tile, unsigned barrier);
void store_tile(const Tile& tile, unsigned src);
void load_bulk(unsigned dst, const void* src, unsigned bytes, unsigned barrier);
void store_bulk(void* dst, unsigned src, unsigned bytes);
void add_bulk(float* dst, unsigned src, unsigned bytes);
void commit_bulk();
void wait_bulk_read(int newest);
void wait_bulk(int newest);

// ---- matrix products ----

float float_of(unsigned short bits, bool bfloat16);
unsigned short bits_of(float x, bool bfloat16);

using Fragment = float (*)[4];  // accumulators of a lane: columns of eight x 4
using Registers = const unsigned (*)[4];

// d += a b for 16 rows and 8 columns of a warp, one step of 16.
void add_mma(Fragment d, Registers a, unsigned b0, unsigned b1, bool bfloat16);

struct Wgmma {              // the lanes of a warp agree on all of it
  unsigned long long a, b;  // descriptors
  bool trans_a, trans_b, add, bfloat16;
  int columns;  // in eights
  bool operator==(const Wgmma&) const = default;
};

// Adds a product of the warp to the group that commit_products() ends. `a` is the operand in
// registers, or null.
void add_product(Fragment d, Registers a, const Wgmma& wgmma);
void commit_products();
void wait_products(int newest);

}  // namespace emulator
