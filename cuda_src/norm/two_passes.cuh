// Two passes over data that no block can hold, in one launch, close enough to each other for the
// second one to find the data in the L2 cache: blocks take pieces of the first pass over unit
// n + lag between those of the second pass over unit n. Who ends a unit's first pass sums up for
// it.
//
// No deadlock, whatever blocks run at a time: pieces are taken in order, only those of the second
// pass wait, and only for pieces that were taken before.
#pragma once
#include "../common/norm_params.cuh"
#include "../ptx/atomics.cuh"

struct Piece {
  bool second;  // pass
  int unit;
  int number;
};

__device__ __forceinline__ Piece piece_of(unsigned ticket, const TwoPassShape& shape) {
  const int round = ticket / unsigned(shape.pieces);
  const int number = ticket - round * shape.pieces;
  if (round < shape.lag) return {false, round, number};
  const int rest = round - shape.lag, both = 2 * (shape.units - shape.lag);
  if (rest >= both) return {true, rest - both / 2, number};
  return {rest % 2 == 0, rest / 2 + (rest % 2 ? shape.lag : 0), number};
}

// first(unit, piece) and finish(unit) leave their results in global memory. second(unit, piece,
// wait) may read those of finish, past the L1 cache, after wait(). `counters` are zeros.
template <class First, class Finish, class Second>
__device__ __forceinline__ void two_passes(const TwoPassShape& shape, int* counters, First first,
                                           Finish finish, Second second) {
  __shared__ unsigned ticket;
  __shared__ bool is_last;
  const unsigned end = 2u * shape.units * shape.pieces;
  if (threadIdx.x == 0) ticket = atomicAdd(counters, 1);
  __syncthreads();
#pragma unroll 1
  while (ticket < end) {
    const Piece piece = piece_of(ticket, shape);
    int* const arrived = counters + 1 + piece.unit;
    __syncthreads();
    if (threadIdx.x == 0) ticket = atomicAdd(counters, 1);  // the next one, while this one is done
    if (piece.second) {
      second(piece.unit, piece.number, [&] {
        if (threadIdx.x == 0) wait_flag(arrived, shape.pieces + 1);
        __syncthreads();
      });
    } else {
      first(piece.unit, piece.number);
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) is_last = atomicAdd(arrived, 1) == shape.pieces - 1;
      __syncthreads();
      if (is_last) {
        __threadfence();
        finish(piece.unit);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) release_flag(arrived);
      }
    }
    __syncthreads();
  }
}
