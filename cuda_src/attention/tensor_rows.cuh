// The rows of a sequence, as the tensor maps of the sm_90 kernels address them.
#pragma once
#include "../ptx/tma.cuh"
#include "block_info.cuh"

// Columns of a tile of a head in shared memory: one TMA tile of 32, or whole ones of 64.
constexpr int tile_columns(int head_dim) { return head_dim <= 32 ? 32 : round_up(head_dim, 64); }

// The tensor maps in front of FlashFwdSm90Params and FlashBwdSm90Params, in their order.
enum class RowsMap { Q, K, V, OUT, DOUT = OUT };
// With keys in pages, the maps of a sequence in the place of those of its K and V.
constexpr RowsMap FIRST_PAGE_OF_V = RowsMap::K, LAST_PAGE_OF_V = RowsMap::V;

// The rows of one tensor that belong to a sequence: row r, column c of a head is at the coordinates
// (c, row + r, head, batch) of the map, and rows past the end of the sequence are outside of it.
struct TensorRows {
  const TensorMap* map;
  int row;
  int batch;

  TensorRows() = default;

  // Params is FlashFwdSm90Params or FlashBwdSm90Params. With an opaque 0 as `zero` the address of
  // the map is computed here, instead of waiting in two registers through the loops of the caller.
  template <typename Params>
  __device__ TensorRows(const Params& params, RowsMap which, const Sequence& sequence, int batch,
                        int zero = 0)
      : map(params.sequence_maps
                ? params.sequence_maps + static_cast<int>(which) * params.base.shape.batch + batch
                : &params.q_map + (zero + static_cast<int>(which))),
        row(int(is_of_keys(which) ? sequence.start_k : sequence.start_q)),
        batch((is_of_keys(which) ? params.base.cu_seqlens_k : params.base.cu_seqlens_q) ? 0
                                                                                        : batch) {
    if (params.sequence_maps) tensor_map_acquire(*map);
  }

  __device__ static constexpr bool is_of_keys(RowsMap which) {
    return which == RowsMap::K || which == RowsMap::V;
  }

  // Copy a TMA tile, whose first column is 64 * block, to shared memory and back.
  __device__ void load(uint32_t dst, uint32_t barrier, int block, int first_row, int head) const {
    tma_load(dst, *map, barrier, block * 64, row + first_row, head, batch);
  }
  __device__ void prefetch(int block, int first_row, int head) const {
    tma_prefetch_tile(*map, block * 64, row + first_row, head, batch);
  }
  __device__ void store(uint32_t src, int block, int first_row, int head) const {
    tma_store(*map, src, block * 64, row + first_row, head, batch);
  }
};
