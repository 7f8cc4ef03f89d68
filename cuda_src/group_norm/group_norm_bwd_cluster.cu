// Gradients of GroupNorm in NCHW for aligned groups that fit into the shared memory of a cluster of
// blocks (affine.cuh has the formulas).
//
// A cluster has one sample of a group after the other, then those of the next group, and each of
// its warps a run of it. The copy engine brings that of the next sample while the warp computes, in
// pieces, each into the place of the piece that was just read. A warp waits for its own copies, and
// for the sums of all warps of the cluster (cluster_exchange.cuh). The sums of each pack over the
// samples of a group are kept behind the runs, and added up when the group changes
// (weight_shares.cuh).
//
// Why it ends and nothing is overwritten: a piece has one barrier, whose parity changes with each
// sample. One lane asks for the next copy into a piece after all lanes have read it, and all wait
// for that copy before they read again.
//
// Microseconds on an H200, this kernel for group_norm_bwd_steps in its place (bfloat16, SiLU, 32
// groups):
//   2x320x64x64 14.5 for 20.9, 8x640x64x64 44.3 for 62.8, 8x320x128x128 75.3 for 109.3,
//   8x128x256x256 118.7 for 167.0; and beside group_norm_bwd: 8x320x64x64 25.9 for 29.2
#include "../norm/cluster_exchange.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "weight_shares.cuh"

// The runs of x and dout that a warp has, LOADS packs of each lane, in pieces of PIECE packs.
template <typename T, int LOADS, int VECTOR, int PIECE_>
struct RunRing {
  static constexpr int PIECE = PIECE_, PIECES = LOADS / PIECE, BARRIERS = 2 * PIECES;
  static_assert(LOADS % PIECE == 0, "whole pieces");
  static constexpr int PITCH = 32 * VECTOR;  // elements between two loads of a lane
  static constexpr int BYTES = 2 * LOADS * 512;

  uint32_t packs;     // [2, LOADS, 32] of 16 bytes
  uint32_t barriers;  // [2, PIECES]
  int columns;        // that the warp has

  __device__ uint32_t barrier(int tensor, int piece) const {
    return barriers + (tensor * PIECES + piece) * int(sizeof(uint64_t));
  }

  // One lane calls it.
  __device__ void init() const {
    for (int i = 0; i < BARRIERS; ++i) mbarrier_init(barrier(0, i), 1);
    mbarrier_init_fence();
  }

  __device__ bool has(int piece) const { return piece * PIECE * PITCH < columns; }

  // Asks for a piece of the run that begins at `from`. One lane calls it.
  __device__ void fill(int tensor, int piece, const T* from) const {
    const int begin = piece * PIECE * PITCH;
    const int bytes = min(columns - begin, PIECE * PITCH) * int(sizeof(T));
    mbarrier_arrive_expect(barrier(tensor, piece), bytes);
    bulk_load(packs + tensor * (LOADS * 512) + begin * int(sizeof(T)), from + begin, bytes,
              barrier(tensor, piece));
  }

  __device__ void wait(int tensor, int piece, int parity) const {
    mbarrier_wait(barrier(tensor, piece), parity);
  }

  // Returns the shared address of a pack of this lane.
  __device__ uint32_t address(int tensor, int load) const {
    return packs + (tensor * LOADS + load) * 512 + threadIdx.x % 32 * 16;
  }

  __device__ Words<T, VECTOR> read(int tensor, int load) const {
    const uint4 v = ld_shared_128(address(tensor, load));
    return {{v.x, v.y, v.z, v.w}};
  }
};

// The units of each cluster: `least` of them side by side, and one more for the first `more`
// clusters.
struct ClusterUnits {
  int least;
  int more;

  __device__ ClusterUnits(int units, int clusters)
      : least(units / clusters), more(units - least * clusters) {}

  __device__ int first(int cluster) const { return cluster * least + min(cluster, more); }

  __device__ int cluster_of(int unit) const {
    const int rest = unit - more * (least + 1);
    return rest < 0 ? unit / (least + 1) : more + rest / least;
  }
};

