// A block of linear_small_m_sm90: its share of the depth and of out, its places in shared memory,
// its barriers, and the lane that loads its tiles.
#pragma once
#include "../common/group_sum.cuh"
#include "../common/ring.cuh"
#include "../common/smem_tile.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/dependent_launch.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "params.cuh"

// The threads that meet are the consumers or, with a norm, the consumers and the helpers.
enum class NamedBarrier {
  WRITTEN = 1,  // what threads have written for each other is there, or has been read
  NORMALISED,   // x is
};

template <typename T_, bool GATED_, bool ROTARY_, int ROWS_, int CLUSTER_>
struct SmallMLayout {
  using T = T_;
  static constexpr bool GATED = GATED_;
  static constexpr bool ROTARY = ROTARY_;
  static constexpr int ROWS = ROWS_;  // of x, at most
  static constexpr int CLUSTER = CLUSTER_;
  static constexpr int FEATURES = 64;  // rows of weights
  static constexpr int BLOCK_K = 64;
  // Threads: those that multiply, the loader, and if there is a norm helpers.
  static constexpr int CONSUMERS = WARPGROUP;
  static constexpr int NORM_THREADS = 2 * CONSUMERS;
  static constexpr int THREADS = NORM_THREADS + 32;
  static constexpr int MAX_STAGES = 12;  // small_m_sm90_kernels.IN_FLIGHT
  using TileX = SmemTile<ROWS, BLOCK_K>;
  using TileW = SmemTile<FEATURES, BLOCK_K>;
  // A gate or a rotary embedding divides the tile into two halves: the second holds the gate's
  // weights, or the columns with which those of the first are rotated.
  static constexpr int HALVES = GATED || ROTARY ? 2 : 1;
  static constexpr int PLACES = FEATURES / HALVES;  // columns of out, or pairs that are rotated
  static constexpr int COLUMNS = GATED ? PLACES : FEATURES;
  static constexpr int SHARE = PLACES / CLUSTER;  // places that a block finishes
  static_assert(PLACES % CLUSTER == 0, "all blocks of a cluster have as many places");

  // A block gets the sums of its share from all blocks: [CLUSTER][HALVES * SHARE][SUMS_PITCH].
  static constexpr int SHARE_ROWS = HALVES * SHARE;
  static constexpr int SUMS_PITCH = ROWS + 2;  // two rows of weights lie in different banks
  static constexpr int SUMS_BYTES = FEATURES * SUMS_PITCH * sizeof(float);
};

// The tiles of out that a block makes: those of a cluster have one, a block alone goes on as long
// as there are any.
template <class L>
struct SmallMTiles {
  const int head_dim;
  const int count;
  int index = blockIdx.x / L::CLUSTER;

  __device__ explicit SmallMTiles(const LinearParams& params)
      : head_dim(params.rotary.head_dim), count(ceil_div(params.columns, L::COLUMNS)) {}

  // The first column of the first half; of a head each tile has so many pairs.
  __device__ int column() const {
    const int column = index * L::COLUMNS;
    return L::ROTARY ? column - column % head_dim / 2 : column;
  }
  // The first column of the second half, in its weights.
  __device__ int second_column() const { return column() + (L::ROTARY ? head_dim / 2 : 0); }
  // Whether there is another one.
  __device__ bool advance() {
    if constexpr (L::CLUSTER > 1) return false;
    index += gridDim.x;
    return index < count;
  }
};

// Steps of the depth, 64 each, that a block of the cluster has: one at least.
struct DepthShare {
  int begin;
  int end;

  __device__ DepthShare(int depth, int rank, int blocks) {
    const int steps = ceil_div(depth, 64);
    begin = steps * rank / blocks;
    end = steps * (rank + 1) / blocks;
  }
  __device__ int size() const { return end - begin; }
  // Columns of x that they have.
  __device__ int columns(int depth) const { return min(end * 64, depth) - begin * 64; }
};

// Places in shared memory, as LinearSmallMSm90 (Python) counts them. If there is a norm, x stays
// there as a whole, with the norm's weight and bias; if not, it passes through the ring with the
// weights.
template <class L>
struct SmallMPlaces {
  uint32_t x;
  uint32_t ring;
  uint32_t stage_bytes;
  unsigned char* norm_weight;
  unsigned char* norm_bias;
  float* sums;
  Sums* row_sums;  // of the norm: [CLUSTER][ROWS]

  __device__ SmallMPlaces(unsigned char* smem, const LinearSmallMSm90Params& params) {
    const bool norm = params.base.norm_weight != nullptr;
    const int steps = norm ? ceil_div(ceil_div(params.base.depth, L::BLOCK_K), L::CLUSTER) : 0;
    const int norm_bytes = steps * L::BLOCK_K * int(sizeof(float));
    stage_bytes = L::TileW::BYTES + (norm ? 0 : L::TileX::BYTES);
    x = smem_address(smem);
    ring = x + steps * L::TileX::BYTES;
    norm_weight = smem + steps * L::TileX::BYTES + params.stages * stage_bytes;
    norm_bias = norm_weight + norm_bytes;
    sums = reinterpret_cast<float*>(norm_bias + norm_bytes);
    row_sums = reinterpret_cast<Sums*>(reinterpret_cast<char*>(sums) + L::SUMS_BYTES);
  }
};

