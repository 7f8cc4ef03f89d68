// key_mask.cuh for the sm_90 kernels, which may have TMA load the bias: in shared memory and in the
// roles of the warps, a bias with a key mask is a bias like any other.
#pragma once
#include "../../ptx/permute.cuh"
#include "../key_mask.cuh"
#include "../score.cuh"

constexpr BiasKind BY_TMA = BiasKind::DTYPE_OF_Q_BY_TMA;
constexpr BiasKind MASKED_BY_TMA = static_cast<BiasKind>(KeyMaskKind::WITH_DTYPE_OF_Q_BY_TMA);

template <int HEAD_DIM, int HEAD_DIM_V, int BLOCK_M, int BLOCK_N, int Q_STAGES, int KV_STAGES,
          BiasKind BIAS>
struct FwdLayout;
template <int HEAD_DIM, int HEAD_DIM_V, int BLOCK_M, int BLOCK_N, int Q_STAGES, int KV_STAGES>
struct FwdLayout<HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, Q_STAGES, KV_STAGES, MASKED_BY_TMA>
    : FwdLayout<HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, Q_STAGES, KV_STAGES, BY_TMA> {};

template <class Options, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int STAGES, bool WALKS_UP,
          bool WHOLE_HEADS>
struct BwdLayout;
template <typename T, bool SOFTCAP, bool ALIBI, bool DROPOUT, int HEAD_DIM, int BLOCK_M,
          int BLOCK_N, int STAGES, bool WALKS_UP, bool WHOLE_HEADS>
struct BwdLayout<ScoreOptions<T, SOFTCAP, ALIBI, MASKED_BY_TMA, DROPOUT>, HEAD_DIM, BLOCK_M,
                 BLOCK_N, STAGES, WALKS_UP, WHOLE_HEADS>
    : BwdLayout<ScoreOptions<T, SOFTCAP, ALIBI, BY_TMA, DROPOUT>, HEAD_DIM, BLOCK_M, BLOCK_N,
                STAGES, WALKS_UP, WHOLE_HEADS> {};

// The bits of a tile of 8 * N keys from `key` on, a multiple of 8 * OCTETS.
template <BiasKind KIND, int N>
struct SeenKeys;
template <int N>
struct SeenKeys<MASKED_BY_TMA, N> {
  static constexpr int OCTETS = N % 4 == 0 ? 4 : 2;  // of keys in a word
  uint32_t words[N / OCTETS];

  __device__ SeenKeys(const void* record, int batch, int key) {
    const KeyBits bits(record, batch);
#pragma unroll
    for (int i = 0; i < N / OCTETS; ++i) {
      words[i] = OCTETS == 4 ? bits.words[uint32_t(key) / 32 + i] : bits.sixteen(key + i * 16);
    }
  }

  // Replaces the numbers of unseen keys by -inf. `pair` is that of this lane's two keys in octet n
  // of the tile. Their bits are shifted to where the signs of bytes are, and repeated from there.
  template <typename T>
  __device__ uint32_t apply(uint32_t pair, int n) const {
    const int own = threadIdx.x % 4 * 2;  // the place of the two in every eight
    const uint32_t word = words[n / OCTETS];
    const uint32_t bytes = 0xcc88 + n % OCTETS * 0x1111;
    const uint32_t seen = repeat_signs(word << (7 - own), word << (6 - own), bytes);
    return (pair & seen) | ((T::IS_BFLOAT16 ? 0xff80ff80u : 0xfc00fc00u) & ~seen);
  }
};

template <typename T, bool SOFTCAP, bool ALIBI, bool DROPOUT, class Params>
struct Score<ScoreOptions<T, SOFTCAP, ALIBI, MASKED_BY_TMA, DROPOUT>, Params>
    : Score<ScoreOptions<T, SOFTCAP, ALIBI, BY_TMA, DROPOUT>, Params> {
  using Base = Score<ScoreOptions<T, SOFTCAP, ALIBI, BY_TMA, DROPOUT>, Params>;
  using Base::Base;

  template <Rows ROWS, int N, class AddBiasTile>
  __device__ __forceinline__ void apply(float (&s)[N][4], const ScorePlace<ROWS>& at,
                                        AddBiasTile add_bias_tile) const {
    Base::apply_softcap(s);
    apply_position_terms(s, at, add_bias_tile);
  }

  template <Rows ROWS, int N, class AddBiasTile>
  __device__ __forceinline__ void apply_position_terms(float (&s)[N][4], const ScorePlace<ROWS>& at,
                                                       AddBiasTile add_bias_tile) const {
    Base::apply_position_terms(s, at, add_bias_tile);
    if constexpr (ROWS == Rows::KEYS) {
      KeyBits(Base::params.bias, at.batch).apply_transposed(s, at.row);
    }
  }
};
