// key_mask.cuh for the sm_90 kernels, which may have TMA load the bias: in shared memory and in the
// roles of the warps, a bias with a key mask is a bias like any other.
#pragma once
#include "key_mask.cuh"
#include "score.cuh"

constexpr BiasKind BY_TMA = BiasKind::DTYPE_OF_Q_BY_TMA;
constexpr BiasKind MASKED_BY_TMA = static_cast<BiasKind>(KeyMaskKind::WITH_DTYPE_OF_Q_BY_TMA);

template <int HEAD_DIM, int BLOCK_M, int BLOCK_N, int Q_STAGES, int KV_STAGES, BiasKind BIAS>
struct FwdLayout;
template <int HEAD_DIM, int BLOCK_M, int BLOCK_N, int Q_STAGES, int KV_STAGES>
struct FwdLayout<HEAD_DIM, BLOCK_M, BLOCK_N, Q_STAGES, KV_STAGES, MASKED_BY_TMA>
    : FwdLayout<HEAD_DIM, BLOCK_M, BLOCK_N, Q_STAGES, KV_STAGES, BY_TMA> {};

template <class Options, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int STAGES>
struct BwdLayout;
template <typename T, bool SOFTCAP, bool ALIBI, bool DROPOUT, int HEAD_DIM, int BLOCK_M,
          int BLOCK_N, int STAGES>
struct BwdLayout<ScoreOptions<T, SOFTCAP, ALIBI, MASKED_BY_TMA, DROPOUT>, HEAD_DIM, BLOCK_M,
                 BLOCK_N, STAGES> : BwdLayout<ScoreOptions<T, SOFTCAP, ALIBI, BY_TMA, DROPOUT>,
                                              HEAD_DIM, BLOCK_M, BLOCK_N, STAGES> {};

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
    const KeyBits bits(Base::params.bias, at.batch);
    if constexpr (ROWS == Rows::QUERIES) {
      bits.apply(s, at.col);
    } else {
      bits.apply_transposed(s, at.row);
    }
  }
};
