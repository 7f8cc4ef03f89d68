// The run of a group that a warp has, on its way from global to shared memory: the copy engine
// brings that of the next sample while the warp computes, in pieces, each into the place of the
// piece that was just read. Nobody but the warp itself waits for it.
//
// Why it ends and nothing is overwritten: a piece has one barrier, whose parity changes with each
// sample. One lane asks for the next copy into a piece after all lanes have read it
// (wait_for_loads(), then __syncwarp()), and all wait for that copy before they read again.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "affine.cuh"

// TENSORS runs of LOADS packs of each lane, in pieces of PIECE packs.
template <typename T, int TENSORS, int LOADS, int VECTOR, int PIECE_>
struct RunRing {
  static constexpr int PIECE = PIECE_, PIECES = LOADS / PIECE, BARRIERS = TENSORS * PIECES;
  static_assert(LOADS % PIECE == 0, "whole pieces");
  static constexpr int PITCH = 32 * VECTOR;  // elements between two loads of a lane
  static constexpr int BYTES = TENSORS * LOADS * 512;

  uint32_t packs;     // [TENSORS, LOADS, 32] of 16 bytes
  uint32_t barriers;  // [TENSORS, PIECES]
  int columns;        // that the warp has

  __device__ uint32_t barrier(int tensor, int piece) const {
    return barriers + (tensor * PIECES + piece) * int(sizeof(uint64_t));
  }

  // By one lane.
  __device__ void init() const {
    for (int i = 0; i < BARRIERS; ++i) mbarrier_init(barrier(0, i), 1);
    mbarrier_init_fence();
  }

  __device__ bool has(int piece) const { return piece * PIECE * PITCH < columns; }

  // Asks for a piece of the run that begins at `from`. By one lane.
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
