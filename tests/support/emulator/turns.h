// Follows the blocks of a backward kernel over their tiles, without what they compute: by the
// scheduler, the tiles and the turns of the kernel itself. It fails if a block waits for a turn
// that does not come, if a query tile meets a key tile twice, or never although a query sees a key,
// or if a counter of tiles is not 0 again. Blocks run one after the other, which is the order of
// their tickets, so a block may wait only for tiles with earlier tickets.
#pragma once
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "attention/simt/bwd_block.cuh"
#include "attention/sm80/bwd_tile.cuh"
#include "attention/sm80/dq_sum.cuh"
#include "attention/sm90/bwd_heads.cuh"
#include "attention/sm90/bwd_turns.cuh"

namespace turns {

struct Pair {  // a query tile and a key tile that a block has visited
  int batch, head, m, n;
  auto operator<=>(const Pair&) const = default;
};

struct Visits {
  const FlashBwdParams& params;
  int block_m, block_n;
  std::set<Pair> pairs;
  std::set<Pair> complete;  // those whose dQ is complete, where blocks take whole heads

  static std::string name(const Pair& at) {
    return "query tile " + std::to_string(at.m) + " and key tile " + std::to_string(at.n) +
           " of head " + std::to_string(at.head) + " of sequence " + std::to_string(at.batch);
  }
  void add(const Pair& at) {
    if (!pairs.insert(at).second) emulator::fail(("meets twice: " + name(at)).c_str());
  }
  // Whether a query of tile m sees a key of tile n, by the definition of the window.
  bool sees(const Sequence& s, int m, int n) const {
    for (int row = m * block_m; row < min(s.seqlen_q, (m + 1) * block_m); ++row) {
      if (max(s.key_begin(row), n * block_n) < min(s.key_end(row), (n + 1) * block_n)) return true;
    }
    return false;
  }
  void check(bool whole_heads) const {
    for (int batch = 0; batch < params.shape.batch; ++batch) {
      const Sequence s = load_sequence(params, batch);
      for (int m = 0; m * block_m < s.seqlen_q; ++m) {
        for (int n = 0; n * block_n < s.seqlen_k; ++n) {
          if (!sees(s, m, n)) continue;
          for (int head = 0; head < params.shape.heads_q; ++head) {
            const Pair at = {batch, head, m, n};
            if (!pairs.contains(at)) throw std::runtime_error("never meet: " + name(at));
          }
        }
        for (int head = 0; whole_heads && head < params.shape.heads_q; ++head) {
          const Pair at = {batch, head, m, 0};
          if (!complete.contains(at)) throw std::runtime_error("dQ is never complete: " + name(at));
        }
      }
    }
  }
};

// ---- sm_90: one lane schedules, another follows it like the reducer ----

// Where a block takes whole heads, the first key tile of a query tile stores dQ, and the last one
// has all of it.
inline void check_whole_head(const BwdHeadTile& tile, Visits& visits, int head, int m) {
  const Pair first = {tile.batch, head, m, 0};
  if (!tile.begins_dq() && !visits.pairs.contains(first)) emulator::fail("dQ has not begun");
  if (visits.complete.contains(first)) emulator::fail("dQ was complete before the last key tile");
  if (tile.completes_dq((m + 1) * visits.block_m)) visits.complete.insert(first);
}

template <int BLOCK_M, class BlockTile>
void follow_sm90(const FlashBwdSm90Params& params, Visits& visits) {
  using Shared = BwdShared<BlockTile, BLOCK_M, 2>;
  static Shared shared;
  if (threadIdx.x == 0) shared.init(1, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    if constexpr (BlockTile::WHOLE_HEADS) {
      schedule_bwd_heads<BLOCK_M>(params, shared, visits.block_n);
    } else {
      schedule_bwd_tiles<BLOCK_M>(params, shared, visits.block_n);
    }
    return;
  }
  int* flag = nullptr;
  Ring<BWD_TILE_RECORDS> record;
  for (;; record.advance()) {
    const BlockTile& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) return;
    mbarrier_arrive(smem_address(&shared.almost_loaded));
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
      for (int m = tile.first_m(); tile.is_m(m); m = tile.next_m(m)) {
        const int m_begin = m * BLOCK_M;
        if constexpr (BlockTile::WHOLE_HEADS) {
          check_whole_head(tile, visits, head, m);
        } else if (params.base.dq_semaphore) {
          begin_turn<BLOCK_M>(flag, params.base, tile, accum_row(params.base, tile, head, m_begin),
                              m_begin, visits.block_n);
        }
        visits.add({tile.batch, head, m, tile.n_block});
      }
    }
    end_turn(flag);
  }
}

// ---- sm_80, fp16x3 and simt ----

