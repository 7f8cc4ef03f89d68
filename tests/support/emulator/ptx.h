// The instructions that cuda_src/ptx wraps, on a CPU: the same functions, by the PTX ISA. What they
// are for stands there. Fragments of matrices are laid out as mma.cuh and wgmma.cuh say.
#pragma once
#include "cuda.h"

namespace emulator {

// ---- 16-bit numbers ----

template <typename T>
float to_float(unsigned short bits) {
  return float_of(bits, T::IS_BFLOAT16);
}
template <typename T>
unsigned short from_float(float x) {
  return bits_of(x, T::IS_BFLOAT16);
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
inline float min_nan(float a, float b) { return a != a ? a : b != b ? b : min(a, b); }
inline float max_nan(float a, float b) { return a != a ? a : b != b ? b : max(a, b); }

static_assert(sizeof(EmulatedMap) <= sizeof(TensorMap));

}  // namespace emulator

// ---- atomics.cuh ----

inline void red_add(float* address, float value) { *address += value; }
inline void red_add(float* address, const float (&v)[4]) {
  for (int i = 0; i < 4; ++i) address[i] += v[i];
}
inline uint64_t atom_add(uint64_t* address, uint64_t value) { return atomicAdd(address, value); }
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
  emulator::copy_async(dst, src, valid);
}
inline void cp_async_stream_16(uint32_t dst, const void* src, bool valid) {
  cp_async_16(dst, src, valid);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int N>
void cp_async_wait() {
  emulator::wait_copies(N);
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
inline uint4 ld_cg_if_128(const void* address, bool condition) {
  return ld_global_if_128(address, condition);
}
inline float2 ld_cg_if(const float2* address, bool condition) {
  return condition ? *address : float2{};
}
inline void st_global_128(void* address, uint4 v, bool valid = true) {
  if (valid) *static_cast<uint4*>(address) = v;
}
inline void st_global_stream_128(void* address, uint4 v) { st_global_128(address, v); }

// ---- ldmatrix.cuh, stmatrix.cuh ----

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  emulator::load_matrices(r, 4, false, address);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  emulator::load_matrices(r, 4, true, address);
}
inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  emulator::store_matrices(r, 4, false, address);
}
inline void stmatrix_x2(uint32_t address, const uint32_t (&r)[2]) {
  emulator::store_matrices(r, 2, false, address);
}
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  emulator::store_matrices(r, 4, true, address);
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
inline uint32_t cvt_f16x2_e4m3x2_upper(uint32_t bits) { return cvt_f16x2_e4m3x2(bits >> 16); }
inline float tanh_of_log2(float x) { return fmaf(-2.f, rcp_approx(1.f + exp2_approx(x)), 1.f); }
inline float tanh_exp2(float x) {
  return 1.f - 2.f * rcp_approx(1.f + exp2_approx(2.f * LOG2E * x));
}
inline float min_nan(float a, float b) { return emulator::min_nan(a, b); }
inline float max_nan(float a, float b) { return emulator::max_nan(a, b); }
inline float clamp_nan(float x, float limit) {
  return emulator::max_nan(emulator::min_nan(x, limit), -limit);
}
template <typename T, int ARCH>
uint32_t pack(float lo, float hi) {
  return emulator::from_float<T>(lo) | uint32_t(emulator::from_float<T>(hi)) << 16;
}

// ---- mbarrier.cuh ----

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  emulator::begin_barrier(barrier, arrivals);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) { emulator::arrive_transaction(barrier, 0); }
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emulator::arrive_transaction(barrier, bytes);
}
inline void wait_for_loads(uint32_t) {}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::wait_transaction(barrier, parity);
}

// ---- mma.cuh ----

template <typename T, int ARCH>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::add_mma(&d, &a, b0, b1, T::IS_BFLOAT16);
}

// ---- opaque.cuh, permute.cuh ----

template <typename T>
T opaque(T x) {
  return x;
}
inline const unsigned char* opaque_step(const unsigned char* from, int index, int stride) {
  return from + int64_t(index) * stride;
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
  emulator::load_tile(dst, {&map, {column, row, head, batch}}, barrier);
}
inline void tma_prefetch_tile(const TensorMap&, int, int, int, int) {}
inline void tma_store(const TensorMap& map, uint32_t src, int column, int row, int head,
                      int batch) {
  emulator::store_tile({&map, {column, row, head, batch}}, src);
}
inline void tensor_map_set_rows(TensorMap& map, uint32_t rows) {
  reinterpret_cast<emulator::EmulatedMap&>(map).dims[1] = rows;
}
inline void tensor_map_set_address(TensorMap& map, const void* address) {
  reinterpret_cast<emulator::EmulatedMap&>(map).base = (char*)address;
}
inline void tensor_map_acquire(const TensorMap&) {}
inline void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
  emulator::load_bulk(dst, src, bytes, barrier);
}
inline void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  emulator::store_bulk(dst, src, bytes);
}
inline void bulk_reduce_add(float* dst, uint32_t src, uint32_t bytes) {
  emulator::add_bulk(dst, src, bytes);
}
inline void bulk_commit() { emulator::commit_bulk(); }
template <int N>
void bulk_wait_read() {
  emulator::wait_bulk_read(N);
}
template <int N>
void bulk_wait() {
  emulator::wait_bulk(N);
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
inline void wgmma_commit() { emulator::commit_products(); }
template <int N>
void wgmma_wait() {
  emulator::wait_products(N);
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
  emulator::add_product(d, nullptr, {a, b, TRANS_A, TRANS_B, bool(add), T::IS_BFLOAT16, N});
}
template <typename T, int TRANS_B, int N>
void wgmma(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b, int add) {
  emulator::add_product(d, &a, {0, b, false, TRANS_B, bool(add), T::IS_BFLOAT16, N});
}
