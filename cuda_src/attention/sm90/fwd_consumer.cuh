// A consumer warpgroup of the sm_90 forward kernel: the steps that flash_fwd_sm90.cu puts together.
// The warpgroup owns 64 queries of each tile, a warp 16 of them; S, P and O live in its registers.
#pragma once
#include "../../common/wg_gemm.cuh"
#include "../score.cuh"
#include "../softmax.cuh"
#include "../text/key_terms.cuh"
#include "bias_tile.cuh"
#include "fwd_block.cuh"
#include "fwd_split.cuh"

// L is the FwdLayout, Options_ the ScoreOptions. With SPLIT the block has a part of the keys only.
// The accumulators are arguments of the steps, because the compiler breaks a struct up into
// registers early only if it has no arrays.
template <class Options_, class L, bool SPLIT>
struct FwdConsumer {
  using Options = Options_;
  using Layout = L;
  using T = typename Options::T;
  using Scores = float[L::BLOCK_N / 8][4];
  using Weights = uint32_t[L::BLOCK_N / 16][4];  // P as an operand
  using Output = float[L::HEAD_DIM_V / 8][4];
  using SeenByText = SeenScores<L::BLOCK_N / 8>;
  struct Seen {
    SeenKeys<Options::BIAS, L::BLOCK_N / 8> keys;
    SeenByText scores;
  };
  using Terms = typename Choose<L::HAS_KEY_TERMS, text::KeyTerms<L>, TileLines<Options, L>>::Type;
  using RowFactors = uint32_t[1][4];
  // Parts of a text (text/parts.cuh): what a lane has computed, and those of its keys.
  static constexpr bool HAS_KEY_PARTS = L::HAS_PARTS && has_part(TextParts::KEY);
  using OwnParts = text::OwnParts<L::HAS_PARTS ? L::BLOCK_N / 8 : 0>;
  using KeyParts = float[HAS_KEY_PARTS ? L::BLOCK_N / 8 : 1][2];
  static constexpr bool INNER_APART = L::INNER_APART;
  // Whether a step finds its place in registers. A load from shared memory takes hundreds of clocks
  // while the products of other warpgroups read theirs.
  static constexpr bool PLACE_IN_REGISTERS = HAS_USER_SCORE && !Terms::OF_TEXT;

  const FlashFwdSm90Params& params;
  FwdShared<L>& shared;
  const uint32_t smem;
  const int group;
  const int lane;
  const int warp_row;  // the first of the warp's 16 in the tile
  const Score<Options, FlashFwdParams> score;
  const int64_t dropout_seed;
  const FarDistances far;

  Ring<L::Q_STAGES> q_ring;
  Ring<L::BIAS_STAGES> bias_ring;
  const typename L::Tile* tile;
  int n;  // counts the key tiles down; key_tile() is the one whose scores come next, or came last
  int n_begin, n_end, inner_begin, inner_end;
  int turn;                      // that of a TurnedFwdTile
  int batch, head, first_query;  // the last one is that of this lane
  float alibi_slope;
  Terms terms;
  text::TanhSizes tanhs;  // only with HAS_SMALL_TANH
  // With the mask of a text: tiles [run_begin, n] are all inner, or all have to be masked.
  int run_begin;
  bool run_is_inner;
  Ring<L::KV_STAGES> kv_ring;  // the place of K; V follows one tile behind, in the same stages

  __device__ FwdConsumer(const FlashFwdSm90Params& params, FwdShared<L>& shared, uint32_t smem)
      : params(params),
        shared(shared),
        smem(smem),
        group(warpgroup_index() - 1),
        lane(threadIdx.x % 32),
        warp_row(group * 64 + threadIdx.x / 32 % 4 * 16),
        score(params.base),
        dropout_seed(Options::DROPOUT ? *params.base.dropout_seed : 0),
        far(text::far_or_none(params.base)),
        tile(shared.tiles + FWD_TILE_RECORDS - 1) {}

  // ---- the order of the warpgroups ----
  // The warpgroups issue their products one after the other: each waits until the one before it has
  // issued its own, so that it computes its softmax while the products of the others run. A barrier
  // counts the threads of the group that waits at it and of the group that lets it go on.
  //
  // At small head dims and with a bias, the instructions between S and the exponentials take as
  // long as these. Then the exponentials have this order, and the products need none.
  static constexpr bool ORDERS_EXPONENTIALS = L::HEAD_DIM <= 64 && L::HAS_BIAS;

