// FlashAttention-3 forward on wgmma and TMA (Hopper), for float16 and bfloat16:
//
//   O   = softmax(score(Q K^T)) V    score.cuh has the score, FlashFwdParams the arrays with shapes
//   LSE = log(sum over keys of exp(score))
//
// This is the file to read first. The folder sm90 computes float16 and bfloat16 on GPUs of compute
// capability 9.0 (sm_90a), of tensors that a tensor map can describe:
//   both       sequence_maps_sm90, where sequences have lengths of their own
//   forward    flash_fwd_sm90, and flash_fwd_combine_sm90 where blocks divide the keys
//   backward   flash_bwd_preprocess, flash_bwd_sm90 or for wide heads flash_bwd_wide_sm90, and
//              flash_bwd_postprocess_sm90
//
// A persistent block takes tiles of BLOCK_M queries of one head, one after the other. For each it
// walks over the tiles of BLOCK_N keys that the queries see, from the last to the first (with ALiBi
// or a text of the score, from the diagonal on), with the online softmax of softmax.cuh. After the
// first tile, those without a mask, and those of the mask of a text, keep the maxima as they are; a
// warp for which that does not serve computes its scores again, by mma.sync.
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the tiles, and a smaller head_dim
// is filled up with zeros; HEAD_DIM_V is that of V and O, which may be narrower, but then exactly
// as wide as V is; Q_STAGES and KV_STAGES are the numbers of buffers; SOFTCAP, ALIBI, BIAS (a
// BiasKind) and DROPOUT are the options of the score. With SPLIT a block has a part of the keys of
// its tile only, and flash_fwd_combine_sm90.cu merges the parts. SMEM_BYTES is the dynamic shared
// memory of the launch.
//
// Warps. One lane of each warp of warpgroup 0 is a producer (fwd_block.cuh):
//   warp 0     chooses the next tile and describes it in a record
//   warp 1     loads K and V
//   warp 2     loads Q, a tile ahead if there are two buffers of it, and writes O
//   warp 3     loads the bias, if it comes by TMA
// With keys in pages, all lanes of warp 1 load K, and those of warp 3 load V (paged_keys.cuh). With
// terms of keys, all lanes of warp 3 write these (text/key_terms.cuh).
// The other warpgroups are consumers, which own 64 queries of the tile each. S, P and O live in
// their registers (fwd_consumer.cuh).
//
// Shared memory holds Q_STAGES buffers of Q, KV_STAGES of K and of V, with a bias by TMA a ring of
// its tiles for each consumer warpgroup, with a linear term of the scores the numbers of a tile's
// columns (text/lines.cuh), with terms of keys the numbers of each stage of K, and for each
// consumer warp the parts of a text that its scores share (text/parts.cuh). A finished O is written
// over the Q of its tile, from where TMA stores it.
//
// Overlap. Three things keep the tensor cores busy while a warpgroup computes its softmax:
//   within a warpgroup  S(n - 1) = Q K(n - 1)^T and O += P(n) V(n) are issued together, and the
//                       softmax of S(n - 1) runs beside the second product
//   between warpgroups  they issue their products one after the other, so that those of one run
//                       while another computes its softmax (at small head dims with a bias, they
//                       compute their exponentials one after the other)
//   between tiles       the first S of the next tile runs while O of this one is written
//
// Why nothing is overwritten too early. Every buffer is a stage of a ring with two barriers
// (common/ring.cuh): it is filled after its consumers have released it, and read after the copy has
// completed. Consumers release a stage of K or V after the wgmma_wait() of the product that reads
// it; a step that may compute S again holds K until it has its weights. A warpgroup writes O over
// its own 64 rows of Q only, after its last product with them, and the lane that stores O refills
// the stage itself, after the copy engine has read O. A record of a tile is written again four
// tiles later, and the scheduler is at most three tiles ahead of the last reader.
//
// Why it ends. All roles see the same tiles in the same order, up to the record with m_rows = 0,
// which ends each of them; a tile without keys passes through all of them, too. All consumers make
// the same number of steps, so that each of them lets the next one go on as often as that waits.
//
// Sources: FlashAttention-3, arXiv:2407.08608; PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions" and "Tensor copy".
#include "../../ptx/dependent_launch.cuh"
#include "fwd_weights.cuh"
#include "paged_keys.cuh"

// The bits of the first key tile of a tile, which are loaded before its S is issued.
template <class C>
__device__ __forceinline__ typename C::SeenByText load_first_seen(const C& consumer) {
  return consumer.load_seen_by_text(HAS_MASK_TILES && !consumer.run_is_inner);
}

