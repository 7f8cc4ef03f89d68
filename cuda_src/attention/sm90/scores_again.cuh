// The scores of a warp for a second time, where those of the wgmma are lost.
#pragma once
#include "../warp_gemm.cuh"
#include "fwd_block.cuh"

// Computes the S of a warp by mma.sync, for which it does not need the rest of its warpgroup. L is
// the FwdLayout; Q and K lie at these addresses, and `warp_row` is the first of its rows of Q.
template <typename T, class L>
__device__ __forceinline__ void compute_s_again(float (&s)[L::BLOCK_N / 8][4], uint32_t smem_q,
                                                uint32_t smem_k, int warp_row) {
  using TileQ = typename L::TileQ;
  using TileK = typename L::TileK;
  auto& rows = reinterpret_cast<float (&)[1][L::BLOCK_N / 8][4]>(s);
  set_zero(rows);
  // Registers are scarce: no address may wait in one for this rare case, and the steps are a loop.
  RowOperandA<TileQ> q(smem_q, opaque(warp_row));
  RowOperandB<TileK> k(smem_k, opaque(0));
  const uint32_t q_address = q.address, k_address = k.address;
#pragma unroll 1
  for (int i = 0; i < L::HEAD_DIM / 16; ++i) {
    q.address = TileQ::advance(q_address, 0, 2 * i);
    k.address = TileK::advance(k_address, 0, 2 * i);
    warp_gemm<T, 90, 1>(rows, q, k);
  }
  uint32_t loaded = 0;  // K may be given back only after its loads have returned
#pragma unroll
  for (int n = 0; n < L::BLOCK_N / 8; n += 2) loaded |= opaque_bits(s[n][0]);
  wait_for_loads(loaded);
}