  // Lets group 0 be the first.
  __device__ __forceinline__ void open_order() const {
    if (group == 0) named_barrier_arrive(order_of_group(0), 2 * WARPGROUP);
  }
  __device__ __forceinline__ void wait_for_order() const {
    named_barrier_sync(order_of_group(group), 2 * WARPGROUP);
  }
  __device__ __forceinline__ void pass_order() const {
    named_barrier_arrive(order_of_group((group + 1) % L::GROUPS), 2 * WARPGROUP);
  }
  __device__ __forceinline__ void begin_products() const {
    if constexpr (!ORDERS_EXPONENTIALS) wait_for_order();
  }
  __device__ __forceinline__ void end_products() const {
    if constexpr (!ORDERS_EXPONENTIALS) pass_order();
  }

  // ---- products ----

  __device__ __forceinline__ void issue_qk(Scores& s) {
    shared.k.wait_full(kv_ring);
    wg_gemm<T, L::HEAD_DIM / 16>(s, q_operand(), k_operand(), OVERWRITE);
  }
  // The same, and the term of a tile that is not near, whose factors are in registers that must be
  // pinned after the wait.
  __device__ __forceinline__ void issue_qk_and_term(Scores& s, RowFactors& factors, bool near) {
    const uint2 rows = terms.operand(key_tile(), near);
    factors[0][0] = rows.x;
    factors[0][1] = rows.y;
    factors[0][2] = factors[0][3] = 0u;
    shared.k.wait_full(kv_ring);
    wg_gemm_and_term<T, typename Terms::T, L::HEAD_DIM / 16>(
        s, q_operand(), k_operand(), factors,
        L::Numbers::operand(smem + L::NUMBERS_OFFSET, kv_ring.stage));
  }
  __device__ __forceinline__ auto q_operand() const {
    using TileQ = typename L::TileQ;
    return WgRowOperand<TileQ>(smem + uniform(q_ring.stage) * TileQ::BYTES, group * 64);
  }
  __device__ __forceinline__ auto k_operand() const {
    using TileK = typename L::TileK;
    return WgRowOperand<TileK>(smem + L::K_OFFSET + uniform(kv_ring.stage) * TileK::BYTES, 0);
  }

  __device__ __forceinline__ void issue_pv(Output& acc_o, Weights& p,
                                           const Ring<L::KV_STAGES>& v_ring) {
    using TileV = typename L::TileV;
    shared.v.wait_full(v_ring);
    wg_gemm<T, L::BLOCK_N / 16>(
        acc_o, p,
        WgColumnOperand<TileV>(smem + L::V_OFFSET + uniform(v_ring.stage) * TileV::BYTES, 0),
        ACCUMULATE);
  }

  // ---- score and softmax: fwd_weights.cuh turns S into P ----

  // Load the masks of tile n. A load before a wait is complete when the scores are.
  __device__ __forceinline__ SeenByText load_seen_by_text(bool masked) const {
    SeenByText scores;
    if constexpr (HAS_MASK_TILES) {
      if (masked)
        scores.template load<false>(params.base, *tile, n, warp_row / 16, tile->m_begin + warp_row,
                                    key_tile() * L::BLOCK_N);
    }
    return scores;
  }
  __device__ __forceinline__ Seen load_seen(const SeenByText& scores) const {
    return {{params.base.bias, tile->batch, key_tile() * L::BLOCK_N}, scores};
  }

  // The place of this lane's scores of a key tile.
  __device__ __forceinline__ ScorePlace<Rows::QUERIES> place_of(const float& alibi_slope,
                                                                int n) const {
    constexpr bool HAS_ROW = PLACE_IN_REGISTERS || Terms::EXIST;
    const int row = HAS_ROW ? first_query : tile->m_begin + warp_row + lane / 4;
    const int col = key_tile(n) * L::BLOCK_N + lane % 4 * 2;
    const int& batch = PLACE_IN_REGISTERS ? this->batch : tile->batch;
    const int& head = PLACE_IN_REGISTERS ? this->head : tile->head;
    return {tile->sequence, batch, head, alibi_slope, &dropout_seed, row, col};
  }

