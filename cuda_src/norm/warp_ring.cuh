// Packs of a warp on their way from global to shared memory: the copy engine brings those of the
// next samples while the warp computes, each into a place that was just read. Nobody but the warp
// itself waits for them.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "group_tile.cuh"

// PLACES times LOADS packs of each lane, in pieces of PIECE packs. Rows of less than a warp follow
// each other.
template <class Tile, typename T, int PLACES, int PIECE_ = Tile::LOADS % 5 == 0 ? 5 : Tile::LOADS>
struct WarpRing {
  static constexpr int LOADS = Tile::LOADS, PIECE = PIECE_;
  static_assert(LOADS % PIECE == 0, "whole pieces");
  static constexpr int PIECES = LOADS / PIECE, BARRIERS = PLACES * PIECES;
  static constexpr int LANES = Tile::ROW_THREADS < 32 ? Tile::ROW_THREADS : 32;  // of a row
  static constexpr int ROWS = 32 / LANES;
  static constexpr int PITCH = LANES * Tile::VECTOR;  // elements between two loads of a lane
  static constexpr int BYTES = PLACES * LOADS * 512;

  uint32_t packs;     // [PLACES, ROWS, LOADS, LANES] of 16 bytes
  uint32_t barriers;  // [PLACES, PIECES]

  __device__ uint32_t barrier(int place, int piece) const {
    return barriers + (place * PIECES + piece) * int(sizeof(uint64_t));
  }

  // By one lane, as are the next two.
  __device__ void init() const {
    for (int i = 0; i < BARRIERS; ++i) mbarrier_init(barrier(0, i), 1);
    mbarrier_init_fence();
  }

  // Once all lanes have read what was there, and before the copies of as many bytes.
  __device__ void expect(int place, int piece, int bytes) const {
    mbarrier_arrive_expect(barrier(place, piece), bytes);
  }

  // A piece of row `row` of a place; the row begins at `from`.
  __device__ void load(int place, int row, int piece, const T* from, int bytes,
                       uint32_t barrier) const {
    const int begin = piece * PIECE * PITCH;
    bulk_load(packs + (place * ROWS + row) * (LOADS * LANES * 16) + begin * int(sizeof(T)),
              from + begin, bytes, barrier);
  }

  __device__ void wait(int place, int piece, int parity) const {
    mbarrier_wait(barrier(place, piece), parity);
  }

  // Of a pack of this lane.
  __device__ uint32_t address(int place, int load) const {
    const int lane = threadIdx.x % 32, row = lane / LANES;
    return packs + ((place * ROWS + row) * LOADS + load) * (LANES * 16) + lane % LANES * 16;
  }

  __device__ Words<T, Tile::VECTOR> read(int place, int load) const {
    const uint4 v = ld_shared_128(address(place, load));
    return {{v.x, v.y, v.z, v.w}};
  }
};

// Of warps that have a run of a row each, with a tensor in each place.
template <class Tile, typename T, int PLACES, int... PIECE_>
struct RunRing : WarpRing<Tile, T, PLACES, PIECE_...> {
  using Ring = WarpRing<Tile, T, PLACES, PIECE_...>;

  int columns;  // that the warp has

  __device__ bool has(int piece) const { return piece * Ring::PIECE * Ring::PITCH < columns; }
  __device__ int bytes(int piece) const {
    const int rest = columns - piece * Ring::PIECE * Ring::PITCH;
    return min(rest, Ring::PIECE * Ring::PITCH) * int(sizeof(T));
  }

  // With the piece of a run that begins at `from`. By one lane, when all have read what was there.
  __device__ void fill(int place, int piece, const T* from) const {
    const int size = bytes(piece);
    this->expect(place, piece, size);
    this->load(place, 0, piece, from, size, this->barrier(place, piece));
  }
};
