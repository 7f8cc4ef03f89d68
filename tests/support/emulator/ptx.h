// The instructions that cuda_src/ptx wraps, on a CPU: the same functions, by the PTX ISA. What they
// are for stands there. Fragments of matrices are laid out as mma.cuh and wgmma.cuh say.
#pragma once
#include "cuda.h"

namespace emulator {

// ---- 16-bit numbers ----

template <typename T>
float to_float(unsigned short bits) {
  if constexpr (T::IS_BFLOAT16) return __uint_as_float(unsigned(bits) << 16);
  return float(__builtin_bit_cast(_Float16, bits));
}

template <typename T>
unsigned short from_float(float x) {
  if constexpr (!T::IS_BFLOAT16) return __builtin_bit_cast(unsigned short, _Float16(x));
  const unsigned bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
}

// Applies f to both numbers of a register.
template <typename T, class F>
unsigned of_pair(unsigned a, unsigned b, F f) {
  const auto at = [&](int shift) {
    return unsigned(from_float<T>(f(to_float<T>(a >> shift), to_float<T>(b >> shift)))) << shift;
  };
  return at(0) | at(16);
}

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.f * x : x; }
inline float min_nan(float a, float b) { return a != a ? a : b != b ? b : std::min(a, b); }
inline float max_nan(float a, float b) { return a != a ? a : b != b ? b : std::max(a, b); }

// ---- transactions and copies ----

inline TransactionBarrier& barrier_at(unsigned address) {
  const auto found = block.barriers.find(address);
  if (found == block.barriers.end()) fail("an mbarrier is used before its initialisation");
  return found->second;
}

inline void arrive_transaction(unsigned address, unsigned bytes) {
  TransactionBarrier& barrier = barrier_at(address);
  if (barrier.pending == 0) fail("an mbarrier has too many arrivals");
  barrier.bytes += bytes;
  --barrier.pending;
  barrier.end_phase_if_complete();
}

inline std::shared_ptr<Work> begin_copy(std::function<void()> run) {
  auto work = std::make_shared<Work>(Work{std::move(run)});
  block.copies.push_back(work);
  return work;
}

// A copy of `bytes` bytes that an mbarrier counts.
inline void begin_counted_copy(unsigned barrier, unsigned bytes, std::function<void()> run) {
  barrier_at(barrier);
  begin_copy([=] {
    run();
    barrier_at(barrier).bytes -= bytes;
    barrier_at(barrier).end_phase_if_complete();
  });
}

// A copy from shared memory, which may be read long before `write` gets what was there.
inline void begin_bulk(uint32_t src, unsigned bytes, std::function<void(const char*)> write) {
  auto data = std::make_shared<std::vector<char>>(bytes);
  auto read = begin_copy(
      [=] { std::memcpy(data->data(), emulator::shared_pointer<uint4>(src), data->size()); });
  fiber().bulk.add(read);
  fiber().bulk_writes.add(begin_copy([=] {
    read->finish();
    write(data->data());
  }));
}

// What tests/support/emulator/__init__.py writes in place of a CUtensorMap.
struct EmulatedMap {
  char* base;
  unsigned long long dims[4], strides[4];  // strides in bytes, of all dimensions
  int box_columns, box_rows;
};

// The address with the swizzle of a tile whose rows have 128 or 64 bytes. The hardware applies it
// to the bits of the address.
inline unsigned swizzle(unsigned address, int row_bytes) {
  return address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4);
}

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

inline EmulatedMap map_of(const TensorMap& map) {
  EmulatedMap result;
  static_assert(sizeof result <= sizeof map);
  std::memcpy(&result, &map, sizeof result);
  return result;
}

// ---- matrix products ----

using Fragment = float (*)[4];  // accumulators of a lane: columns of eight x 4

