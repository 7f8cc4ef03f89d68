// out = epilogue(norm(x) weight^T) on wgmma and TMA (Hopper), for up to 32 rows. What counts is to
// read the weights once, at full bandwidth, and, where they are few, to wait as rarely as possible.
//
// The weights are A of the products and x is B: a warpgroup has 64 rows of weights, the columns of
// its accumulators are rows of x. The blocks of a cluster have the same rows of weights and share
// the depth. A block
//
//   asks for weights, as many as its ring has room for, before anything else; one lane does that,
//     and refills the ring;
//   loads x: without a norm through the ring as well; with a norm its columns of all rows, whose
//     sums the cluster exchanges. Four more warps help with that, and leave;
//   multiplies, and sends each block of the cluster the sums of that block's share of out;
//   adds up what it got from all of them, finishes it and writes it;
//   goes on with the next tile, if it is alone in its cluster. The ring does not stop for that.
//
// Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "Tensor copy", "st.async".
#include "../common/wg_gemm.cuh"
#include "epilogue.cuh"
#include "few_norm_sm90.cuh"

// What a thread finishes: one column, every STEP-th row. What it adds to the sums of the products
// is asked for long before they are there.
template <class L>
struct FewResults {
  using T = typename L::T;
  static constexpr int STEP = L::CONSUMERS / L::SHARE;
  static constexpr int COUNT = ceil_div(L::ROWS, STEP);
  const LinearParams& params;
  const int place = threadIdx.x % L::SHARE;
  const int first_row = threadIdx.x / L::SHARE;
  int column;
  T bias = {}, gate_bias = {}, residual[COUNT] = {};

  __device__ FewResults(const LinearParams& params, int share_column) : params(params) {
    begin(share_column);
  }

  // The results of a tile of which the block has the columns from `share_column` on.
  __device__ void begin(int share_column) { column = share_column + place; }
  __device__ bool has(int i) const {
    return column < params.columns && first_row + i * STEP < params.rows;
  }
  __device__ void load_bias() {
    if (column >= params.columns) return;
    if (params.bias) bias = static_cast<const T*>(params.bias)[column];
    if (L::GATED && params.gate_bias) gate_bias = static_cast<const T*>(params.gate_bias)[column];
  }
  __device__ void load_residual() {
    if (params.residual == nullptr) return;
    const T* data = static_cast<const T*>(params.residual) + column;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (has(i)) residual[i] = data[(first_row + i * STEP) * params.residual_stride];
  }
  // From the sums of all blocks of the cluster.
  template <Activation ACTIVATION>
  __device__ void store(const float* sums) const {
    T* out = static_cast<T*>(params.out) + column;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int row = first_row + i * STEP;
      if (!has(i)) continue;
      const float* own = sums + place * L::SUMS_PITCH + row;
      float value = to_float(bias), gate = to_float(gate_bias);
#pragma unroll
      for (int block = 0; block < L::CLUSTER; ++block) {
        value += own[block * L::SHARE_ROWS * L::SUMS_PITCH];
        if constexpr (L::GATED) gate += own[(block * L::SHARE_ROWS + L::SHARE) * L::SUMS_PITCH];
      }
      value = L::GATED ? activate<ACTIVATION>(gate) * value : activate<ACTIVATION>(value);
      out[row * params.out_stride] = from_float<T>(value + to_float(residual[i]));
    }
  }
};

// Sends the sums of a block to the blocks that finish them; rows of x beyond the last eight that
// count are left out.
template <class L>
__device__ __forceinline__ void send_sums(const float (&acc)[L::ROWS / 8][4], float* sums,
                                          uint64_t& barrier, int rank, int rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int feature = threadIdx.x / 32 * 16 + half * 8 + lane / 4;
    const int column = feature % L::COLUMNS;
    const int place = feature / L::COLUMNS * L::SHARE + column % L::SHARE;
    float* to = sums + (rank * L::SHARE_ROWS + place) * L::SUMS_PITCH + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < L::ROWS / 8; ++n) {
      if (n * 8 < rows)
        send_pair<L>(to + n * 8, barrier, column / L::SHARE, acc[n][2 * half],
                     acc[n][2 * half + 1]);
    }
  }
}

template <typename T, Activation ACTIVATION, bool GATED, int ROWS, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1)
    __launch_bounds__(FewLayout<T, GATED, ROWS, CLUSTER>::THREADS, 2)
        linear_few_sm90(const __grid_constant__ LinearFewSm90Params params) {
  using L = FewLayout<T, GATED, ROWS, CLUSTER>;
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ FewBarriers<L> barriers;
  const LinearParams& base = params.base;
  const FewPlaces<L> places(smem, params);
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
    FewLoader<L> loader = {params, places, barriers, depth};
    const bool leader = elect_one();
    if (leader) loader.fill();
    __syncwarp();
    cluster_wait();  // before the ring goes round: compute-sanitizer takes it for a block's barrier
    if (leader) loader.refill();
    return;
  }

  // ---- what is added to the sums; x with a norm ----
  FewTiles<L> tiles(base);
  FewResults<L> results(base, tiles.column() + rank * L::SHARE);
  if (base.norm_weight) {
    const FewNorm<L> norm = {base, places, depth};
    norm.load_weights();
    if (consumer) results.load_bias();
    wait_for_previous_kernel();
    launch_next_kernel();
    float first = 0.f;  // of the row
    const Sums row_sums = norm.load(first);
    if (consumer) results.load_residual();
    cluster_wait();  // all blocks of the cluster have begun, and made their barriers
    norm.send(row_sums, rank, barriers.row_sums);
    cp_async_wait<0>();
    named_barrier_sync(1, L::NORM_THREADS);  // everybody sees the norm's weights
    wait_for_pairs<L>(barriers.row_sums, L::NORM_THREADS);
    const float2 stats = norm.receive(first);
    base.norm.wide ? norm.template normalise<float>(stats) : norm.template normalise<T>(stats);
    fence_async_proxy();
    if (!consumer) {
      named_barrier_arrive(2, L::NORM_THREADS);
      return;
    }
    named_barrier_sync(2, L::NORM_THREADS);
  } else {
    results.load_bias();
    wait_for_previous_kernel();
    launch_next_kernel();
    results.load_residual();
    cluster_wait();
  }

  RingPlace ring;
  while (true) {
    // ---- the product: a step is issued before the one before it is waited for ----
    float acc[ROWS / 8][4];
    const auto issue = [&](int step) {
      mbarrier_wait(smem_address(&barriers.full[ring.stage]), ring.parity);
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
    results.load_residual();
    named_barrier_sync(1, L::CONSUMERS);  // the sums have been read
  }
}