// Calls add(query tile, its first row in the accumulators) for the query tiles of a block.
template <class Block, class Add>
void follow_rows(Visits& visits, const Block& block, int head_begin, int head_end, Add add) {
  for (int head = head_begin; head < head_end; ++head) {
    for (int m = block.m_range.begin; m < block.m_range.end; ++m) {
      const int row = block.sequence.accum_start + m * visits.block_m;
      add(m, head * visits.params.accum_rows + row);
      visits.add({block.batch, head, m, block.n_block});
    }
  }
}

struct OneFragment {  // of dQ, instead of all that a warp has
  static constexpr int M = 1, N = 1;
};

template <int BLOCK_M, int BLOCK_N>
void follow_sm80(const FlashBwdParams& params, Visits& visits) {
  BwdBlock<float> block;
  block.locate(params, BLOCK_M, BLOCK_N);
  if (block.n_rows <= 0) return;
  const float nothing[1][1][4] = {};
  follow_rows(visits, block, block.head_begin, block.head_end, [&](int m, int64_t row) {
    add_dq<BLOCK_M, BLOCK_N, 1, OneFragment>(params, block, row, m, nothing);
  });
}

inline void follow_simt(const FlashBwdParams& params, Visits& visits) {
  SimtBwdBlock<float> block;
  block.locate(params, visits.block_m, visits.block_n);
  if (block.n_rows <= 0) return;
  const int group = params.shape.heads_q / params.shape.heads_kv;
  const int begin = block.head_kv * group;
  follow_rows(visits, block, begin, begin + group, [&](int m, int64_t row) {
    if (!params.dq_semaphore) return;
    int* flag = params.dq_semaphore + 1 + row / visits.block_m;
    wait_flag(flag, turn_of_block(block, m, visits.block_m, visits.block_n));
    release_flag(flag);
  });
}

// ---- the launch ----

template <int X>
using Constant = std::integral_constant<int, X>;

// Calls f(constant) for x, which is one of 32, 64 and 128.
template <class F>
void with_constant(int x, F f) {
  if (x == 32) return f(Constant<32>());
  if (x == 64) return f(Constant<64>());
  if (x == 128) return f(Constant<128>());
  emulator::fail("unknown tile");
}

// `kernel` has the name, and for sm_90 whether the block walks up or takes whole heads.
inline void follow_sm90(const std::string& kernel, const FlashBwdSm90Params& params,
                        Visits& visits) {
  with_constant(visits.block_m, [&](auto rows) {
    constexpr int M = rows.value;
    if (kernel == "flash_bwd_sm90") return follow_sm90<M, BwdWalkingTile<false>>(params, visits);
    if (kernel == "flash_bwd_sm90 up") return follow_sm90<M, BwdWalkingTile<true>>(params, visits);
    if (kernel == "flash_bwd_sm90 heads") return follow_sm90<M, BwdHeadTile>(params, visits);
    if (kernel == "flash_bwd_wide_sm90") return follow_sm90<M, BwdRoundTile<false>>(params, visits);
    if (kernel == "flash_bwd_wide_sm90 up")
      return follow_sm90<M, BwdRoundTile<true>>(params, visits);
    emulator::fail("unknown kernel");
  });
}

inline void follow_sm80(const FlashBwdParams& params, Visits& visits) {
  with_constant(visits.block_m, [&](auto rows) {
    with_constant(visits.block_n,
                  [&](auto keys) { follow_sm80<rows.value, keys.value>(params, visits); });
  });
}

}  // namespace turns

// Returns the message of a failure, or null.
extern "C" const char* follow(const char* kernel, int block_m, int block_n, const void* params,
                              unsigned grid, unsigned seed) {
  static std::string message;
  const auto& of_sm90 = *static_cast<const FlashBwdSm90Params*>(params);
  const auto& of_others = *static_cast<const FlashBwdParams*>(params);
  const std::string name = kernel;
  const bool is_sm90 = name.find("sm90") != name.npos;
  turns::Visits visits = {is_sm90 ? of_sm90.base : of_others, block_m, block_n};
  const auto run = [&] {
    if (is_sm90) return turns::follow_sm90(name, of_sm90, visits);
    if (name == "flash_bwd_simt") return turns::follow_simt(of_others, visits);
    turns::follow_sm80(of_others, visits);
  };
  if (const char* failure = emulator::launch(grid, is_sm90 ? 2 : 1, 0, seed, false, run)) return failure;
  try {
    visits.check(name == "flash_bwd_sm90 heads");
    if (is_sm90 && of_sm90.tile_counter && *of_sm90.tile_counter)
      throw std::runtime_error("the counter of tiles is not 0 again");
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}