// The element of row `row` and step `k` of an operand in shared memory, with its descriptor.
template <typename T>
float operand_at(unsigned long long descriptor, bool transposed, int row, int k) {
  const unsigned begin = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const unsigned stride = (descriptor >> 32 & 0x3fff) << 4;
  const int row_bytes = descriptor >> 62 == 1 ? 128 : 64;
  const int columns = row_bytes / 2;
  const unsigned address = transposed ? begin + row / columns * leading + k / 8 * stride +
                                            k % 8 * row_bytes + row % columns * 2
                                      : begin + row / 8 * stride + row % 8 * row_bytes + k * 2;
  return to_float<T>(*shared_pointer<unsigned short>(swizzle(address, row_bytes)));
}

// A sum of products as a tensor core rounds it: towards zero (python -m bench tensor_core).
inline float truncate(double sum) {
  const float nearest = float(sum);
  return std::isfinite(nearest) && std::fabs(nearest) > std::fabs(sum)
             ? std::nextafter(nearest, 0.f)
             : nearest;
}

// d = a b + (add ? d : 0) for 16 rows and N * 8 columns of a warp, one step of 16.
template <int N>
void multiply(const Fragment (&d)[WARP], const float (&a)[16][16], const float (&b)[16][8 * N],
              bool add) {
  for (int lane = 0; lane < WARP; ++lane) {
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = n * 8 + lane % 4 * 2 + i % 2;
        double sum = add ? d[lane][n][i] : 0.f;
        for (int k = 0; k < 16; ++k) sum += double(a[row][k]) * b[k][column];
        d[lane][n][i] = truncate(sum);
      }
    }
  }
}

// The element of an A operand in registers.
template <typename T>
void set_a(float (&a)[16][16], int lane, const unsigned (&registers)[4]) {
  for (int i = 0; i < 8; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, k = lane % 4 * 2 + i % 2 + i / 4 * 8;
    a[row][k] = to_float<T>(registers[i / 2] >> i % 2 * 16);
  }
}

// Adds a product of the warp to the group that wgmma_commit() will end. `a` is the operand in
// registers, or null.
template <typename T, int N>
void add_product(float (&d)[N][4], const unsigned (*a)[4], unsigned long long a_descriptor,
                 bool trans_a, unsigned long long b_descriptor, bool trans_b, bool add) {
  struct Argument {
    Fragment d;
    const unsigned (*a)[4];
    unsigned long long descriptors[2];
    bool add;
  } argument = {d, a, {a_descriptor, b_descriptor}, add};
  collective("wgmma", argument, [=](Argument** lanes) {
    struct Product {
      Fragment d[WARP];
      const unsigned (*a[WARP])[4];
    } product;
    for (int i = 0; i < WARP; ++i) {
      if (!lanes[i]) fail("wgmma without all lanes");
      if (lanes[i]->descriptors[0] != a_descriptor || lanes[i]->descriptors[1] != b_descriptor ||
          lanes[i]->add != add) {
        fail("the lanes of a warp disagree on the operands of a wgmma");
      }
      product.d[i] = lanes[i]->d;
      product.a[i] = lanes[i]->a;
    }
    const int first_row = thread_index.x / WARP % 4 * 16;
    warp().products.add(std::make_shared<Work>(Work{[=] {
      static float a[16][16], b[16][8 * N];
      for (int k = 0; k < 16; ++k) {
        for (int row = 0; row < 16 && !product.a[0]; ++row) {
          a[row][k] = operand_at<T>(a_descriptor, trans_a, first_row + row, k);
        }
        for (int n = 0; n < 8 * N; ++n) b[k][n] = operand_at<T>(b_descriptor, trans_b, n, k);
      }
      for (int lane = 0; lane < WARP && product.a[0]; ++lane) set_a<T>(a, lane, *product.a[lane]);
      multiply<N>(product.d, a, b, add);
    }}));
  });
}