  // Where the parts of a text lie that the scores of a tile share.
  __device__ __forceinline__ auto& shared_parts() const {
    return shared.parts[threadIdx.x / 32 - 4];
  }

  // Inner tiles take their weights relative to the maximum of the tiles before, which has settled
  // in most rows by then: that saves a fifth of the instructions of a step, and the exponentials
  // need not wait for a maximum. A step that finds weights from this limit on, which is above every
  // sensible score of a settled row, looks for a new maximum. Below it, a weight fits T, and sums
  // of weights, also times values up to 2^80, fit float. Wide heads with a bias by TMA have no
  // registers for this.
  static constexpr bool KEEPS_MAX = !(L::HAS_BIAS && L::HEAD_DIM > 128);
  // The mask of a text may hide a part of any tile, and not only of the first ones. A row that has
  // seen no key by then reaches the limit.
  static constexpr bool KEEPS_MASKED_MAX = KEEPS_MAX && HAS_MASK_TILES && !Options::ALIBI_IS_LINE;
  // With the text of a score, one loop takes all tiles: each copy of its code takes NVRTC a second.
  // With the mask of a text, which leaves fewer tiles to each loop, that is 2 % slower.
  static constexpr bool ONE_LOOP = HAS_USER_SCORE && !HAS_MASK_TILES && !L::HAS_BIAS;
  // Whether a tile far below the cap takes its tanh by a polynomial.
  static constexpr bool HAS_SMALL_TANH =
      Options::SOFTCAP && !Options::ALIBI && Options::BIAS == BiasKind::NONE && !HAS_USER_MASK;
  // Whether one number may be the part of all scores of a tile.
  static constexpr bool HAS_SHIFT = L::HAS_PARTS && has_part(TextParts::SHIFT) &&
                                    Options::BIAS == BiasKind::NONE && !HAS_USER_MASK;
  static constexpr float WEIGHT_LIMIT = T::IS_BFLOAT16 ? 0x1p40f : 0x1p15f;

  // Whether O is rescaled while the next S is computed. Right after the softmax, the branch would
  // lie on the path from one S to the next, which is the longest one at these head dims.
  static constexpr bool RESCALE_BESIDE_S = L::HEAD_DIM_V > 64 && L::HEAD_DIM_V <= 128;

  // ---- from tile to tile ----

  __device__ __forceinline__ const typename L::Tile* next_record() const {
    return tile == shared.tiles + FWD_TILE_RECORDS - 1 ? shared.tiles : tile + 1;
  }

  // Waits for the next tile that has keys, and writes the results of tiles without keys on the way.
  // Returns false at the end.
  __device__ __forceinline__ bool next_tile() {
    for (;;) {
      shared.q[group].wait_full(q_ring);
      const typename L::Tile* next = next_record();
      if (uniform(next->has_keys())) {
        enter(next);
        return true;
      }
      if (uniform(next->m_rows) == 0) return false;
      tile = next;
      write_empty(*tile, q_ring.stage);
      q_ring.advance();
    }
  }

  // Goes on to the next tile if that has keys and its Q lies in a second buffer, and returns
  // whether it did. It waits for that Q.
  __device__ __forceinline__ bool enter_next_if_ready() {
    if constexpr (L::Q_STAGES == 1) return false;
    shared.q[group].wait_full(q_ring);
    const typename L::Tile* next = next_record();
    const bool ready = uniform(next->has_keys());
    if (ready) enter(next);
    return ready;
  }

  // Goes on to a tile with keys.
  __device__ __forceinline__ void enter(const typename L::Tile* next) {
    tile = next;
    const TileRange range = next->n_range;
    n = uniform(range.end - 1);
    n_begin = uniform(range.begin);
    n_end = n + 1;
    if constexpr (L::FROM_DIAGONAL) turn = uniform(next->turn);
    inner_begin = uniform(range.inner_begin);
    inner_end = uniform(range.inner_end);
    if constexpr (PLACE_IN_REGISTERS) {
      batch = uniform(next->batch);
      head = uniform(next->head);
    }
    if constexpr (PLACE_IN_REGISTERS || Terms::EXIST)
      first_query = next->m_begin + warp_row + lane / 4;
    if constexpr (Terms::EXIST) {
      alibi_slope = load_alibi_slope<Options>(params.base, next->batch, next->head);
      terms.locate(far, next->sequence.diagonal, next->m_begin, warp_row + lane / 4);
    }
    if constexpr (HAS_MASK_TILES) seek(n);
  }

