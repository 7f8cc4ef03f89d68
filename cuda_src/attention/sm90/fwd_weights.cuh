// S becomes P in a consumer warpgroup of the sm_90 forward kernel: score, masks, online softmax and
// dropout. C is the FwdConsumer (fwd_consumer.cuh).
#pragma once
#include "../warp_gemm.cuh"
#include "fwd_consumer.cuh"
#include "ordered_softmax.cuh"

using QueryPlace = ScorePlace<Rows::QUERIES>;

// Rescales O by the last update. Most tiles leave the maxima as they are once these have settled,
// and the whole warp skips this.
template <int N>
__device__ __forceinline__ void rescale_o(float (&acc_o)[N][4], const RowState& state) {
  if (__any_sync(0xffffffffu, state.rescale[0] != 1.f || state.rescale[1] != 1.f)) {
#pragma unroll
    for (int d = 0; d < N; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc_o[d][i] *= state.rescale[i / 2];
    }
  }
}

// Computes the S of a warp for a second time, as those of the wgmma are lost: by mma.sync, for
// which it does not need the rest of its warpgroup. K must not have been given back.
template <class C>
__device__ __forceinline__ void compute_s_again(const C& consumer, typename C::Scores& s) {
  using L = typename C::Layout;
  using TileQ = typename L::TileQ;
  using TileK = typename L::TileK;
  const uint32_t smem_q = consumer.smem + consumer.q_ring.stage * TileQ::BYTES;
  const uint32_t smem_k = consumer.smem + L::K_OFFSET + consumer.kv_ring.stage * TileK::BYTES;
  auto& rows = reinterpret_cast<float (&)[1][L::BLOCK_N / 8][4]>(s);
  set_zero(rows);
  // Registers are scarce: no address may wait in one for this rare case, and the steps are a loop.
  RowOperandA<TileQ> q(smem_q, opaque(consumer.warp_row));
  RowOperandB<TileK> k(smem_k, opaque(0));
  const uint32_t q_address = q.address, k_address = k.address;
#pragma unroll 1
  for (int i = 0; i < L::HEAD_DIM / 16; ++i) {
    q.address = TileQ::advance(q_address, 0, 2 * i);
    k.address = TileK::advance(k_address, 0, 2 * i);
    warp_gemm<typename C::T, 90, 1>(rows, q, k);
  }
  uint32_t loaded = 0;  // K may be given back only after its loads have returned
#pragma unroll
  for (int n = 0; n < L::BLOCK_N / 8; n += 2) loaded |= opaque_bits(s[n][0]);
  wait_for_loads(loaded);
}

// Turns S into weights where a loop has either tiles with a mask or inner ones.
template <class C>
__device__ __forceinline__ void weigh(C& consumer, typename C::Scores& s, RowState& state,
                                      const QueryPlace& at, const typename C::Seen& seen,
                                      bool masked, bool at_old_max) {
  using L = typename C::Layout;
  using Options = typename C::Options;
  const auto& score = consumer.score;
  auto& bias = consumer.shared.bias[consumer.group];
  auto& keys = consumer.shared.k;
  if (!at_old_max) keys.release(consumer.kv_ring.stage);
  uint32_t bias_loads = 0;
  const auto add_bias = [&](typename C::Scores& s, float bias_scale) {
    bias.wait_full(consumer.bias_ring);
    bias_loads = add_bias_tile<typename L::TileBias, typename C::T>(
        s, L::bias_address(consumer.smem, consumer.group, consumer.bias_ring.stage),
        consumer.warp_row % 64, bias_scale, seen.keys);
  };
  const auto apply_masks = [&] {
    if (masked) score.apply_seen(s, seen.scores);
    if (masked && !(HAS_MASK_TILES && consumer.is_inside())) score.apply_mask(s, at);
  };
  using text::TanhSize;
  TanhSize size = TanhSize::LARGE;
  if (C::HAS_SMALL_TANH && at_old_max && !masked) size = consumer.tanhs.expected(s, score.inner);
  if (size == TanhSize::LARGE) {
    score.apply(s, at, add_bias, masked, at_old_max);
    apply_masks();
  }
  const auto scores_read = [&] {
    // The loads of the bias must have returned before the arrival that gives its tile back. Here
    // they have, because all scores have been read, so that this wait costs nothing.
    if constexpr (L::HAS_BIAS) {
      wait_for_loads(bias_loads);
      __syncwarp();  // the loads of all lanes have returned
      bias.release(consumer.bias_ring.stage);
      consumer.bias_ring.advance();
    }
  };
  const auto order = [&] {
    if constexpr (C::ORDERS_EXPONENTIALS) {
      const auto wait = [&] {
        if (!at_old_max) scores_read();
        consumer.wait_for_order();
      };
      return ExponentialOrder{wait, [&] { consumer.pass_order(); }, consumer.shared.zero};
    } else {
      return NoOrder();
    }
  }();
  if (at_old_max) {
    // ALiBi and a small tanh become parts of the exponentials.
    const auto update = [&](auto term) {
      return state.update_at_old_max(s, score.scale_log2, C::WEIGHT_LIMIT, order, term);
    };
    const bool done =
        size == TanhSize::LARGE   ? update(consumer.terms.term(score, consumer.key_tile()))
        : size == TanhSize::SMALL ? update(text::SmallTanh<7>(score.inner, score.scale_log2))
                                  : update(text::SmallTanh<5>(score.inner, score.scale_log2));
    if (!done) {
      compute_s_again(consumer, s);
      if constexpr (C::HAS_SMALL_TANH) consumer.tanhs.check_again();
      score.apply(s, at.again(), add_bias, masked);
      apply_masks();
      state.template update<Options::SOFTCAP>(s, score.scale_log2);
    }
    scores_read();
    keys.release(consumer.kv_ring.stage);
  } else if constexpr (C::ORDERS_EXPONENTIALS) {
    update_in_order<Options::SOFTCAP>(state, s, score.scale_log2, order);
  } else {
    state.template update<Options::SOFTCAP>(s, score.scale_log2, scores_read);
  }
}

