// Between the third step and ../attention/: attention in tiles, in the order of the first
// FlashAttention paper (arXiv:2205.14135, Algorithm 1).
//
// One block computes one head of one batch entry. The outer loop is over tiles of KEYS keys and
// values, which lie in shared memory as float32; the inner loop is over the queries, ROWS rows to a
// warp at a time. What a row has found so far, its output `acc`, its largest score `row_max` and
// the sum `row_sum` of its exponentials, is read from global memory for each tile of keys and
// written back:
//   S   = scale * q k^T                         a lane has one key
//   P   = exp(S - new_max)                      new_max is the larger of row_max and that of S
//   sum = exp(row_max - new_max) row_sum        what the keys before this tile weigh now
//   acc = (sum acc + P v) / (sum + sum of P)    a lane has the columns lane, lane + 32, ...
// acc is float32 and always divided by the sum, as in the paper, so it is the output for the keys
// so far. The tile with the last key that a row sees writes `out`.
//
// A warp meets the same rows in each pass over the queries, and a lane the same elements of acc, so
// warps wait for each other only before and after a tile of keys is replaced. A warp's parts of q
// and P in shared memory are its own.
//
// Each key and value is read from memory once, but queries and acc once for each tile of keys: acc
// moves twice, which is most of the traffic of a long sequence. A grid of batch * heads blocks
// leaves most of a GPU idle where that product is small: 16 heads keep 16 of 132 multiprocessors of
// an H100 busy. FlashAttention-2 (arXiv:2307.08691) exchanges the loops: a block owns queries,
// keeps acc in registers, divides once, and there are as many blocks as tiles of queries.
#include "../common/convert.cuh"
#include "../common/warp.cuh"
#include "params.cuh"

constexpr int THREADS = 256;

// HEAD_DIM is at least head_dim; the columns beyond are zeros in shared memory. KEYS is at most 32,
// so that a lane has one key, and such that all fits into the 48 KB that every GPU has.
template <typename T, int HEAD_DIM, int KEYS>
__global__ void __launch_bounds__(THREADS, 1)
    flash_attention_1(const __grid_constant__ BaselineAttentionParams params) {
  constexpr int WARPS = THREADS / 32;
  constexpr int COLUMNS = HEAD_DIM / 32;  // of a lane
  constexpr int ROWS = 8 / COLUMNS;       // of a warp: a lane has 8 elements of acc
  constexpr int K_LINE = HEAD_DIM + 4;  // lanes that read the same columns of 8 keys use all banks
  alignas(16) __shared__ float k_tile[KEYS][K_LINE], v_tile[KEYS][HEAD_DIM];
  alignas(16) __shared__ float q_rows[WARPS][ROWS][HEAD_DIM], p_rows[WARPS][ROWS][KEYS];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t heads = params.heads, head_dim = params.head_dim;
  const int64_t batch = blockIdx.x / heads, head = blockIdx.x % heads;
  const T* q = static_cast<const T*>(params.q);
  const T* k = static_cast<const T*>(params.k);
  const T* v = static_cast<const T*>(params.v);
  T* out = static_cast<T*>(params.out);

  int64_t first_key = 0;
  do {  // also without keys, since out must be 0 then
    // ---- the next tile of keys and values ----
    __syncthreads();  // all warps are done with the tile before
    for (int i = threadIdx.x; i < KEYS * HEAD_DIM; i += THREADS) {
      const int key = i / HEAD_DIM, d = i % HEAD_DIM;
      const bool exists = first_key + key < params.seqlen_k && d < head_dim;
      const int64_t at =
          ((batch * params.seqlen_k + first_key + key) * heads + head) * head_dim + d;
      k_tile[key][d] = exists ? to_float(k[at]) : 0.f;
      v_tile[key][d] = exists ? to_float(v[at]) : 0.f;
    }
    __syncthreads();

    for (int64_t query = warp * ROWS; query < params.seqlen_q; query += WARPS * ROWS) {
      // Rows see no fewer keys than the rows before them. All rows are met at the first tile, which
      // writes out for those that see no key at all.
      const int rows = int(min(int64_t(ROWS), params.seqlen_q - query));
      if (first_key > 0 && params.keys_of_query(query + rows - 1) <= first_key) continue;
      const int64_t row = (batch * params.seqlen_q + query) * heads + head;

      // ---- q, and what the rows have found so far ----
      __syncwarp();  // all lanes are done with the rows before
      for (int i = lane; i < ROWS * HEAD_DIM; i += 32) {
        const int r = i / HEAD_DIM, d = i % HEAD_DIM;
        const bool exists = r < rows && d < head_dim;
        const int64_t at = (row + r * heads) * head_dim + d;
        q_rows[warp][r][d] = exists ? params.scale * to_float(q[at]) : 0.f;
      }
      float past_max[ROWS], past_sum[ROWS], acc[ROWS][COLUMNS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const bool has_past = first_key > 0 && r < rows;
        past_max[r] = has_past ? params.row_max[row + r * heads] : -INF;
        past_sum[r] = has_past ? params.row_sum[row + r * heads] : 0.f;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const int d = lane + 32 * c;
          const bool exists = has_past && d < head_dim;
          acc[r][c] = exists ? params.acc[(row + r * heads) * head_dim + d] : 0.f;
        }
      }
      __syncwarp();  // the rows are in shared memory, and all lanes have read row_max and row_sum

      // ---- S = scale * q k^T ----
      float scores[ROWS] = {};
#pragma unroll 8
      for (int d = 0; d < HEAD_DIM; d += 4) {
        const float4 y = *reinterpret_cast<const float4*>(&k_tile[lane % KEYS][d]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const float4 x = *reinterpret_cast<const float4*>(&q_rows[warp][r][d]);
          scores[r] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
        }
      }

      // ---- P, and what the keys before this tile weigh now ----
      float kept[ROWS], total[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const bool seen = lane < KEYS && first_key + lane < params.keys_of_query(query + r);
        const float new_max = fmaxf(past_max[r], warp_max(seen ? scores[r] : -INF));
        const float weight = seen ? expf(scores[r] - new_max) : 0.f;
        kept[r] = past_sum[r] == 0.f ? 0.f : expf(past_max[r] - new_max) * past_sum[r];
        total[r] = kept[r] + warp_sum(weight);
        if (lane < KEYS) p_rows[warp][r][lane] = weight;
        if (lane == 0 && r < rows) {
          params.row_max[row + r * heads] = new_max;
          params.row_sum[row + r * heads] = total[r];
        }
      }
      __syncwarp();  // P is in shared memory

      // ---- acc = (kept acc + P v) / total ----
      float pv[ROWS][COLUMNS] = {};
#pragma unroll 4
      for (int key = 0; key < KEYS; ++key) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const float value = v_tile[key][lane + 32 * c];
#pragma unroll
          for (int r = 0; r < ROWS; ++r) pv[r][c] += p_rows[warp][r][key] * value;
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int64_t visible = params.keys_of_query(query + r);
        if (r >= rows || (first_key > 0 && visible <= first_key)) continue;  // not there, or done
        const bool is_last = visible <= first_key + KEYS;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const int d = lane + 32 * c;
          if (d >= head_dim) continue;
          const int64_t at = (row + r * heads) * head_dim + d;
          const float sum = kept[r] * acc[r][c] + pv[r][c];
          const float value = total[r] == 0.f ? 0.f : sum / total[r];
          if (is_last) {
            out[at] = from_float<T>(value);
          } else {
            params.acc[at] = value;
          }
        }
      }
    }
    first_key += KEYS;
  } while (first_key < params.seqlen_k);
}