  // Goes on to the run that ends with the last visited key tile up to this one.
  __device__ __forceinline__ void seek(int last) {
    const TileRun run =
        tile->row.run_up_to(last, TileRange{n_begin, last + 1, inner_begin, inner_end});
    n = uniform(run.last);
    run_is_inner = !uniform(run.masked) && is_inner();
    run_begin = Options::ALIBI_IS_LINE ? n : uniform(run.begin);
  }

  // Whether some scores of the key tile may have to be masked.
  __device__ __forceinline__ bool is_masked() const {
    return !(HAS_MASK_TILES ? run_is_inner : is_inner());
  }

  __device__ __forceinline__ int key_tile() const { return key_tile(n); }
  __device__ __forceinline__ int key_tile(int n) const {
    return L::FROM_DIAGONAL ? TurnedFwdTile::turned(n, turn, n_begin, n_end) : n;
  }

  // Whether only a text may mask scores of the key tile, and the term is that of `terms` there.
  __device__ __forceinline__ bool is_inner() const {
    if (Terms::EXIST && terms.is_near(key_tile())) return false;
    return is_inside();
  }
  // Whether all queries of the tile see all of its keys, but for the mask of a text.
  __device__ __forceinline__ bool is_inside() const {
    return key_tile() < inner_end && key_tile() >= inner_begin;
  }

  // ---- results ----

  // Writes the normalised O to where Q was, for the writer, and the LSE to global memory. A split
  // writes its output, maximum and sum to global memory, and the kernel that combines the splits
  // adds the sink.
  __device__ __forceinline__ void write_tile(Output& acc_o, const RowState& state,
                                             const EveryFwdTile& done, int stage) {
    float lse[2];
    float2 sums[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float inverse;
      if constexpr (SPLIT) {
        sums[half] = state.partial(half, score.scale_log2);
        inverse = sums[half].y == 0.f ? 0.f : rcp_approx(sums[half].y);
      } else {
        inverse = state.finish(half, score.scale_log2, lse[half], sink_of(params, done) * LOG2E);
      }
      if constexpr (Options::DROPOUT) inverse *= params.base.shape.dropout_scale;
#pragma unroll
      for (int d = 0; d < L::HEAD_DIM_V / 8; ++d) {
        acc_o[d][2 * half] *= inverse;
        acc_o[d][2 * half + 1] *= inverse;
      }
    }
    if constexpr (SPLIT) {
      store_partial_rows(params, done, warp_row, acc_o);
    } else {
      wg_store_tile<typename L::TileO, T>(smem + stage * L::TileQ::BYTES, opaque(warp_row), acc_o);
    }
    hand_over_o(stage);
    // These stores come after the hand-over, because its fence would wait for them.
    if constexpr (SPLIT) {
      store_partial_sums(params, done, warp_row, sums);
    } else {
      store_lse(params, done, warp_row, lane, lse);
    }
  }

  // Writes the results of a tile without keys. The zeros do not go through acc_o, which a product
  // may be using.
  __device__ __forceinline__ void write_empty(const EveryFwdTile& empty, int stage) {
    using TileO = typename L::TileO;
    if constexpr (!SPLIT) {
      const float zeros[4] = {};
      const int row = opaque(warp_row);  // so that no address waits in registers for a rare tile
      for (int chunk = lane; chunk < 16 * TileO::COLS / 8; chunk += 32) {
        st_shared_128(smem + stage * L::TileQ::BYTES + TileO::offset(row + chunk % 16, chunk / 16),
                      zeros);
      }
    }
    hand_over_o(stage);
    if constexpr (SPLIT) {
      store_partial_sums(params, empty, warp_row, {{-INF, 0.f}, {-INF, 0.f}});
    } else {
      const float sink = sink_of(params, empty);
      store_lse(params, empty, warp_row, lane, {sink, sink});
    }
  }

 private:
  // Tells the writer that this warp's rows of O are complete. The fence makes them visible to the
  // copy engine.
  __device__ __forceinline__ void hand_over_o(int stage) {
    fence_async_proxy();
    __syncwarp();  // all lanes have written
    if (lane == 0) mbarrier_arrive(smem_address(&shared.o_full[stage][group]));
  }
};
