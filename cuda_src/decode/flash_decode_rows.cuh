// The rows of queries and results of a decode step of attention, whose work is divided as in
// decode_work.cuh: where they lie, and how results leave a block.
#pragma once
#include "flash_decode_merge.cuh"

// A block keeps its first segment, number 0, to the end, because finish_units() needs it. Later
// segments use the numbers 1, 2 and 3 in turn: the one before, the present one and the next one.
constexpr int SEGMENTS = 4;

__device__ __forceinline__ int number_after(int number) { return number % (SEGMENTS - 1) + 1; }

// What the options need of a query.
struct QueryRow {
  int diagonal;      // the key that it meets on the diagonal
  float slope_log2;  // of ALiBi, times log2(e)
};

template <typename T, int HEAD_DIM, int ROWS>
struct DecodeRows {
  const FlashDecodeParams& params;

  // Element offset of a row of q or out.
  __device__ int64_t offset(const Strides& strides, const Segment& s, int row) const {
    const int token = (s.first_row + row) / params.group;
    const int head = s.kv_head * params.group + s.first_row + row - token * params.group;
    return strides.at(s.batch, s.sequence.first_token + token, head);
  }

  __device__ QueryRow query_row(const Segment& s, int i) const {
    const int row = s.first_row + min(i, s.rows - 1), token = row / params.group;
    const int head = s.kv_head * params.group + row - token * params.group;
    const float* slopes = params.alibi_slopes;
    const float slope = slopes ? slopes[s.batch * params.alibi_batch_stride + head] : 0.f;
    return {s.sequence.length - s.sequence.tokens + token, slope * LOG2E};
  }

  __device__ void write(const Segment& s, int row, int column, const float (&out)[4],
                        Sum sum) const {
    if (column >= params.head_dim) return;
    const int token = (s.first_row + row) / params.group;
    const int head = s.kv_head * params.group + s.first_row + row - token * params.group;
    float factor = 1.f;
    if (params.sinks) {  // one more logit, with a value of zeros
      const float sink = params.sinks[head] * LOG2E, max = fmaxf(sum.max, sink);
      factor = weight_of(sum.max, max);
      sum = {max, sum.total * factor + weight_of(sink, max)};
    }
    const bool empty = sum.total == 0.f;  // a row that saw no key; a NaN is not empty
    factor *= empty ? 0.f : rcp_approx(sum.total);
    const float scaled[4] = {out[0] * factor, out[1] * factor, out[2] * factor, out[3] * factor};
    T* to = static_cast<T*>(params.out) + offset(params.out_strides, s, row) + column;
    const Words<T, 4> words = round_words<T>(scaled);
    *reinterpret_cast<uint2*>(to) = make_uint2(words.words[0], words.words[1]);
    if (params.lse && column == 0)
      params.lse[s.batch * params.lse_batch_stride + head * params.lse_head_stride +
                 s.sequence.first_token + token] =
          empty ? -INF : (sum.max + log2_of_sum(sum.total)) * LN2;
  }

  // Four columns of a segment's result to out, or to its part.
  __device__ __forceinline__ void put(const Segment& s, int row, int column, const float (&out)[4],
                                      Sum sum) const {
    if (s.parts == 1)
      write(s, row, column, out, sum);
    else
      store_row(parts()[s.slot(s.part, fixed())], row, column, out, sum);
  }

  // Merges the units of the first and of the last segment, if their parts were the last ones. No
  // other segment of a block has parts elsewhere.
  __device__ __forceinline__ void finish_units(const Segment* segments, bool (&flags)[3],
                                               int last) const {
    __syncthreads();  // the parts are stored
    if (const int i = threadIdx.x; i == 0 || i == 32) {
      const Segment& s = segments[i == 0 ? 0 : last];
      flags[i / 32] =
          s.parts > 1 && (i == 0 || last > 0) && count_part(s, params.counters, fixed());
    }
    __syncthreads();  // `flags` are written
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if (!flags[i]) continue;
      const Segment& s = segments[i == 0 ? 0 : last];
      merge_unit(parts(), params.counters, s, fixed(), flags[2],
                 [&](int row, int column, const float (&out)[4], Sum sum) {
                   write(s, row, column, out, sum);
                 });
    }
  }

  __device__ DecodePart<HEAD_DIM, ROWS>* parts() const {
    return static_cast<DecodePart<HEAD_DIM, ROWS>*>(params.parts);
  }
  __device__ bool fixed() const { return params.num_splits > 0; }
};