// Starts a tile with O = 0, and its softmax with the scores of its first key tile, which are in s.
template <class C>
__device__ __forceinline__ void begin_tile(C& consumer, typename C::Scores& s,
                                           typename C::Weights& p, typename C::Output& acc_o,
                                           RowState& state, typename C::OwnParts& own_parts,
                                           const typename C::SeenByText& seen_by_text) {
  pin(s);
  set_zero(acc_o);
  state.begin(consumer.score.scale_log2);
  if constexpr (C::HAS_SMALL_TANH) consumer.tanhs.begin();
  const bool masked = consumer.is_masked();
  text::begin_query_tile(consumer, own_parts);
  if constexpr (C::Terms::EXIST) consumer.terms.begin(consumer);
  typename C::KeyParts keys;
  const text::CommonShift shift = text::share_key_tile(consumer, own_parts, keys);
  score_and_softmax(consumer, s, state, consumer.load_seen(seen_by_text), keys, shift, masked,
                    AT_NEW_MAX);
  state.rescale[0] = state.rescale[1] = 1.f;  // there is no O yet
  wg_pack<typename C::T>(p, s);
}

// One step of the loop: computes S and P of key tile n beside O += P V of key tile n + 1, whose P
// is in `p` at the beginning.
template <class C>
__device__ __forceinline__ void step(C& consumer, typename C::Weights& p, typename C::Output& acc_o,
                                     RowState& state, typename C::OwnParts& own_parts,
                                     bool masked) {
  const auto v_ring = consumer.kv_ring;
  consumer.kv_ring.advance();
  if constexpr (C::Layout::HAS_KEY_TERMS) masked = masked || !consumer.terms.serve(state);
  typename C::Scores s;
  const typename C::Seen seen = consumer.load_seen(consumer.load_seen_by_text(masked));
  typename C::RowFactors factors;
  consumer.begin_products();
  if constexpr (C::Layout::TERM_IN_PRODUCT) {
    consumer.issue_qk_and_term(s, factors, masked);
  } else {
    consumer.issue_qk(s);
  }
  if constexpr (C::RESCALE_BESIDE_S) rescale_o(acc_o, state);
  consumer.issue_pv(acc_o, p, v_ring);
  consumer.end_products();
  typename C::KeyParts keys;
  const text::CommonShift shift = text::share_key_tile(consumer, own_parts, keys);
  wgmma_wait<1>();  // S is complete; O += P V may still run
  pin(s);
  if constexpr (C::Layout::TERM_IN_PRODUCT) pin(factors);
  const bool at_old_max = C::ONE_LOOP || (masked ? C::KEEPS_MASKED_MAX : C::KEEPS_MAX);
  score_and_softmax(consumer, s, state, seen, keys, shift, masked, at_old_max);
  wgmma_wait<0>();  // before P and O may be changed
  pin(acc_o);
  consumer.shared.v.release(v_ring.stage);
  wg_pack<typename C::T>(p, s);
  if constexpr (!C::RESCALE_BESIDE_S) rescale_o(acc_o, state);
}

// Whether a tile behind an inner one is inner, too.
template <class C>
__device__ __forceinline__ bool stays_inner(const C& consumer) {
  if constexpr (C::INNER_APART) return consumer.n >= consumer.n_begin && consumer.is_inner();
  return consumer.n >= max(consumer.n_begin, consumer.inner_begin);
}

template <typename T, int HEAD_DIM, int HEAD_DIM_V, int BLOCK_M, int BLOCK_N, int Q_STAGES,
          int KV_STAGES, bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT, bool SPLIT,
          int SMEM_BYTES>
