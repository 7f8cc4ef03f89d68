// Splits the tensors of float32 attention into float16 parts (parts.cuh), after fp16x3_ranges.cu
// has found the scales, and finds the largest norm of a row, which bounds dS in the backward pass.
// Sequences that cannot be split are left to the kernels for CUDA cores.
// Columns from head_dim to HEAD_DIM become zeros. The time is that of memory.
#include "rows.cuh"

// The length of a sequence that is left to the kernels for CUDA cores.
__device__ __forceinline__ int length_left(const int* seqused, int batch) {
  return seqused ? seqused[batch] : INT_MAX;
}

template <int HEAD_DIM, int PARTS, int ARCH>
__global__ void __launch_bounds__(SPLIT_WARPS * 32, 6)
    fp16x3_split(const __grid_constant__ Fp16x3SplitParams params) {
  const SplitBlock block(params);
  const SplitInputs& split = params.split;
  const bool serves = fp16x3_serves(split, block.batch, params.shape.heads_kv);
  if (block.is_first && threadIdx.x == 0) {
    split.left_q[block.batch] = serves ? 0 : length_left(params.seqused_q, block.batch);
    split.left_k[block.batch] = serves ? 0 : length_left(params.seqused_k, block.batch);
  }
  if (!serves) return;
  const bool of_keys = block.tensor == SplitTensor::K || block.tensor == SplitTensor::V;
  const int64_t rows = of_keys ? split.rows_k : split.rows_q;
  const int heads = of_keys ? params.shape.heads_kv : params.shape.heads_q;
  half_t* out = block.tensor == SplitTensor::Q   ? split.q
                : block.tensor == SplitTensor::K ? split.k
                : block.tensor == SplitTensor::V ? split.v
                                                 : split.dout;
  out += (block.head * rows + block.part_row) * HEAD_DIM;
  const int64_t to_low = heads * rows * HEAD_DIM;
  const float scale = power_of_two(scale_exponent(*block.range, block.tensor));
  using Lanes = SplitLanes<HEAD_DIM>;
  float square_norm = 0.f;
  Lanes::for_rows(block, params.shape.head_dim, [&](int row, const float4(&x)[Lanes::LOADS]) {
    float sum = 0.f;
#pragma unroll
    for (int load = 0; load < Lanes::LOADS; ++load) {
      const float4 y = {x[load].x * scale, x[load].y * scale, x[load].z * scale, x[load].w * scale};
      sum += y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w;
      uint32_t first[PARTS], second[PARTS];
      split_pair<PARTS, ARCH>(y.x, y.y, first);
      split_pair<PARTS, ARCH>(y.z, y.w, second);
      if (row >= block.rows || Lanes::column(load) >= HEAD_DIM) continue;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        *reinterpret_cast<uint2*>(out + part * to_low + int64_t(row) * HEAD_DIM +
                                  Lanes::column(load)) = make_uint2(first[part], second[part]);
      }
    }
#pragma unroll
    for (int mask = Lanes::PER_ROW / 2; mask > 0; mask /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    }
    square_norm = fmaxf(square_norm, sum);
  });
  if (block.tensor != SplitTensor::V && block.tensor != SplitTensor::DOUT) return;
  const uint32_t bits = max_of_lanes<32>(__float_as_uint(square_norm));
  if (!params.dout || threadIdx.x % 32 != 0 || bits == 0) return;
  atomicMax(&block.range->square_norm[static_cast<int>(block.tensor)], bits);
}
