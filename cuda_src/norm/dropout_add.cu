// out = dropout(x) + residual, the input of a norm; without a residual it is also the gradient of x
// from the gradient of out.
//
// Elementwise: a thread has VECTOR neighbouring columns of a row, and reads and writes nothing that
// another thread writes. Column c of row r takes word c / 2 % 4 of the random numbers of counter
// (c / 8, r), its lower half if c is even, and is dropped if these 16 bits are below the threshold.
// r is the index of the row in C order, whatever the strides, so that forward, backward and the CPU
// drop the same elements. The sum is rounded once.
#include "../common/philox.cuh"
#include "../common/words.cuh"
#include "params.cuh"

constexpr int THREADS = 256;
constexpr int ROW_DROPOUT_STREAM = 2;  // of Philox; other uses of a seed have other streams

template <typename T, typename OUT, int VECTOR>
__global__ void __launch_bounds__(THREADS)
    dropout_add(const __grid_constant__ DropoutAddParams params) {
  // ---- which columns of which row ----
  const NormShape& shape = params.shape;
  const uint32_t packs = ceil_div(shape.columns, VECTOR);  // of a row
  const uint64_t index = uint64_t(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t row = index / packs;
  const int column = int(index - row * packs) * VECTOR;
  if (row >= shape.rows) return;

  // ---- read ----
  const T* x = static_cast<const T*>(params.x) + shape.at(params.x_strides, row);
  const auto values = load_words<VECTOR>(x + column);
  Words<OUT, VECTOR> added = {};
  if (params.residual) {
    const int64_t begin = shape.at(params.residual_strides, row);
    added = load_words<VECTOR>(static_cast<const OUT*>(params.residual) + begin + column);
  }

  // ---- drop, add ----
  const uint4 random = philox(uint64_t(*params.seed), column / 8, uint32_t(row),
                              uint32_t(row >> 32), ROW_DROPOUT_STREAM);
  const uint32_t limit = uint32_t(params.threshold) << 16;
  const int first = VECTOR == 8 ? 0 : column % 8;  // of the eight columns of these numbers
  float out[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const int c = first + i;
    const uint32_t word = c < 4 ? (c < 2 ? random.x : random.y) : (c < 6 ? random.z : random.w);
    const bool kept = (c % 2 ? word : word << 16) >= limit;
    out[i] = (kept ? values.at(i) * params.scale : 0.f) + added.at(i);
  }
  OUT* to = static_cast<OUT*>(params.out) + shape.at(params.out_strides, row);
  store_words<VECTOR>(to + column, round_words<OUT>(out));
}
