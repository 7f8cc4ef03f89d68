// Copies rows of up to ARRAYS arrays into the memory of other GPUs, by a list of moves: many short
// pieces of keys in one launch, where a copy engine would need one copy for each.
//
// A warp has a move, and copies its row of each array, VECTORS loads in flight a lane; BYTES is
// what a lane loads at a time. The stores go through NVLink as they are: whole lines of the peer.
// Nobody waits here: a signal that follows in the stream is seen after all of them
// (parallel/peers.py).
#include "../common/pack.cuh"
#include "params.cuh"

constexpr int THREADS = 256;
constexpr int VECTORS = 4;

template <int BYTES>
__global__ void __launch_bounds__(THREADS) put_rows(const __grid_constant__ PutRowsParams params) {
  constexpr int HALVES = BYTES / 2;
  const int64_t move = int64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  if (move >= params.count) return;
  const int peer = params.moves[3 * move];
  const int64_t row = params.moves[3 * move + 1], place = params.moves[3 * move + 2];

  for (int i = 0; i < ARRAYS; ++i) {
    const RowArray& array = params.arrays[i];
    const char* from = static_cast<const char*>(array.from) + peer * array.from_step;
    const auto* source = reinterpret_cast<const uint16_t*>(from + row * array.from_pitch);
    char* to = static_cast<char*>(params.peers[peer]) + array.to + place * array.to_pitch;
    auto* target = reinterpret_cast<uint16_t*>(to);
    const int64_t width = array.width / 2;
    for (int64_t column = threadIdx.x % 32 * HALVES; column < width;
         column += VECTORS * 32 * HALVES) {
      Pack<uint16_t, HALVES> packs[VECTORS];
#pragma unroll
      for (int n = 0; n < VECTORS; ++n)
        if (column + n * 32 * HALVES < width)
          packs[n] = load_pack<HALVES>(source + column + n * 32 * HALVES);
#pragma unroll
      for (int n = 0; n < VECTORS; ++n)
        if (column + n * 32 * HALVES < width)
          store_pack<HALVES>(target + column + n * 32 * HALVES, packs[n]);
    }
  }
}
