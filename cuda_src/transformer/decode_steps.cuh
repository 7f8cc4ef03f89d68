// The matrices of a launch in the order of use, the same for the warp that fills the ring and for
// those that empty it.
#pragma once
#include "../common/transformer_params.cuh"
#include "weight_ring.cuh"

enum class Matrix { qkv, proj, up, down, head, none };

// One matrix of one layer, or a segment of the columns of `down`.
struct Step {
  int layer = 0;
  Matrix matrix = Matrix::qkv;
  int segment = 0;

  __device__ bool more() const { return matrix != Matrix::none; }
  __device__ void next(const DecodeStackParams& params) {
    if (matrix != Matrix::down) {
      matrix = Matrix(int(matrix) + 1);
    } else if (++segment == params.segments) {
      segment = 0;
      matrix = ++layer < params.num_layers ? Matrix::qkv
               : params.head_weight        ? Matrix::head
                                           : Matrix::none;
    }
  }
  __device__ bool normalised() const {
    return matrix == Matrix::qkv || matrix == Matrix::up || matrix == Matrix::head;
  }
};

// The rows of this block of the matrix of a step.
template <typename T>
__device__ __forceinline__ MatrixRows rows_of_block(const DecodeStackParams& params,
                                                    const BlockPointers& weights,
                                                    const Step& step) {
  const void *data = nullptr, *leads[2] = {};
  int rows = params.width, columns = params.width, first = 0, segment = params.width;
  switch (step.matrix) {
    case Matrix::qkv:
      data = weights.qkv_weight, leads[0] = weights.ln1_weight, leads[1] = weights.ln1_bias;
      rows = 3 * params.width;
      break;
    case Matrix::proj:
      data = weights.proj_weight;
      break;
    case Matrix::up:
      data = weights.up_weight, leads[0] = weights.ln2_weight, leads[1] = weights.ln2_bias;
      rows = params.hidden_width;
      break;
    case Matrix::down:
      data = weights.down_weight;
      columns = params.hidden_width;
      segment = params.segment, first = step.segment * segment;
      break;
    default:
      data = params.head_weight, leads[0] = params.final_weight, leads[1] = params.final_bias;
      rows = params.vocab;
  }
  MatrixRows result;
  const int share = rows / gridDim.x, rest = rows % gridDim.x;
  result.begin = blockIdx.x * share + min(int(blockIdx.x), rest);
  result.rows = share + (blockIdx.x < rest);
  result.stride = int64_t(columns) * sizeof(T);
  result.bytes = min(segment, columns - first) * int(sizeof(T));
  result.pitch = row_pitch(segment * sizeof(T));
  result.data =
      static_cast<const uint8_t*>(data) + result.begin * result.stride + int64_t(first) * sizeof(T);
  result.leads[0] = static_cast<const uint8_t*>(leads[0]);
  result.leads[1] = static_cast<const uint8_t*>(leads[1]);
  result.num_leads = step.normalised() ? 2 : 0;
  return result;
}