// Moves 8x8 matrices between registers and shared memory. Lane 8 i + j gives the address of row j
// of matrix i. f(register, address) is called for the two elements of each, which have 16 bits.
template <int COUNT, bool TRANSPOSED, class Register, class F>
void move_matrices(const char* name, unsigned address, Register (&registers)[COUNT], F f) {
  struct Argument {
    unsigned address;
    unsigned* registers;
  } argument = {address, const_cast<unsigned*>(registers)};
  collective(name, argument, [f](Argument** lanes) {
    for (int lane = 0; lane < WARP; ++lane) {
      for (int i = 0; i < 2 * COUNT; ++i) {
        const int row = TRANSPOSED ? lane % 4 * 2 + i % 2 : lane / 4;
        const int column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + i % 2;
        const unsigned line = lanes[i / 2 * 8 + row]->address;
        if (line % 16) fail("a row of a matrix is not aligned");
        f(reinterpret_cast<unsigned short*>(&lanes[lane]->registers[i / 2])[i % 2],
          *shared_pointer<unsigned short>(line + column * 2));
      }
    }
  });
}

}  // namespace emulator

// ---- atomics.cuh ----

inline void red_add(float* address, float value) { *address += value; }
inline void red_add(float* address, const float (&v)[4]) {
  for (int i = 0; i < 4; ++i) address[i] += v[i];
}
inline int load_acquire(const int* address) {
  emulator::wait_until("a flag", [] { return true; });
  return *address;
}
inline void wait_flag(const int* flag, int value) {
  emulator::wait_until("a flag", [=] { return *flag == value; });
}
inline void wait_flag_fenced(const int* flag, int value) { wait_flag(flag, value); }
inline void release_flag(int* flag) { ++*flag; }
inline int count_in(int* flag, int last) {
  return atomicInc(reinterpret_cast<unsigned*>(flag), last);
}
inline int count_acq_rel(int* flag, int last) { return count_in(flag, last); }
inline void release_flag_wrapping(int* flag, int last) { count_in(flag, last); }
inline void count_wrapping(int* flag, int last) { count_in(flag, last); }

// ---- cp_async.cuh ----

inline uint32_t smem_address(const void* pointer) { return emulator::shared_address(pointer); }
inline void cp_async_16(uint32_t dst, const void* src, bool valid) {
  emulator::fiber().copies.add(emulator::begin_copy([=] {
    const uint4 zeros = {};
    std::memcpy(emulator::shared_pointer<uint4>(dst), valid ? src : &zeros, 16);
  }));
}
inline void cp_async_stream_16(uint32_t dst, const void* src, bool valid) {
  cp_async_16(dst, src, valid);
}
inline void cp_async_commit() { emulator::fiber().copies.commit(); }
template <int N>
void cp_async_wait() {
  emulator::fiber().copies.wait(N);
}
template <int ARCH>
void copies_commit() {
  cp_async_commit();
}
template <int ARCH>
void copies_wait() {
  cp_async_wait<0>();
}
inline void copy_16(uint32_t dst, const void* src, bool valid) {
  *emulator::shared_pointer<uint4>(dst) = valid ? *static_cast<const uint4*>(src) : uint4{};
}

// ---- dependent_launch.cuh ----

inline void wait_for_previous_kernel() {}
inline void launch_next_kernel() {}

// ---- ld_global.cuh, ld_global_if.cuh, relaxed.cuh, st_global.cuh ----

inline uint4 ld_global_stream_128(const void* address) {
  return *static_cast<const uint4*>(address);
}
inline uint4 ld_global_once_128(const void* address) { return ld_global_stream_128(address); }
inline uint2 ld_global_once_64(const void* address) { return *static_cast<const uint2*>(address); }
inline uint4 ld_global_cg_128(const void* address) { return ld_global_stream_128(address); }
template <typename T>
T ld_global_cg(const T* address) {
  return *address;
}
inline void prefetch_l2(const void*) {}
inline uint4 ld_global_if_128(const void* address, bool condition) {
  return condition ? ld_global_stream_128(address) : uint4{};
}
inline uint2 ld_global_if_64(const void* address, bool condition) {
  return condition ? *static_cast<const uint2*>(address) : uint2{};
}
inline void st_global_128(void* address, uint4 v, bool valid = true) {
  if (valid) *static_cast<uint4*>(address) = v;
}
inline void st_global_stream_128(void* address, uint4 v) { st_global_128(address, v); }

