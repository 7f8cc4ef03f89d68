// The norm of linear_small_m_sm90: each block of the cluster has the columns of x that its share of
// the depth wants; they exchange the sums of the rows.
#pragma once
#include "../common/convert.cuh"
#include "../common/words.cuh"
#include "small_m_block_sm90.cuh"

// Brings the block's columns of x to shared memory and normalises them: the consumers, and as many
// helpers. LANES of a warp have a row; what they load is theirs until it is normalised.
template <class L>
struct SmallMNorm {
  using T = typename L::T;
  static constexpr int LANES = L::NORM_THREADS / L::ROWS;
  static_assert(LANES % 8 == 0 && LANES <= 32, "a lane has the same chunk of all its tiles");
  static constexpr int NEXT = LANES / 8 * L::TileX::BYTES;  // from a pack of a lane to the next
  static constexpr int BATCH = 6;                           // loads of a lane in flight
  const LinearParams& params;
  const SmallMPlaces<L>& places;
  const DepthShare& depth;
  const int thread = threadIdx.x < L::CONSUMERS ? threadIdx.x : threadIdx.x - 32;
  const int row = thread / LANES;
  const int lane = thread % LANES;
  const int packs = depth.columns(params.depth) / 8;  // of a row, 16 bytes each
  const uint32_t place = places.x + L::TileX::offset(row, lane % 8) + lane / 8 * L::TileX::BYTES;

  // Asks for the part of the norm's weight and bias that the block's columns have.
  __device__ void load_weights() const {
    const int item = params.norm.wide ? sizeof(float) : sizeof(T);
    const int64_t begin = int64_t(depth.begin) * L::BLOCK_K * item;
    const char* weight = static_cast<const char*>(params.norm_weight) + begin;
    const char* bias = static_cast<const char*>(params.norm_bias) + begin;
#pragma unroll 1
    for (int byte = thread * 16; byte < packs * 8 * item; byte += L::NORM_THREADS * 16) {
      cp_async_16(smem_address(places.norm_weight + byte), weight + byte, true);
      const bool given = params.norm_bias != nullptr;
      cp_async_16(smem_address(places.norm_bias + byte), given ? bias + byte : weight, given);
    }
    cp_async_commit();
  }

  // The block's part of the sums of the row, and of their squares, about the row's first number:
  // its squared distance from the mean is less than the number of columns times their variance,
  // usually much less, so little is lost when the one is taken from the other. For RMSNorm about 0.
  // A row that x does not have is its last one.
  __device__ Sums load(float& first) const {
    const T* begin =
        static_cast<const T*>(params.x) + min(row, int(params.rows) - 1) * params.x_stride;
    const T* x = begin + depth.begin * L::BLOCK_K + lane * 8;
    uint32_t to = place;
    Sums sums[2] = {};  // two, for shorter chains
#pragma unroll 1
    for (int left = packs - lane; left > 0; left -= BATCH * LANES) {
      Words<T, 8> words[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (i * LANES < left) words[i] = load_words<8, true>(x + i * LANES * 8);
      // This load comes after the others, because it is used first; it is volatile, so that the
      // compiler leaves it there.
      if (!params.norm.rms)
        first = to_float(T{*static_cast<const volatile uint16_t*>(&begin->bits)});
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (i * LANES >= left) break;
        st_shared_128(to + i * NEXT, *reinterpret_cast<const uint4*>(words[i].words));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float distance = words[i].at(j) - first;
          sums[j % 2].first += distance;
          sums[j % 2].second += distance * distance;
        }
      }
      x += BATCH * LANES * 8;
      to += BATCH * NEXT;
    }
    return sum_of_neighbours<LANES>(sums[0] + sums[1]);
  }

  // Sends the sums to all blocks of the cluster, which must have begun.
  __device__ void send(Sums own, int rank, uint64_t& barrier) const {
    if (row < params.rows && lane < L::CLUSTER)
      send_pair<L>(&places.row_sums[rank * L::ROWS + row].first, barrier, lane, own.first,
                   own.second);
  }

  // Adds up the sums of all blocks; returns scale and offset of normal = x * scale + offset.
  __device__ float2 receive(float first) const {
    Sums total = {};
#pragma unroll
    for (int i = 0; i < L::CLUSTER; ++i) total = total + places.row_sums[i * L::ROWS + row];
    const float distance = params.norm.rms ? 0.f : total.first * params.norm.inverse_depth;
    const float variance = total.second * params.norm.inverse_depth - distance * distance;
    const float scale = rsqrtf(fmaxf(variance, 0.f) + params.norm.eps);
    return {scale, -(first + distance) * scale};
  }

  // Weight and bias are W. Zeros fill the last step up behind the last column.
  template <typename W>
  __device__ void normalise(float2 stats) const {
    const W* weight = reinterpret_cast<const W*>(places.norm_weight) + lane * 8;
    const W* bias = reinterpret_cast<const W*>(places.norm_bias) + lane * 8;
#pragma unroll 1
    for (int i = 0; i * LANES + lane < depth.size() * 8; ++i) {
      const uint4 raw = ld_shared_128(place + i * NEXT);
      const Words<T, 8> x = {raw.x, raw.y, raw.z, raw.w};
      const auto weights = load_words<8>(weight + i * LANES * 8);
      const auto biases = load_words<8>(bias + i * LANES * 8);
      float normal[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        normal[j] = (x.at(j) * stats.x + stats.y) * weights.at(j) + biases.at(j);
      const Words<T, 8> rounded = round_words<T>(normal);
      const bool inside = i * LANES + lane < packs;
      st_shared_128(place + i * NEXT,
                    inside ? *reinterpret_cast<const uint4*>(rounded.words) : uint4{});
    }
  }
};
