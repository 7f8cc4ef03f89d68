// The matrices of a launch in the order of use. The warp that fills the ring and the consumers walk
// over the same steps.
#pragma once
#include "params.cuh"
#include "weight_ring.cuh"

enum class Matrix { qkv, proj, up, down, head, none };

// One matrix of one layer, or a segment of the columns of `down`.
struct Step {
  int layer = 0;
  Matrix matrix = Matrix::qkv;
  int segment = 0;
  uint32_t tag;           // the tag (tagged_words.cuh) of the words that this layer writes
  uint32_t residual_tag;  // that of the residual between layers; within a layer it is the other one

  // A launch replaces the words that layers write num_layers times, and the residual
  // 2 * num_layers + 1 times. Before the first launch all words are 0.
  __device__ Step(const DecodeStackParams& params, uint32_t launch)
      : tag(~(launch * params.num_layers) & 1), residual_tag(~launch & 1) {}

  __device__ bool more() const { return matrix != Matrix::none; }
  __device__ void next(const DecodeStackParams& params) {
    if (matrix != Matrix::down) {
      matrix = Matrix(int(matrix) + 1);
    } else if (++segment == params.segments) {
      segment = 0;
      tag ^= 1;
      matrix = ++layer < params.num_layers ? Matrix::qkv
               : params.head_weight        ? Matrix::head
                                           : Matrix::none;
    }
  }
  __device__ bool normalised() const {
    return matrix == Matrix::qkv || matrix == Matrix::up || matrix == Matrix::head;
  }
};

// n / d, where `inverse` is inverse(d) of cupyflash/ops/block/plan.py and n * d < 2^31.
__device__ __forceinline__ int quotient(int n, uint32_t inverse) {
  return __umulhi(2 * n, inverse);
}

constexpr int MATRICES = int(Matrix::none);

// The rows that a block has of each matrix, the same in all layers.
struct alignas(16) BlockRows {
  int begin, rows;
  int pitch, tile_rows;
};
template <typename T, int TILE_BYTES>
__device__ __forceinline__ BlockRows block_rows(const DecodeStackParams& params, Matrix matrix) {
  const int rows = matrix == Matrix::qkv    ? 3 * params.width
                   : matrix == Matrix::up   ? params.hidden_width
                   : matrix == Matrix::head ? params.vocab
                                            : params.width;
  const int share = rows / gridDim.x, rest = rows % gridDim.x;
  const int columns = matrix == Matrix::down ? params.segment : params.width;
  const int pitch = row_pitch(columns * sizeof(T));
  return {int(blockIdx.x) * share + min(int(blockIdx.x), rest), share + (int(blockIdx.x) < rest),
          pitch, min(MAX_TILE_ROWS, TILE_BYTES / pitch)};
}

// This block's rows of the matrix of a step.
template <typename T>
__device__ __forceinline__ MatrixRows rows_of_block(const DecodeStackParams& params,
                                                    const BlockPointers& weights,
                                                    const BlockRows (&of_matrix)[MATRICES],
                                                    const Step& step) {
  const void *data = nullptr, *leads[2] = {}, *bias = nullptr;
  int columns = params.width, first = 0, segment = params.width;
  switch (step.matrix) {
    case Matrix::qkv:
      data = weights.qkv_weight, leads[0] = weights.ln1_weight, leads[1] = weights.ln1_bias;
      bias = weights.qkv_bias;
      break;
    case Matrix::proj:
      data = weights.proj_weight, bias = weights.proj_bias;
      break;
    case Matrix::up:
      data = weights.up_weight, leads[0] = weights.ln2_weight, leads[1] = weights.ln2_bias;
      bias = weights.up_bias;
      break;
    case Matrix::down:
      data = weights.down_weight, bias = step.segment ? nullptr : weights.down_bias;
      columns = params.hidden_width;
      segment = params.segment, first = step.segment * segment;
      break;
    default:
      data = params.head_weight, leads[0] = params.final_weight, leads[1] = params.final_bias;
  }
  const BlockRows own = of_matrix[int(step.matrix)];
  MatrixRows result;
  result.begin = own.begin, result.rows = own.rows;
  result.pitch = own.pitch, result.tile_rows = own.tile_rows;
  result.stride = int64_t(columns) * sizeof(T);
  result.bytes = min(segment, columns - first) * int(sizeof(T));
  result.data =
      static_cast<const uint8_t*>(data) + result.begin * result.stride + int64_t(first) * sizeof(T);
  result.leads[0] = static_cast<const uint8_t*>(leads[0]);
  result.leads[1] = static_cast<const uint8_t*>(leads[1]);
  result.bias = bias;
  result.num_leads = step.normalised() ? 2 : 0;
  return result;
}