template <typename T, typename WEIGHT, Activation ACTIVATION, int CLUSTER, int NUM_THREADS,
          int LOADS, int VECTOR, int BLOCKS>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(NUM_THREADS, BLOCKS)
    group_norm_bwd_cluster(const __grid_constant__ GroupNormBwdParams params) {
  // ---- which run of which groups ----
  extern __shared__ __align__(16) char smem[];
  using Tile = RowTile<32, LOADS, VECTOR, NUM_THREADS>;  // of a warp
  using BlockTile = RowTile<NUM_THREADS, LOADS, VECTOR>;
  using Factors = Affine<ACTIVATION, T, 1>;
  constexpr bool KEPT = LOADS <= 8;  // x, in registers
  using Ring = RunRing<T, LOADS, VECTOR, KEPT ? 2 : 5>;
  constexpr int WARPS = NUM_THREADS / 32, SENDERS = CLUSTER * WARPS;
  constexpr int PITCH = Tile::PITCH, PIECE = Ring::PIECE;
  using Rounds = ClusterRounds<CLUSTER, WARPS>;
  const GroupNormShape& shape = params.shape;
  const int size = shape.channels * shape.positions;
  const int run = ceil_div(size, SENDERS * PITCH) * PITCH;  // of each warp but the last ones
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int begin = uniform(Rounds::sender()) * run, columns = max(0, min(size - begin, run));
  const int rest = columns - Tile::column(0);  // from this lane's first pack on
  const int batch = int(shape.batch), cluster = int(blockIdx.x) / CLUSTER;
  const ClusterUnits units(batch * shape.groups, int(gridDim.x) / CLUSTER);
  const int last = units.first(cluster + 1) - 1;
  int unit = units.first(cluster);
  struct Unit {
    int group, sample;
  };
  const auto find = [&](int of) { return Unit{of / batch, of % batch}; };
  const auto place = [&](const GroupStrides& strides, Unit of) {
    return of.sample * strides.batch + of.group * shape.channels * strides.channel + begin;
  };
  const auto read_stats = [&](Unit of) {
    return reinterpret_cast<const float2*>(params.stats)[of.sample * shape.groups + of.group];
  };

  // ---- the first one ----
  __shared__ uint64_t barriers[WARPS][Ring::BARRIERS];
  const Ring ring = {smem_address(smem) + warp * Ring::BYTES, smem_address(barriers[warp]),
                     columns};
  const auto fill = [&](int tensor, int piece, Unit of) {
    const T* from = tensor == 0
                        ? static_cast<const T*>(params.x) + place(params.x_strides, of)
                        : static_cast<const T*>(params.dout) + place(params.dout_strides, of);
    if (elect_one()) ring.fill(tensor, piece, from);
  };
  const Unit start = find(unit);
  if (elect_one()) ring.init();
  __syncwarp();
  for (int piece = 0; piece < Ring::PIECES && ring.has(piece); ++piece) {
    fill(0, piece, start);
    fill(1, piece, start);
  }
  float2 next_stats = read_stats(start);
  __shared__ Rounds rounds;
  rounds.init();

  // ---- zeros where a run ends; the sums, in the order of the packs of the block ----
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    if (load * PITCH < rest) continue;
    st_shared_128(ring.address(0, load), {0, 0, 0, 0});
    st_shared_128(ring.address(1, load), {0, 0, 0, 0});
  }
  Sums* const slots = reinterpret_cast<Sums*>(smem + WARPS * Ring::BYTES);
  Sums* const own_totals = slots + warp * (run / VECTOR) + lane;
  float weights[LOADS], biases[LOADS];
#pragma unroll 1
  for (int round = 0; unit <= last; ++unit, ++round) {
    const bool more = unit < last;
    const Unit next = find(unit + 1);
    const float mean = next_stats.x, inverse = next_stats.y;
    if (more) next_stats = read_stats(next);

    // ---- weights and biases of the group, times what the activation takes ----
    if (const Unit here = find(unit); round == 0 || here.sample == 0) {
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        weights[load] = biases[load] = 0.f;
        if (load * PITCH >= rest) continue;
        const int pack = begin / VECTOR + load * 32 + lane;
        const int channel = here.group * shape.channels + shape.packs.divide(pack);
        weights[load] =
            Factors::ARGUMENT * to_float(static_cast<const WEIGHT*>(params.weight)[channel]);
        biases[load] =
            Factors::ARGUMENT * to_float(static_cast<const WEIGHT*>(params.bias)[channel]);
        own_totals[load * 32] = {0.f, 0.f};
      }
    }

    // ---- dz, sums of each pack ----
    Words<T, VECTOR> values[LOADS], gradients[LOADS];
    Sums of_group = {0.f, 0.f};  // of weight * dz * n / deviation, weight * dz / deviation
