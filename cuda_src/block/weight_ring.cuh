// A ring of tiles in shared memory for the rows of the weight matrices. One warp fills it in the
// order of use, and the consumers empty it. The weights depend on nothing, so the ring fills while
// the blocks wait for each other. linear/small_m_ring.cuh has another ring, in which each warp
// fills and empties tiles of its own: it needs no barrier, but no warp goes on filling while all
// others wait for another block, as here.
//
// Rows lie ROW_PITCH apart, 64 bytes modulo 128: eight lanes read 64 bytes of two neighbouring rows
// without bank conflicts.
#pragma once
#include "../common/ring.cuh"
#include "../ptx/tma.cuh"

// The number of warps that multiply; one more fills the ring. The work of a warp besides the
// products does not shrink with more warps, and a scheduler of the multiprocessor issues it once
// for each of its warps. So each scheduler has only two warps, which may use 255 registers.
constexpr int CONSUMER_WARPS = 7;
constexpr int MAX_TILE_ROWS = 28;

__host__ __device__ constexpr int row_pitch(int bytes) { return (bytes + 63) / 128 * 128 + 64; }

// The rows of a matrix, or of a segment of its columns, that a block has.
struct MatrixRows {
  const uint8_t* data;      // of the first row
  int64_t stride;           // in bytes
  int begin;                // number of the first row
  int rows;                 // may be 0
  int bytes;                // of a row
  int pitch;                // in shared memory
  int tile_rows;            // of a tile, leads counted
  const uint8_t* leads[2];  // rows in front of the first tile: weight and bias of the norm before
  int num_leads;
  const void* bias;  // of all rows; null: there is none, or it is not for this segment

  __device__ const uint8_t* row(int i) const {
    if (i >= num_leads) return data + (i - num_leads) * stride;
    return i == 0 ? leads[0] : leads[1];
  }
};

// The tiles of a matrix, the same for the warp that fills and for those that empty. A tile has
// `leads` rows in front of its `count` rows from `row` on.
struct TileWalk {
  int rows, tile_rows, row, leads, count;

  __device__ explicit TileWalk(const MatrixRows& matrix)
      : rows(matrix.rows), tile_rows(matrix.tile_rows), row(0), leads(matrix.num_leads) {
    count = min(rows, max(0, tile_rows - leads));
  }
  __device__ bool more() const { return row < rows; }
  __device__ bool last() const { return row + count == rows; }
  __device__ void next() {
    row += count;
    leads = 0;
    count = min(rows - row, tile_rows);
  }
};

// The ring that the copy engine of sm_90 fills, with the barriers of common/ring.cuh: `full` of a
// tile counts bytes, `empty` the consumer warps.
template <int ARCH, int TILES, int TILE_BYTES, bool BULK = (ARCH >= 90)>
struct WeightRing {
  alignas(128) uint8_t tiles[TILES][TILE_BYTES];
  RingBarriers<TILES> barriers;

  using Place = Ring<TILES>;  // of the warp that fills, or of a consumer

  // One thread calls it; then the block must synchronise.
  __device__ void init() {
    barriers.init(CONSUMER_WARPS);
    mbarrier_init_fence();
  }

  // The filling warp asks for the next `count` rows of a matrix from `row` on, the leads counted.
  __device__ void fill(Place& at, const MatrixRows& matrix, int row, int count) {
    const int lane = threadIdx.x % 32;
    const uint32_t barrier = smem_address(&barriers.full[at.stage]);
    barriers.wait_empty(at);
    if (lane == 0) mbarrier_arrive_expect(barrier, count * matrix.bytes);
    __syncwarp();
    if (lane < count) {
      const uint32_t dst = smem_address(tiles[at.stage]) + lane * matrix.pitch;
      bulk_load(dst, matrix.row(row + lane), matrix.bytes, barrier);
    }
    at.advance();
  }
  __device__ void finish_filling(const Place&) {}

  // Consumers wait for the tile, and get it.
  __device__ const uint8_t* wait(const Place& at) {
    barriers.wait_full(at);
    return tiles[at.stage];
  }
  // The products of the tile are complete, so its loads are.
  __device__ void release(Place& at) {
    __syncwarp();
    barriers.release(at.stage);
    at.advance();
  }
};

// Before sm_90 there is no copy engine: a lane copies 16 bytes at a time, asynchronously from sm_80
// on, and counters say how many tiles are filled and emptied.
template <int ARCH, int TILES, int TILE_BYTES>
struct WeightRing<ARCH, TILES, TILE_BYTES, false> {
  static constexpr int IN_FLIGHT = TILES - 2;  // tiles that the copies fill at once

  alignas(128) uint8_t tiles[TILES][TILE_BYTES];
  volatile int filled;
  volatile int emptied[CONSUMER_WARPS];

  struct Place {
    int tile = 0;
    int number = 0;  // tiles before this one

    __device__ void advance() {
      ++number;
      if (++tile == TILES) tile = 0;
    }
  };

  __device__ void init() {
    filled = 0;
    for (int warp = 0; warp < CONSUMER_WARPS; ++warp) emptied[warp] = 0;
  }

  __device__ void fill(Place& at, const MatrixRows& matrix, int row, int count) {
    const int lane = threadIdx.x % 32;
    const volatile int& of_warp = emptied[min(lane, CONSUMER_WARPS - 1)];
    while (!__all_sync(0xffffffffu, of_warp > at.number - TILES)) {
    }
    __threadfence_block();
    const int loads = matrix.bytes / 16;
    for (int i = 0; i < count; ++i) {
      const uint8_t* src = matrix.row(row + i);
      const uint32_t dst = smem_address(tiles[at.tile]) + i * matrix.pitch;
      for (int load = lane; load < loads; load += 32) {
        if constexpr (ARCH >= 80) {
          cp_async_16(dst + 16 * load, src + 16 * load, true);
        } else {
          copy_16(dst + 16 * load, src + 16 * load, true);
        }
      }
    }
    at.advance();
    if constexpr (ARCH >= 80) {
      cp_async_commit();
      cp_async_wait<IN_FLIGHT>();
      publish(at.number - IN_FLIGHT);
    } else {
      publish(at.number);
    }
  }
  __device__ void finish_filling(const Place& at) {
    copies_wait<ARCH>();
    publish(at.number);
  }

  __device__ const uint8_t* wait(const Place& at) {
    while (filled <= at.number) {
    }
    __threadfence_block();
    __syncwarp();
    return tiles[at.tile];
  }
  __device__ void release(Place& at) {
    at.advance();
    __syncwarp();
    __threadfence_block();
    if (threadIdx.x % 32 == 0) emptied[threadIdx.x / 32] = at.number;
  }

 private:
  // Called when the lanes' copies of the first `number` tiles are complete.
  __device__ void publish(int number) {
    __threadfence_block();
    __syncwarp();
    if (threadIdx.x % 32 == 0) filled = number;
  }
};