// Turns S into the score by the parts of a text, except for the mask of the call.
template <class C>
__device__ __forceinline__ void apply_parts(C& consumer, typename C::Scores& s,
                                            const typename C::KeyParts& keys, const QueryPlace& at,
                                            bool masked) {
  const auto& score = consumer.score;
  auto parts = text::load_parts(consumer.shared_parts(), threadIdx.x % 32);
  if constexpr (C::HAS_KEY_PARTS) {  // which were loaded before S was complete
#pragma unroll
    for (int n = 0; n < C::Layout::BLOCK_N / 8; ++n) {
      parts.columns[n][0] = keys[n][0];
      parts.columns[n][1] = keys[n][1];
    }
  }
  text::for_each_with_parts(
      s, parts, score, at, masked,
      [&](float& x, int, int, const text::Parts& parts, auto query, auto key) {
        x = text::score_of_parts(text::Scaled(x, score.inner), parts, at.batch, at.head, query, key,
                                 score.params);
      });
  score.apply_position_terms(s, at, NoBiasTile(), masked);
}

// Turns S into the score in an inner tile, but for the term that it returns.
template <class C>
__device__ __forceinline__ auto apply_inner_score(C& consumer, typename C::Scores& s,
                                                  const QueryPlace& at,
                                                  const typename C::KeyParts& keys,
                                                  const text::CommonShift& shift) {
  const auto& score = consumer.score;
  if constexpr (C::Terms::OF_TEXT) {
    return consumer.terms.term(score, consumer.key_tile());
  } else if constexpr (!C::Layout::HAS_PARTS) {
    constexpr bool at_old_max = true;
    score.apply(s, at, NoBiasTile(), UNMASKED, at_old_max);
    return consumer.terms.term(score, consumer.key_tile());
  } else {
    CommonTerm term = {1.f, 0.f};
    if (C::HAS_SHIFT && shift.exists) {
      term = {score.inner, text::shift_of_zero(shift, at.batch, at.head, score.params)};
    } else {
      apply_parts(consumer, s, keys, at, UNMASKED);
    }
    return term;
  }
}

// Turns S into weights where one loop has tiles of both kinds. Those that need a new maximum, for
// their mask or because the old one did not serve, share the code.
template <class C>
__device__ __forceinline__ void weigh_either(C& consumer, typename C::Scores& s, RowState& state,
                                             const QueryPlace& at, typename C::KeyParts& keys,
                                             const text::CommonShift& shift, bool masked,
                                             bool at_old_max) {
  const auto& score = consumer.score;
  auto& ring = consumer.shared.k;
  at_old_max = at_old_max && !masked;
  if (!at_old_max) ring.release(consumer.kv_ring.stage);
  bool is_done = false;
  if (at_old_max) {
    const auto term = apply_inner_score(consumer, s, at, keys, shift);
    is_done = state.update_at_old_max(s, score.scale_log2, C::WEIGHT_LIMIT, NoOrder(), term);
    if (!is_done) compute_s_again(consumer, s);
    ring.release(consumer.kv_ring.stage);
  }
  if (!is_done) {
    const QueryPlace again = at.again();
    if constexpr (C::Layout::HAS_PARTS) {
      text::share_near_tile(consumer);
      if constexpr (C::HAS_KEY_PARTS)
        text::load_columns(keys, consumer.shared_parts(), opaque(consumer.lane));
      apply_parts(consumer, s, keys, again, MASKED);
    } else {
      score.apply(s, again);
    }
    if (!(C::Terms::OF_TEXT && consumer.is_inside())) score.apply_mask(s, again);
    state.template update<C::Options::SOFTCAP>(s, score.scale_log2);
  }
}

// Turns S into P, and gives K back. state.rescale is the factor for the O of earlier tiles.
// `at_old_max` asks for weights relative to the maximum so far, if that serves: then K is held
// until it has turned out that no row needs a new one.
template <class C>
__device__ __forceinline__ void score_and_softmax(C& consumer, typename C::Scores& s,
                                                  RowState& state, const typename C::Seen& seen,
                                                  typename C::KeyParts& keys,
                                                  const text::CommonShift& shift, bool masked,
                                                  bool at_old_max) {
  const auto& tile = *consumer.tile;
  const float alibi_slope = C::Terms::EXIST ? consumer.alibi_slope
                                            : load_alibi_slope<typename C::Options>(
                                                  consumer.params.base, tile.batch, tile.head);
  const QueryPlace at = consumer.place_of(alibi_slope, consumer.n);
  if constexpr (C::ONE_LOOP) {
    weigh_either(consumer, s, state, at, keys, shift, masked, at_old_max);
  } else {
    weigh(consumer, s, state, at, seen, masked, at_old_max);
  }
  consumer.score.apply_dropout(s, at);
}
