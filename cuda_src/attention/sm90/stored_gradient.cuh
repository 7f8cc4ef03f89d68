// The gradient of a bias that has an element for each score, in flash_bwd_sm90.cu: dS, which every
// step leaves in shared memory for dQ = dS K, is that gradient, so the consumers store it in the
// dtype of q, and no element is added to. A softcap would put its slope between the two.
//
// TMA loads the bias, and params.dbias has rows of whole 16 bytes. Key tiles and query tiles that
// do not meet are not visited; the host fills dbias with zeros where a mask leaves such tiles.
#pragma once
#include "../../ptx/opaque.cuh"
#include "../../ptx/st_global.cuh"
#include "bwd_layout.cuh"

// Stores dS of a warpgroup's keys, 128 bytes of a row by eight lanes. All loads from shared memory
// are complete when this thread arrives at the barrier of the next step, behind which the buffer
// may be written.
template <typename T, class L>
__device__ __forceinline__ void store_bias_gradient(const FlashBwdParams& params, uint32_t smem,
                                                    int group, const BwdTile& tile, int head,
                                                    int m_begin, int stage) {
  using TileS = typename L::TileS;
  static_assert(!L::OVERLAPPED && !L::WALKS_UP, "the kernel calls step(), from the last query on");
  constexpr int ROWS_PER_PASS = WARPGROUP / TileS::ROW_CHUNKS;
  const int thread = fresh_thread_index() % WARPGROUP;
  const int row = thread / TileS::ROW_CHUNKS;
  const int chunk = thread % TileS::ROW_CHUNKS;
  const int key = tile.n_begin + group * 64 + chunk * 8;
  const int rows = key < params.shape.seqlen_k ? params.shape.seqlen_q - m_begin - row : 0;
  const uint32_t from = smem + L::DS_OFFSET + stage * TileS::BYTES + group * TileS::BLOCK_BYTES +
                        TileS::offset(row, chunk);
  const int64_t stride = opaque(params.dbias_strides.row);
  T* to = reinterpret_cast<T*>(params.dbias) + params.dbias_strides.at(tile.batch, head) +
          (m_begin + row) * stride + key;
  uint4 words[L::BLOCK_M / ROWS_PER_PASS];
#pragma unroll
  for (int pass = 0; pass < L::BLOCK_M / ROWS_PER_PASS; ++pass) {
    words[pass] = ld_shared_128(from + pass * ROWS_PER_PASS * TileS::ROW_BYTES);
  }
#pragma unroll
  for (int pass = 0; pass < L::BLOCK_M / ROWS_PER_PASS; ++pass) {
    if (pass * ROWS_PER_PASS < rows) st_global_stream_128(to, words[pass]);
    to += ROWS_PER_PASS * stride;
  }
}
