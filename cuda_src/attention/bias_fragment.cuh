// The bias of an accumulator fragment in registers, so that it can be loaded while the product that
// makes the scores runs: from the L2 it takes as long as that product.
#pragma once
#include "../ptx/stmatrix.cuh"
#include "bias.cuh"
#include "store_rows.cuh"

// Two neighbouring elements: halves of a word, or two words of float32.
template <typename T, int BIAS>
struct BiasPair {
  using Element = BiasElement<T, BIAS>;
  static constexpr int WORDS = sizeof(Element) == 4 ? 2 : 1;
  uint32_t words[WORDS];

  __device__ Element first() const { return element(words[0]); }
  __device__ Element second() const {
    return element(WORDS == 2 ? words[WORDS - 1] : words[0] >> 16);
  }

  __device__ void join(Element first, Element second) {
    if constexpr (WORDS == 2) {
      words[0] = bits(first);
      words[1] = bits(second);
    } else {
      words[0] = bits(first) | bits(second) << 16;
    }
  }

  // From an aligned address.
  __device__ void load(const Element* from) {
    if constexpr (WORDS == 2) {
      const uint2 pair = *reinterpret_cast<const uint2*>(from);
      words[0] = pair.x;
      words[1] = pair.y;
    } else if constexpr (sizeof(Element) == 2) {
      words[0] = *reinterpret_cast<const uint32_t*>(from);
    } else {
      words[0] = spread(*reinterpret_cast<const uint16_t*>(from));
    }
  }

  // The two lower bytes, each in a half of its own.
  __device__ static uint32_t spread(uint32_t bytes) { return __byte_perm(bytes, 0, 0x4140); }

  // Of 8 x 8 elements, two of them a lane.
  __device__ void transpose() {
    if constexpr (WORDS == 2) {
      const uint32_t low = movmatrix_trans(__byte_perm(words[0], words[1], 0x5410));
      const uint32_t high = movmatrix_trans(__byte_perm(words[0], words[1], 0x7632));
      words[0] = __byte_perm(low, high, 0x5410);
      words[1] = __byte_perm(low, high, 0x7632);
    } else {
      words[0] = movmatrix_trans(words[0]);
    }
  }

 private:
  __device__ static uint32_t bits(float x) { return __float_as_uint(x); }
  __device__ static uint32_t bits(uint8_t x) { return x; }
  __device__ static uint32_t bits(half_t x) { return x.bits; }
  __device__ static uint32_t bits(bfloat16_t x) { return x.bits; }

  __device__ static Element element(uint32_t word) {
    if constexpr (BIAS == 1) {
      return {static_cast<uint16_t>(word)};
    } else if constexpr (BIAS == 2) {
      return static_cast<uint8_t>(word);
    } else {
      return __uint_as_float(word);
    }
  }
};

// BIAS as in bias.cuh; 0 takes no registers.
//
// Lanes load eight columns of a row at once, and exchange them within their quad afterwards: 16
// bytes a lane instead of 4 are a quarter of the requests. A bias that does not allow it, or ends
// in these columns, is read when it is added: one path for both would wait for the loads where they
// meet.
template <typename T, int BIAS, int N>
struct BiasFragment {
  using Pair = BiasPair<T, BIAS>;
  using Element = typename Pair::Element;
  using Head = BiasHead<const Element>;
  static constexpr bool OCTETS = Pair::WORDS == 1;
  static_assert(N % 4 == 0, "a quad exchanges four times eight columns");

  Pair pairs[N][2];  // pair j of the quad's lane c is still that of lane j and columns c
  bool loaded;

  // row and col are those of acc[0][0] in this lane.
  __device__ __forceinline__ void load(const Head& head, int row, int col) {
    const int place = threadIdx.x % 4;  // in the quad
    const int alignment = OCTETS ? 8 : 2;
    loaded = head.col_stride == 1 && head.row_stride % alignment == 0 &&
             reinterpret_cast<uint64_t>(head.data) % (alignment * sizeof(Element)) == 0 &&
             col - place * 2 + N * 8 <= head.cols;
    if (!loaded) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Element* from = head.data + min(row + half * 8, head.rows - 1) * head.row_stride + col;
      if constexpr (OCTETS) {
#pragma unroll
        for (int n = 0; n < N; n += 4) load_octet(n, half, from + place * 6 + n * 8);
      } else {
#pragma unroll
        for (int n = 0; n < N; ++n) pairs[n][half].load(from + n * 8);
      }
    }
  }

  // The arguments of load(); unit: one unit of the bias in the units of the score.
  __device__ __forceinline__ void add_to(float (&acc)[N][4], const Head& head, int row, int col,
                                         float unit) {
    if (!loaded) {
      head.add_to(acc, row, col, unit);
      return;
    }
    if constexpr (OCTETS) exchange();
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        acc[n][2 * half] = add_bias(acc[n][2 * half], pairs[n][half].first(), unit);
        acc[n][2 * half + 1] = add_bias(acc[n][2 * half + 1], pairs[n][half].second(), unit);
      }
    }
  }

 private:
  // Eight columns: four pairs.
  __device__ __forceinline__ void load_octet(int n, int half, const Element* from) {
    if constexpr (OCTETS && sizeof(Element) == 2) {
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      pairs[n][half].words[0] = x.x;
      pairs[n + 1][half].words[0] = x.y;
      pairs[n + 2][half].words[0] = x.z;
      pairs[n + 3][half].words[0] = x.w;
    } else if constexpr (OCTETS) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      pairs[n][half].words[0] = Pair::spread(x.x);
      pairs[n + 1][half].words[0] = Pair::spread(x.x >> 16);
      pairs[n + 2][half].words[0] = Pair::spread(x.y);
      pairs[n + 3][half].words[0] = Pair::spread(x.y >> 16);
    }
  }

  __device__ __forceinline__ void exchange() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < N; n += 4) {
        uint32_t quad[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) quad[j] = pairs[n + j][half].words[0];
        quad_transpose(quad);
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[n + j][half].words[0] = quad[j];
      }
    }
  }
};

template <typename T, int N>
struct BiasFragment<T, 0, N> {};

// On a fragment whose rows are keys and whose columns are queries: loaded as it lies in memory, in
// pairs of keys, and transposed matrix by matrix. key and query are those of acc[0][0] in this
// lane.
template <typename T, int BIAS, int N>
__device__ __forceinline__ void add_bias_transposed(
    float (&acc)[N][4], const BiasHead<const BiasElement<T, BIAS>>& head, int key, int query,
    float unit) {
  const int lane = threadIdx.x % 32;
  const int first_key = key - lane / 4;  // of the fragment
  const int first_query = query - lane % 4 * 2;
  if (!head.has_pairs() || first_key + 16 > head.cols) {
    head.transposed().add_to(acc, key, query, unit);
    return;
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int row = min(first_query + n * 8 + lane / 4, head.rows - 1);
    const auto* from = head.data + row * head.row_stride + first_key + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      BiasPair<T, BIAS> pair;
      pair.load(from + half * 8);
      pair.transpose();
      acc[n][2 * half] = add_bias(acc[n][2 * half], pair.first(), unit);
      acc[n][2 * half + 1] = add_bias(acc[n][2 * half + 1], pair.second(), unit);
    }
  }
}