// ---- ldmatrix.cuh, stmatrix.cuh ----

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  emulator::move_matrices<4, false>("ldmatrix", address, r,
                                    [](auto& element, auto& memory) { element = memory; });
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  emulator::move_matrices<4, true>("ldmatrix", address, r,
                                   [](auto& element, auto& memory) { element = memory; });
}
inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  emulator::move_matrices<4, false>("stmatrix", address, r,
                                    [](auto& element, auto& memory) { memory = element; });
}
inline void stmatrix_x2(uint32_t address, const uint32_t (&r)[2]) {
  emulator::move_matrices<2, false>("stmatrix", address, r,
                                    [](auto& element, auto& memory) { memory = element; });
}
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  emulator::move_matrices<4, true>("stmatrix", address, r,
                                   [](auto& element, auto& memory) { memory = element; });
}
inline uint32_t movmatrix_trans(uint32_t r) {
  struct Argument {
    uint32_t in, out;
  } argument = {r, 0};
  emulator::collective("movmatrix", argument, [](Argument** lanes) {
    for (int lane = 0; lane < emulator::WARP; ++lane) {
      for (int i = 0; i < 2; ++i) {
        const int row = lane % 4 * 2 + i, column = lane / 4;
        lanes[lane]->out |= (lanes[row * 4 + column / 2]->in >> column % 2 * 16 & 0xffff) << 16 * i;
      }
    }
  });
  return argument.out;
}
inline void st_shared_32(uint32_t address, uint32_t value) {
  *emulator::shared_pointer<uint32_t>(address) = value;
}
inline void st_shared_128(uint32_t address, uint4 v) {
  *emulator::shared_pointer<uint4>(address) = v;
}
inline void st_shared_128(uint32_t address, const float (&v)[4]) {
  *emulator::shared_pointer<float4>(address) = {v[0], v[1], v[2], v[3]};
}
inline uint4 ld_shared_128(uint32_t address) { return *emulator::shared_pointer<uint4>(address); }

// ---- math.cuh ----

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float PI = 3.1415926535897932f;

inline float exp2_approx(float x) { return emulator::flushed(exp2f(emulator::flushed(x))); }
inline float rcp_approx(float x) { return emulator::flushed(1.f / emulator::flushed(x)); }
inline float sqrt_approx(float x) { return sqrtf(emulator::flushed(x)); }
inline float sin_approx(float x) { return sinf(x); }
inline float cos_approx(float x) { return cosf(x); }
inline float log2_accurate(float x, int exponent = 0) { return log2f(x) + float(exponent); }
inline float log2_of_sum(float x) { return x == x ? log2_accurate(x) : x; }
inline float cvt_f32_f16(uint16_t bits) { return emulator::to_float<half_t>(bits); }
inline uint16_t cvt_f16_f32(float x) { return emulator::from_float<half_t>(x); }
inline uint64_t mul_wide(uint32_t a, uint32_t b) { return uint64_t(a) * b; }
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  return emulator::of_pair<bfloat16_t>(a, b, [](float a, float b) { return a * b; });
}
inline uint32_t min_bf16x2(uint32_t a, uint32_t b) {
  return emulator::of_pair<bfloat16_t>(a, b, emulator::min_nan);
}
inline uint32_t min_f16x2(uint32_t a, uint32_t b) {
  return emulator::of_pair<half_t>(a, b, emulator::min_nan);
}
inline uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  return emulator::of_pair<half_t>(a, b, [](float a, float b) { return a - b; });
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  return emulator::of_pair<half_t>(a, b, [](float a, float b) { return a * b; });
}
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto of = [shift](uint32_t x) { return cvt_f32_f16(uint16_t(x >> shift)); };
    r |= uint32_t(cvt_f16_f32(float(double(of(a)) * of(b) + of(c)))) << shift;
  }
  return r;
}
inline uint32_t cvt_f16x2_e4m3x2(uint16_t bits) {
  const auto of_byte = [](uint32_t x) {
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    const float size =
        (x & 0x7f) == 0x7f ? NAN : ldexpf(mantissa + (exponent ? 8 : 0), max(exponent, 1) - 10);
    return uint32_t(cvt_f16_f32(x & 0x80 ? -size : size));
  };
  return of_byte(bits & 0xff) | of_byte(bits >> 8) << 16;
}
inline float tanh_exp2(float x) {
  return 1.f - 2.f * rcp_approx(1.f + exp2_approx(2.f * LOG2E * x));
}
inline float clamp_nan(float x, float limit) {
  return emulator::max_nan(emulator::min_nan(x, limit), -limit);
}
template <typename T, int ARCH>
uint32_t pack(float lo, float hi) {
  return emulator::from_float<T>(lo) | uint32_t(emulator::from_float<T>(hi)) << 16;
}

