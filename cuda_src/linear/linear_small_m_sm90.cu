// out = epilogue(norm(x) weight^T) on wgmma and TMA (Hopper), for up to 32 rows. What counts is to
// read the weights once, at full bandwidth, and, where they are few, to wait as rarely as possible.
//
// The weights are A of the products and x is B: a warpgroup has 64 rows of weights, and the columns
// of its accumulators are rows of x. The blocks of a cluster have the same rows of weights and
// share the depth; then each of them finishes a share of out. A block alone in its cluster makes
// one tile after the other.
//
// Roles:
//   consumers, four warps: multiply; send each block of the cluster the sums of that block's share
//     of out; add up what they got from all of them, finish it (with a rotary embedding both
//     numbers of a pair, whose rows of weights are in the same tile) and write it;
//   loader, one lane of the fifth warp: asks for weights before anything else, as many as the ring
//     has room for, and refills it. Without a norm x comes through the ring as well;
//   helpers, four more warps if there is a norm: bring, together with the consumers, the block's
//     columns of all rows of x to shared memory and normalise them, with the sums that the cluster
//     exchanges; then they leave.
//
// Shared memory (SmallMPlaces): x if there is a norm; the ring of stages; weight and bias of the
// norm; the sums of the block's share from all blocks; the sums of the rows from all blocks.
//
// The kernel ends: the loader waits for stages that the consumers empty, in the order in which they
// wait for them to fill; a block waits for sums that every block of its cluster sends, and all of
// them are on the GPU at once. Nothing is overwritten too early: a stage is filled again after the
// `empty` barrier, to which every consumer warp arrives behind its wgmma_wait(). Blocks of a larger
// cluster write to each other only after cluster_wait(), when all have begun, and only once to each
// place; a block alone synchronises its consumers before the next tile's sums.
//
// Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "Tensor copy", "st.async".
#include "../common/wg_gemm.cuh"
#include "small_m_norm_sm90.cuh"
#include "small_m_results_sm90.cuh"

template <typename T, Activation ACTIVATION, bool GATED, bool ROTARY, int ROWS, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1)
    __launch_bounds__(SmallMLayout<T, GATED, ROTARY, ROWS, CLUSTER>::THREADS, 2)
        linear_small_m_sm90(const __grid_constant__ LinearSmallMSm90Params params) {
  using L = SmallMLayout<T, GATED, ROTARY, ROWS, CLUSTER>;
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ SmallMBarriers<L> barriers;
  const LinearParams& base = params.base;
  const SmallMPlaces<L> places(smem, params);
  const int rank = CLUSTER == 1 ? 0 : cluster_rank();
  const DepthShare depth(base.depth, rank, CLUSTER);
  const int warp = uniform(threadIdx.x / 32);
  const bool consumer = warp < L::CONSUMERS / 32;
  if (warp == L::CONSUMERS / 32) {
    tma_prefetch(params.weight_map);
    if (GATED) tma_prefetch(params.gate_weight_map);
    tma_prefetch(params.x_map);
  }
  if (warp == 0) barriers.init(params);
  __syncthreads();
  cluster_arrive_relaxed();

  // ---- weights, and x without a norm ----
  if (warp == L::CONSUMERS / 32) {
    SmallMLoader<L> loader = {params, places, barriers, depth};
    const bool leader = elect_one();
    if (leader) loader.fill();
    __syncwarp();
    cluster_wait();  // before the ring goes round: compute-sanitizer takes it for a block's barrier
    if (leader) loader.refill();
    return;
  }

  // ---- what is added to the sums; x with a norm ----
  SmallMTiles<L> tiles(base);
  SmallMResults<L> results(base, tiles.column() + rank * L::SHARE);
  if (base.norm_weight) {
    const SmallMNorm<L> norm = {base, places, depth};
    norm.load_weights();
    if (consumer) results.load_bias();
    wait_for_previous_kernel();
    launch_next_kernel();
    float first = 0.f;  // of the row
    const Sums row_sums = norm.load(first);
    cluster_wait();  // all blocks of the cluster have begun, and made their barriers
    norm.send(row_sums, rank, barriers.row_sums);
    if (consumer) results.load_rows();
    cp_async_wait<0>();
    // Everybody sees the norm's weights.
    named_barrier_sync(NamedBarrier::WRITTEN, L::NORM_THREADS);
    wait_for_pairs<L>(barriers.row_sums, L::NORM_THREADS);
    const float2 stats = norm.receive(first);
    base.norm.wide ? norm.template normalise<float>(stats) : norm.template normalise<T>(stats);
    fence_async_proxy();
    if (!consumer) {
      named_barrier_arrive(NamedBarrier::NORMALISED, L::NORM_THREADS);
      return;
    }
    named_barrier_sync(NamedBarrier::NORMALISED, L::NORM_THREADS);
  } else {
    results.load_bias();
    wait_for_previous_kernel();
    launch_next_kernel();
    results.load_rows();
    cluster_wait();
  }

  Ring<L::MAX_STAGES> ring;
  while (true) {
    // ---- the product: a step is issued before the one before it is waited for ----
    float acc[ROWS / 8][4];
    const auto issue = [&](int step) {
      barriers.wait_full(ring);
      const uint32_t weights = places.ring + uniform(ring.stage) * places.stage_bytes;
      const uint32_t x =
          base.norm_weight ? places.x + step * L::TileX::BYTES : weights + L::TileW::BYTES;
      wg_gemm<T, L::BLOCK_K / 16>(acc, WgRowOperand<typename L::TileW>(weights, 0),
                                  WgRowOperand<typename L::TileX>(x, 0), step > 0);
    };
    issue(0);
#pragma unroll 1
    for (int step = 1; step < depth.size(); ++step) {
      const int stage_before = ring.stage;
      ring.next(params.stages);
      issue(step);
      wgmma_wait<1>();
      barriers.release(stage_before);
    }
    wgmma_wait<0>();
    pin(acc);
    barriers.release(ring.stage);
    ring.next(params.stages);

    // ---- the sums of the cluster ----
    send_sums<L>(acc, places.sums, barriers.sums, rank, int(base.rows));
    wait_for_pairs<L>(barriers.sums, L::CONSUMERS);
    // A block has got all that is sent to it, and may end.
    results.template store<ACTIVATION>(places.sums);
    if (!tiles.advance()) return;

    // ---- the next tile of a block that is alone ----
    results.begin(tiles.column());
    results.load_bias();
    results.load_rows();
    named_barrier_sync(NamedBarrier::WRITTEN, L::CONSUMERS);  // the sums have been read
  }
}