#pragma unroll
    for (int piece = 0; piece < Ring::PIECES; ++piece) {
      if (!ring.has(piece)) break;
      ring.wait(0, piece, round % 2);
      ring.wait(1, piece, round % 2);
#pragma unroll
      for (int load = piece * PIECE; load < (piece + 1) * PIECE; ++load) {
        if (load * PITCH >= ring.columns) break;
        const auto x = ring.read(0, load);
        if (KEPT) values[load] = x;
        Factors factors;
        factors.set_scaled(0, mean, inverse, weights[load], biases[load]);
        float dz[VECTOR];
        Sums sums[1] = {};
        add_gradients(x, ring.read(1, load), factors, dz, sums);
        gradients[load] = round_words<T>(dz);
        const Sums of_pack = channel_sums<Factors::CENTRED>(sums[0], mean, inverse);
        if (load * PITCH < rest) own_totals[load * 32] = own_totals[load * 32] + of_pack;
        of_group =
            of_group + Sums{factors.scale[0] * of_pack.first, factors.scale[0] * of_pack.second};
      }
      // No wait_for_loads(): the totals, stored before, were computed from what was read.
      __syncwarp();
      if (more) fill(1, piece, next);
      if (more && KEPT) fill(0, piece, next);
    }

    // ---- means of the group ----
    rounds.send(round, sum_of_neighbours<32>(of_group));
    const Sums* sent = rounds.wait(round);
    constexpr int LANES = SENDERS < 32 ? SENDERS : 32;
    of_group = sent[lane % LANES];
#pragma unroll
    for (int i = LANES; i < SENDERS; i += LANES) of_group = of_group + sent[lane + i];
    of_group = sum_of_neighbours<LANES>(of_group);
    const float share_of_one = Factors::INVERSE_ARGUMENT * shape.inverse_size;
    const auto gradient = InputGradient::of<Factors::CENTRED>(
        mean, inverse, {share_of_one * of_group.first, share_of_one * of_group.second});

    // ---- dx ----
    T* dx = static_cast<T*>(params.dx) + place(params.out_strides, find(opaque(unit))) +
            Tile::column(0);
#pragma unroll
    for (int piece = 0; piece < Ring::PIECES; ++piece) {
      if (!ring.has(piece)) break;
#pragma unroll
      for (int load = piece * PIECE; load < (piece + 1) * PIECE; ++load) {
        if (load * PITCH >= ring.columns) break;
        const auto x = KEPT ? values[load] : ring.read(0, load);
        Factors factors;
        factors.set_scaled(0, mean, inverse, weights[load], 0.f);
        float result[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
          result[i] = gradient.dx(x.at(i), gradients[load].at(i), 0, factors);
        st_global_128(dx + load * PITCH, bits_of(round_words<T>(result)), load * PITCH < rest);
      }
      if (KEPT) continue;
      __syncwarp();
      if (more) fill(0, piece, next);
    }

    // ---- the sums of the group are this block's share of dweight and dbias ----
    if (!more || next.sample == 0) {
      __syncthreads();
      const Unit here = find(opaque(unit));
      const int of_block = begin - warp * run;  // its first element
      const int share = cluster - units.cluster_of(here.group * batch);
      write_share<1, BlockTile, 8>(params, slots, 0, of_block, min(size - of_block, WARPS * run),
                                   here.group, share * CLUSTER + blockIdx.x % CLUSTER,
                                   params.shares * CLUSTER);
      __syncthreads();
    }
  }

  add_up_shares<BlockTile, WEIGHT>(
      params, start.group, last / batch, params.shares * CLUSTER, [&](int of) {
        const int first = units.cluster_of(of * batch);
        return (units.cluster_of((of + 1) * batch - 1) - first + 1) * CLUSTER;
      });
}