// ---- mbarrier.cuh ----

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  emulator::block.barriers[barrier] = {arrivals, arrivals};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) { emulator::arrive_transaction(barrier, 0); }
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emulator::arrive_transaction(barrier, bytes);
}
inline void wait_for_loads(uint32_t) {}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::TransactionBarrier& at = emulator::barrier_at(barrier);
  emulator::wait_until("an mbarrier", [&at, parity] { return at.phase % 2 != parity; });
}

// ---- mma.cuh ----

template <typename T, int ARCH>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Argument {
    emulator::Fragment d;
    const uint32_t (*a)[4];
    uint32_t b[2];
  } argument = {&d, &a, {b0, b1}};
  emulator::collective("mma", argument, [](Argument** lanes) {
    static float a[16][16], b[16][8];
    emulator::Fragment d[emulator::WARP];
    for (int lane = 0; lane < emulator::WARP; ++lane) {
      d[lane] = lanes[lane]->d;
      emulator::set_a<T>(a, lane, *lanes[lane]->a);
      for (int i = 0; i < 4; ++i) {
        b[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] =
            emulator::to_float<T>(lanes[lane]->b[i / 2] >> i % 2 * 16);
      }
    }
    emulator::multiply<1>(d, a, b, true);
  });
}

// ---- opaque.cuh, permute.cuh ----

template <typename T>
T opaque(T x) {
  return x;
}
inline uint32_t opaque_bits(float x) { return __float_as_uint(x); }
inline int fresh_thread_index() { return threadIdx.x; }
inline uint32_t fresh_grid_size() { return gridDim.x; }
inline void forget_registers() {}
inline uint32_t repeat_signs(uint32_t first, uint32_t second, uint32_t bytes) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const int number = bytes >> 4 * i & 7;
    if ((number < 4 ? first : second) >> (number % 4 * 8 + 7) & 1) result |= 0xffu << 8 * i;
  }
  return result;
}

// ---- tma.cuh ----

