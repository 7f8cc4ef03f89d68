// key_mask.cuh for the simt kernels, element by element.
#pragma once
#include "../key_mask.cuh"
#include "score.cuh"

template <typename E>
struct ThreadBias<const KeyMasked<E>> {
  ThreadBias<const E> bias;
  KeyBits bits;
  int first_key;  // the one of the thread's first score
  bool rows_are_keys;

  __device__ ThreadBias(const BiasHead<const KeyMasked<E>>& head, int row, int col)
      : bias(head.bias, row, col),
        bits(head.bits),
        first_key(head.rows_are_keys ? row : col),
        rows_are_keys(head.rows_are_keys) {}

  __device__ float add_to(float score, int row, int col) const {
    if (!bias.exists(row, col)) return score;
    return bits.sees(first_key + (rows_are_keys ? row : col)) ? bias.add_to(score, row, col) : -INF;
  }
};