template <class L>
struct SmallMBarriers : RingBarriers<L::MAX_STAGES> {
  using RingBarriers<L::MAX_STAGES>::full;
  using RingBarriers<L::MAX_STAGES>::empty;
  uint64_t sums;  // of this block's share, from the cluster, as the next
  uint64_t row_sums;

  // The first warp calls it.
  __device__ void init(const LinearSmallMSm90Params& params) {
    const int lane = threadIdx.x;
    if (lane < params.stages) {
      mbarrier_init(smem_address(&full[lane]), 1);
      mbarrier_init(smem_address(&empty[lane]), L::CONSUMERS / 32);
    }
    if (L::CLUSTER > 1 && lane == 0) {
      const int rows = int(params.base.rows);
      mbarrier_init(smem_address(&sums), 1);
      mbarrier_init(smem_address(&row_sums), 1);
      mbarrier_arrive_expect(smem_address(&sums), L::FEATURES * round_up(rows, 8) * sizeof(float));
      mbarrier_arrive_expect(smem_address(&row_sums), L::CLUSTER * rows * sizeof(Sums));
    }
    mbarrier_init_fence();
  }
};

// Two floats to this place in shared memory of block `rank` of the cluster, whose barrier counts
// them. A block alone stores them, and its threads meet where others wait for the barrier.
template <class L>
__device__ __forceinline__ void send_pair(float* to, uint64_t& barrier, int rank, float first,
                                          float second) {
  if constexpr (L::CLUSTER > 1)
    st_async_cluster(smem_address(to), smem_address(&barrier), rank, first, second);
  else
    *reinterpret_cast<float2*>(to) = {first, second};
}

// The pairs from all blocks are there; by so many threads, those that read them among them.
template <class L>
__device__ __forceinline__ void wait_for_pairs(uint64_t& barrier, int threads) {
  if constexpr (L::CLUSTER > 1)
    mbarrier_wait(smem_address(&barrier), 0);
  else
    named_barrier_sync(NamedBarrier::WRITTEN, threads);
}

// The loader: one lane. As many weights as the ring has room for are asked for before what the
// kernel before has to write.
template <class L>
struct SmallMLoader {
  const LinearSmallMSm90Params& params;
  const SmallMPlaces<L>& places;
  SmallMBarriers<L>& barriers;
  const DepthShare& depth;
  const bool stream_x = params.base.norm_weight == nullptr;
  const int filled = min(depth.size(), params.stages);
  SmallMTiles<L> tiles = SmallMTiles<L>(params.base);

  // The first tiles, for which there is room.
  __device__ void fill() const {
#pragma unroll 1
    for (int step = 0; step < filled; ++step) load_weights(step, step);
    wait_for_previous_kernel();
    if (!stream_x) return;
#pragma unroll 1
    for (int step = 0; step < filled; ++step) load_x(step, step);
  }
  // All others, as room is made.
  __device__ void refill() {
    Ring<L::MAX_STAGES> ring;  // the place behind the tiles that fill() has asked for
    ring.stage = filled;
    if (filled == params.stages) ring = {0, 1};
    int step = filled;
    do {
#pragma unroll 1
      for (; step < depth.size(); ++step, ring.next(params.stages)) {
        barriers.wait_empty(ring);
        load_weights(step, ring.stage);
        if (stream_x) load_x(step, ring.stage);
      }
      step = 0;
    } while (tiles.advance());
  }

 private:
  __device__ void load_weights(int step, int stage) const {
    const uint32_t full = smem_address(&barriers.full[stage]);
    const uint32_t to = places.ring + stage * places.stage_bytes;
    const int k = (depth.begin + step) * L::BLOCK_K;
    mbarrier_arrive_expect(full, places.stage_bytes);
    tma_load(to, params.weight_map, full, k, tiles.column(), 0, 0);
    if constexpr (L::HALVES == 2) {
      const TensorMap& map = L::GATED ? params.gate_weight_map : params.weight_map;
      tma_load(to + L::TileW::BYTES / 2, map, full, k, tiles.second_column(), 0, 0);
    }
  }
  __device__ void load_x(int step, int stage) const {
    const uint32_t to = places.ring + stage * places.stage_bytes + L::TileW::BYTES;
    const int k = (depth.begin + step) * L::BLOCK_K;
    tma_load(to, params.x_map, smem_address(&barriers.full[stage]), k, 0, 0, 0);
  }
};