inline void tma_prefetch(const TensorMap&) {}
inline void tma_load(uint32_t dst, const TensorMap& map, uint32_t barrier, int column, int row,
                     int head, int batch) {
  const emulator::EmulatedMap at = emulator::map_of(map);
  const unsigned bytes = at.box_columns * at.box_rows * int(at.strides[0]);
  emulator::begin_counted_copy(barrier, bytes, [=] {
    emulator::for_elements(at, dst, {column, row, head, batch}, [](char* to, char* from, int size) {
      from ? std::memcpy(to, from, size) : std::memset(to, 0, size);
    });
  });
}
inline void tma_prefetch_tile(const TensorMap&, int, int, int, int) {}
inline void tma_store(const TensorMap& map, uint32_t src, int column, int row, int head,
                      int batch) {
  const emulator::EmulatedMap at = emulator::map_of(map);
  emulator::fiber().bulk.add(emulator::begin_copy([=] {
    emulator::for_elements(at, src, {column, row, head, batch}, [](char* from, char* to, int size) {
      if (to) std::memcpy(to, from, size);
    });
  }));
}
inline void tensor_map_set_rows(TensorMap& map, uint32_t rows) {
  emulator::EmulatedMap changed = emulator::map_of(map);
  changed.dims[1] = rows;
  std::memcpy(&map, &changed, sizeof changed);
}
inline void tensor_map_acquire(const TensorMap&) {}
inline void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
  emulator::begin_counted_copy(
      barrier, bytes, [=] { std::memcpy(emulator::shared_pointer<uint4>(dst), src, bytes); });
}
inline void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  emulator::begin_bulk(src, bytes, [=](const char* data) { std::memcpy(dst, data, bytes); });
}
inline void bulk_reduce_add(float* dst, uint32_t src, uint32_t bytes) {
  emulator::begin_bulk(src, bytes, [=](const char* data) {
    for (unsigned i = 0; i < bytes / 4; ++i) dst[i] += reinterpret_cast<const float*>(data)[i];
  });
}
inline void bulk_commit() {
  emulator::fiber().bulk.commit();
  emulator::fiber().bulk_writes.commit();
}
template <int N>
void bulk_wait_read() {
  emulator::fiber().bulk.wait(N);
}
template <int N>
void bulk_wait() {
  bulk_wait_read<N>();
  emulator::fiber().bulk_writes.wait(N);
}
inline void bulk_wait_done() { bulk_wait<0>(); }
inline void fence_async_proxy() {}

// ---- warpgroup.cuh ----

constexpr int WARPGROUP = 128;
inline int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
inline int warpgroup_index() { return threadIdx.x / WARPGROUP; }
inline int warp_in_warpgroup() { return threadIdx.x / 32 % 4; }
inline bool elect_one() { return emulator::lane() == 0; }
template <int N>
void dealloc_registers() {}
template <int N>
void alloc_registers() {}
template <typename Barrier>
void named_barrier_sync(Barrier barrier, int threads) {
  emulator::meet(static_cast<int>(barrier), threads);
}
template <typename Barrier>
void named_barrier_arrive(Barrier barrier, int threads) {
  emulator::arrive(static_cast<int>(barrier), threads);
}

// ---- wgmma.cuh ----

inline void wgmma_fence() {}
inline void wgmma_commit() {
  int none = 0;
  emulator::collective("wgmma.commit_group", none, [](int**) {
    emulator::Groups& products = emulator::warp().products;
    products.commit();
    if (products.committed.size() == 1 && emulator::toss()) products.wait(0);
  });
}
template <int N>
void wgmma_wait() {
  int none = 0;
  emulator::collective("wgmma.wait_group", none, [](int**) { emulator::warp().products.wait(N); });
}
template <typename T>
void pin(T&) {}
template <int ROW_BYTES>
uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes) {
  return (ROW_BYTES == 128 ? 1ull : 2ull) << 62 | uint64_t(8 * ROW_BYTES / 16) << 32 |
         uint64_t(leading_bytes / 16) << 16 | (address / 16 & 0x3fff);
}
template <typename T, int TRANS_A, int TRANS_B, int N>
void wgmma(float (&d)[N][4], uint64_t a, uint64_t b, int add) {
  emulator::add_product<T>(d, nullptr, a, TRANS_A, b, TRANS_B, add);
}
template <typename T, int TRANS_B, int N>
void wgmma(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b, int add) {
  emulator::add_product<T>(d, &a, 0, false, b, TRANS_B, add);
}