__global__ void __launch_bounds__((BLOCK_M / 64 + 1) * WARPGROUP, 1)
    flash_fwd_sm90(const __grid_constant__ FlashFwdSm90Params params) {
  using Options = ScoreOptions<T, SOFTCAP, ALIBI, static_cast<BiasKind>(BIAS), DROPOUT>;
  using Layout =
      FwdLayout<HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, Q_STAGES, KV_STAGES, Options::BIAS,
                COLUMN_STEP<Options>, Options::ALIBI_IS_LINE || HAS_USER_SCORE>;
  static_assert(Layout::BYTES == SMEM_BYTES, "host and device disagree on shared memory");
  constexpr int GROUPS = Layout::GROUPS;
  constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 40;
  constexpr int CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 232;
  static_assert(GROUPS <= 3, "the register split is made for one to three");

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_q = smem_address(smem);
  __shared__ FwdShared<Layout> shared;
  if (threadIdx.x == 0) shared.init();
  if constexpr (Layout::TERM_IN_PRODUCT)
    Layout::Numbers::template write<T>(smem_q + Layout::NUMBERS_OFFSET);
  if constexpr (SPLIT) launch_next_kernel();  // its blocks wait where this one leaves room
  __syncthreads();                            // the barriers are initialised

  if (warpgroup_index() == 0) {
    if constexpr (GROUPS > 1) dealloc_registers<PRODUCER_REGISTERS>();
    const int warp = warp_in_warpgroup();
    if constexpr (HAS_PAGES) {
      if (warp == 1) return load_paged_keys<RowsMap::K>(params, shared, smem_q);
      if (warp == 3) return load_paged_keys<RowsMap::V>(params, shared, smem_q);
    }
    if constexpr (Layout::HAS_KEY_TERMS) {
      if (warp == 3) return text::write_key_terms(params, shared, smem_q + Layout::NUMBERS_OFFSET);
    }
    if (!elect_one()) return;
    if constexpr (Layout::HAS_BIAS) {
      if (warp == 3) return load_fwd_bias(params, shared, smem_q);
    }
    if (warp == 0) schedule_fwd_tiles(params, shared);
    if (warp == 1) load_fwd_keys(params, shared, smem_q);
    if (warp == 2) move_fwd_queries<SPLIT>(params, shared, smem_q);
    return;
  }

  // ---- consumers ----
  if constexpr (GROUPS > 1) alloc_registers<CONSUMER_REGISTERS>();
  FwdConsumer<Options, Layout, SPLIT> consumer(params, shared, smem_q);
  RowState state;
  typename decltype(consumer)::OwnParts own_parts;
  float acc_o[HEAD_DIM_V / 8][4];
  uint32_t p[BLOCK_N / 16][4];
  consumer.open_order();
  if (!consumer.next_tile()) return;
  {  // the first S of the block runs with no other product beside it
    const auto seen = load_first_seen(consumer);
    float s[BLOCK_N / 8][4];
    consumer.begin_products();
    consumer.issue_qk(s);
    consumer.end_products();
    wgmma_wait<0>();
    begin_tile(consumer, s, p, acc_o, state, own_parts, seen);
  }
#pragma unroll 1
  for (;;) {
    // ---- the other key tiles: those on either edge of a window need the mask ----
    int& n = consumer.n;
    if constexpr (decltype(consumer)::ONE_LOOP) {
#pragma unroll 1
      for (--n; n >= consumer.n_begin; --n)
        step(consumer, p, acc_o, state, own_parts, consumer.is_masked());
    } else if constexpr (HAS_MASK_TILES) {
      if (--n < consumer.run_begin) consumer.seek(n);
#pragma unroll 1
      for (; n >= consumer.n_begin; consumer.seek(n)) {
#pragma unroll 1
        for (; n >= consumer.run_begin && !consumer.run_is_inner; --n)
          step(consumer, p, acc_o, state, own_parts, MASKED);
#pragma unroll 1
        for (; n >= consumer.run_begin; --n) step(consumer, p, acc_o, state, own_parts, UNMASKED);
      }
    } else {
#pragma unroll 1
      for (--n; n >= consumer.n_begin;) {
#pragma unroll 1
        for (; n >= consumer.n_begin && !consumer.is_inner(); --n)
          step(consumer, p, acc_o, state, own_parts, MASKED);
#pragma unroll 1
        for (; stays_inner(consumer); --n) step(consumer, p, acc_o, state, own_parts, UNMASKED);
      }
    }

    // ---- to the next query tile, whose first S runs beside the last O += P V of this one ----
    const EveryFwdTile& done = *consumer.tile;
    const int done_stage = consumer.q_ring.stage;
    const Ring<KV_STAGES> v_ring = consumer.kv_ring;
    consumer.kv_ring.advance();
    consumer.q_ring.advance();
    const auto write_o = [&] {
      pin(acc_o);
      shared.v.release(v_ring.stage);
      consumer.write_tile(acc_o, state, done, done_stage);
    };
    if constexpr (decltype(consumer)::RESCALE_BESIDE_S) rescale_o(acc_o, state);
    float s[BLOCK_N / 8][4];
    typename decltype(consumer)::SeenByText seen;
    const bool ready = consumer.enter_next_if_ready();
    if (ready) seen = load_first_seen(consumer);
    consumer.begin_products();
    if (ready) {
      consumer.issue_pv(acc_o, p, v_ring);
      consumer.issue_qk(s);
      consumer.end_products();
      wgmma_wait<1>();  // O is complete; S of the next tile may still run
      write_o();
      wgmma_wait<0>();
    } else {
      consumer.issue_pv(acc_o, p, v_ring);
      consumer.end_products();
      wgmma_wait<0>();
      write_o();
      if (!consumer.next_tile()) return;
      seen = load_first_seen(consumer);
      consumer.begin_products();
      consumer.issue_qk(s);
      consumer.end_products();
      wgmma_wait<0>();
    }
    begin_tile(consumer, s, p, acc_o, state, own_parts, seen);
  }
}
