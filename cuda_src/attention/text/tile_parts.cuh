// The steps of the kernels of Hopper with the parts of a text (parts.cuh). C is FwdConsumer or
// BwdConsumer. Every lane computes its share of the parts of a tile a step ahead, so that loads
// have the time of a step, and a warp shares them while S is in flight.
#pragma once
#include "lines.cuh"

namespace text {

// ---- forward ----

// Computes this lane's share of the parts of key tile n.
template <class C>
__device__ __forceinline__ void compute_key_tile(const C& consumer, typename C::OwnParts& own,
                                                 int n) {
  const float no_alibi = 0.f;
  const auto at = consumer.place_of(no_alibi, n);
  compute_parts(own, at, at.sequence.seqlen_q, at.sequence.seqlen_k, consumer.params.base);
}

// Computes the parts of the queries, and those of the first key tile.
template <class C>
__device__ __forceinline__ void begin_query_tile(const C& consumer, typename C::OwnParts& own) {
  if constexpr (C::Layout::HAS_PARTS) {
    const float no_alibi = 0.f;
    set_rows(consumer.shared_parts(), consumer.place_of(no_alibi, consumer.n),
             consumer.params.base);
    if constexpr (!C::Terms::OF_TEXT) compute_key_tile(consumer, own, consumer.n);
  }
}

// Shares those of the key tile, and computes those of the next one, or behind the last one the same
// again: a branch around the loads would make the warp wait for them. Where most tiles have their
// term from C::Terms, the others do both in share_near_tile().
template <class C>
__device__ __forceinline__ CommonShift share_key_tile(const C& consumer, typename C::OwnParts& own,
                                                      typename C::KeyParts& keys) {
  CommonShift shift = {};
  if constexpr (C::Layout::HAS_PARTS && !C::Terms::OF_TEXT) {
    shift = share_parts<Rows::QUERIES>(consumer.shared_parts(), own);
    if constexpr (C::HAS_KEY_PARTS) load_columns(keys, consumer.shared_parts(), consumer.lane);
    compute_key_tile(consumer, own, max(consumer.n - 1, consumer.n_begin));
  }
  return shift;
}
template <class C>
__device__ __forceinline__ void share_near_tile(const C& consumer) {
  if constexpr (C::Layout::HAS_PARTS && C::Terms::OF_TEXT) {
    typename C::OwnParts own;
    compute_key_tile(consumer, own, consumer.n);
    share_parts<Rows::QUERIES>(consumer.shared_parts(), own);
  }
}

// ---- backward ----

// Whether all distances of query tile m are far on one side.
template <class C, class Tile>
__device__ __forceinline__ bool is_far(const C& consumer, const Tile& tile, int m) {
  using L = typename C::Layout;
  const int distance = uniform(m * L::BLOCK_M - tile.n_begin);
  return L::HAS_FAR && consumer.far.contain(distance - (L::BLOCK_N - 1), distance + L::BLOCK_M - 1);
}

// Computes this lane's share of the parts of query tile m. Those of a far one are one number.
template <class C, class Tile>
__device__ __forceinline__ void compute_query_tile(const C& consumer, typename C::OwnParts& own,
                                                   const Tile& tile, int head, int m) {
  const float no_alibi = 0.f;
  const auto at = consumer.place_of(tile, head, m * C::Layout::BLOCK_M, no_alibi);
  if constexpr (C::Layout::HAS_FAR) {
    if (is_far(consumer, tile, m)) {
      own.distances[0] = part_of_distance(at.batch, at.head, at.col, at.row, consumer.params.base);
      return;
    }
    compute_parts(own, at, at.sequence.seqlen_q, at.sequence.seqlen_k, consumer.params.base);
  } else {
    compute_parts(own, at, consumer.seqlen_q, consumer.seqlen_k, consumer.params.base);
  }
}

// Computes the parts of the keys, and those of the first query tile of a head.
template <class C, class Tile>
__device__ __forceinline__ void begin_head(C& consumer, typename C::OwnParts& own, const Tile& tile,
                                           int head) {
  using L = typename C::Layout;
  if constexpr (L::HAS_PARTS) {
    if constexpr (!L::HAS_FAR) {
      consumer.seqlen_q = uniform(tile.sequence.seqlen_q);
      consumer.seqlen_k = uniform(tile.sequence.seqlen_k);
    }
    const int m = uniform(L::WALKS_UP ? tile.m_range.begin : tile.m_range.end - 1);
    if (m < uniform(tile.m_range.begin)) return;
    const float no_alibi = 0.f;
    const auto at = consumer.place_of(tile, head, m * L::BLOCK_M, no_alibi);
    set_rows(consumer.shared_parts(), at, consumer.params.base);
    compute_query_tile(consumer, own, tile, head, m);
  }
}

// Shares those of query tile m, and where a far tile is a branch, computes those of the next one.
template <class C, class Tile>
__device__ __forceinline__ CommonShift share_query_tile(const C& consumer,
                                                        typename C::OwnParts& own, const Tile& tile,
                                                        int head, int m, int next) {
  using L = typename C::Layout;
  CommonShift shift = {};
  if constexpr (L::HAS_PARTS) {
    if (is_far(consumer, tile, m)) {
      shift = {true, own.distances[0]};
    } else {
      share_parts<Rows::KEYS>(consumer.shared_parts(), own);
    }
    if (L::HAS_FAR && next != m) compute_query_tile(consumer, own, tile, head, next);
  }
  return shift;
}

// Computes those of the next query tile otherwise. A branch around the loads would make the warp
// wait for them.
template <class C, class Tile>
__device__ __forceinline__ void compute_next_query_tile(const C& consumer,
                                                        typename C::OwnParts& own, const Tile& tile,
                                                        int head, int next) {
  using L = typename C::Layout;
  if constexpr (L::HAS_PARTS && !L::HAS_FAR) compute_query_tile(consumer, own, tile, head, next);
}

}  // namespace text
