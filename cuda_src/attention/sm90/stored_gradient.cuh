// The gradient of a bias that has an element for each score, in flash_bwd_sm90.cu: dS, which every
// step leaves in shared memory for dQ = dS K, is that gradient, so the consumers store it in the
// dtype of q, and no element is added to. A softcap would put its slope between the two.
//
// The host includes this header before the source, for one more kind of bias: TMA loads it, and
// params.dbias has rows of whole 16 bytes. Key tiles and query tiles that do not meet are not
// visited; the host fills dbias with zeros where a mask leaves such tiles.
#pragma once
#include "../../ptx/st_global.cuh"
#include "../key_mask.cuh"
#include "bwd_consumer.cuh"

// This number continues KeyMaskKind.
enum class StoredGradientKind {
  DTYPE_OF_Q_BY_TMA = static_cast<int>(KeyMaskKind::WITH_DTYPE_OF_Q_BY_TMA) + 1,
};
constexpr BiasKind STORED_GRADIENT = static_cast<BiasKind>(StoredGradientKind::DTYPE_OF_Q_BY_TMA);

template <typename T, bool ALIBI, bool DROPOUT>
using StoringOptions = ScoreOptions<T, false, ALIBI, STORED_GRADIENT, DROPOUT>;

// To all that is not specialised here, the bias is one that TMA loads.
template <typename T, bool ALIBI, bool DROPOUT>
struct ScoreOptions<T, false, ALIBI, STORED_GRADIENT, DROPOUT>
    : ScoreOptions<T, false, ALIBI, BiasKind::DTYPE_OF_Q_BY_TMA, DROPOUT> {
  using StoresGradient = void;
};

// Takes the place of the additions of score_gradient.cuh.
template <class Options, Rows ROWS, int N, class = typename Options::StoresGradient>
__device__ __forceinline__ void add_bias_gradient(const float (&)[N][4], const FlashBwdParams&,
                                                  const ScorePlace<ROWS>&) {}

// The layout under another name, with which the consumer below finds the one that it extends.
template <class L>
struct SameLayout : L {};

// A consumer that stores its part of dS after each step.
template <typename T, bool ALIBI, bool DROPOUT, auto... SIZES>
struct BwdConsumer<StoringOptions<T, ALIBI, DROPOUT>,
                   BwdLayout<StoringOptions<T, ALIBI, DROPOUT>, SIZES...>>
    : BwdConsumer<StoringOptions<T, ALIBI, DROPOUT>,
                  SameLayout<BwdLayout<StoringOptions<T, ALIBI, DROPOUT>, SIZES...>>> {
  using L = BwdLayout<StoringOptions<T, ALIBI, DROPOUT>, SIZES...>;
  using Base = BwdConsumer<StoringOptions<T, ALIBI, DROPOUT>, SameLayout<L>>;
  using Base::Base;
  using typename Base::BlockTile;
  using typename Base::Gradient;
  static_assert(!L::OVERLAPPED && !L::WALKS_UP, "the kernel calls steps()");

  // steps() of the base, each followed by the store.
  __device__ __forceinline__ void steps(Gradient& acc_dk, Gradient& acc_dv, const BlockTile& tile,
                                        int head) {
    const int m_begin = uniform(tile.m_range.begin);
    const int inner_begin = max(uniform(tile.m_range.inner_begin), m_begin);
    const int inner_end = uniform(tile.m_range.inner_end);
#pragma unroll 1
    for (int m = uniform(tile.m_range.end) - 1; m >= m_begin;) {
#pragma unroll 1
      for (; m >= m_begin && (m >= inner_end || m < inner_begin); --m)
        step(acc_dk, acc_dv, tile, head, m * L::BLOCK_M, MASKED);
#pragma unroll 1
      for (; m >= inner_begin; --m) step(acc_dk, acc_dv, tile, head, m * L::BLOCK_M, UNMASKED);
    }
  }

 private:
  __device__ __forceinline__ void step(Gradient& acc_dk, Gradient& acc_dv, const BlockTile& tile,
                                       int head, int m_begin, bool masked) {
    const int stage = this->ring.stage;
    Base::step(acc_dk, acc_dv, tile, head, m_begin, masked);
    store_gradient(tile, head, m_begin, stage);
  }

  // Stores dS of this warpgroup's keys, 128 bytes of a row by eight lanes. All loads from shared
  // memory are complete when this thread arrives at the barrier of the next step, behind which the
  // buffer may be written.
  __device__ __forceinline__ void store_gradient(const BlockTile& tile, int head, int m_begin,
                                                 int stage) const {
    using TileS = typename L::TileS;
    constexpr int ROWS_PER_PASS = WARPGROUP / TileS::ROW_CHUNKS;
    const FlashBwdParams& params = this->params.base;
    const int thread = fresh_thread_index() % WARPGROUP;
    const int row = thread / TileS::ROW_CHUNKS;
    const int chunk = thread % TileS::ROW_CHUNKS;
    const int key = tile.n_begin + this->group * 64 + chunk * 8;
    const int rows = key < params.shape.seqlen_k ? params.shape.seqlen_q - m_begin - row : 0;
    const uint32_t from = this->smem + L::DS_OFFSET + stage * TileS::BYTES +
                          this->group * TileS::BLOCK_BYTES + TileS::offset(row, chunk);
    const int64_t stride = opaque(params.dbias_strides.row);
    T* to = reinterpret_cast<T*>(params.dbias) + params.dbias_strides.at(tile.batch, head) +
            (m_begin + row) * stride + key;
    uint4 words[L::BLOCK_M / ROWS_PER_PASS];
#pragma unroll
    for (int pass = 0; pass < L::BLOCK_M / ROWS_PER_PASS; ++pass) {
      words[pass] = ld_shared_128(from + pass * ROWS_PER_PASS * TileS::ROW_BYTES);
    }
#pragma unroll
    for (int pass = 0; pass < L::BLOCK_M / ROWS_PER_PASS; ++pass) {
      if (pass * ROWS_PER_PASS < rows) st_global_stream_128(to, words[pass]);
      to += ROWS_PER_PASS * stride;
    }
  }
};
