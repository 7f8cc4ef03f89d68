// A decode step of attention as in flash_decode.cu, for many queries of a key head: the new tokens
// of its query heads, token by token, 64 at once. flash_decode would read the keys again for every
// 16 of them. The new keys are in the cache before.
//
// Segments are divided and merged as there (decode_work.cuh, flash_decode_merge.cuh), with chunks
// of 16 keys, so that a round is a tile of 64 keys. All warps copy a chunk of each tile to shared
// memory with cp.async, and each computes with the whole tile for 16 queries of its own.
//
//   shared memory  Q [64][HEAD_DIM], STAGES tiles of K and V [64][HEAD_DIM], which take the results
//                  [64][HEAD_DIM] in float32 and their sums at the end of a segment
//   overlap        the copies of STAGES - 1 tiles are under way beside the products of one; two
//                  blocks on a multiprocessor
//
// Why nothing is overwritten while it is read. A tile is copied over the one that was computed
// before the last barrier. Between the products of the last tile and the results that take its
// place lies a barrier, and one between those and the queries of the next segment. Segments have
// three places in turn, as in flash_decode.cu. No block waits for another, so the kernel ends.
//
// Source: as flash_decode.cu; FlashAttention-2, arXiv:2307.08691.
#include "../attention/warp_gemm.cuh"
#include "../ptx/dependent_launch.cuh"
#include "flash_decode_keys.cuh"
#include "flash_decode_rows.cuh"

constexpr int TILE_ROWS = NUM_WARPS * 16;
constexpr int CHUNK_KEYS = 16, TILE_KEYS = NUM_WARPS * CHUNK_KEYS;

struct TileStorage {
  QueryRow rows[TILE_ROWS];
  Segment segments[SEGMENTS];
  int rounds[NUM_WARPS];  // first_segment()
  bool last[3];           // finish_units()
};

// The softmax of rows g and g + 8 of a warp in lane 4 g + c. `total` stays a sum over the lane's
// own keys until the end.
struct TileSoftmax {
  float max[2] = {-INF, -INF};
  float total[2] = {0.f, 0.f};

  // Turns scores into weights. rescale is the factor for the outputs so far.
  template <int N>
  __device__ __forceinline__ void update(float (&s)[N][4], float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = max[half];
#pragma unroll
      for (int n = 0; n < N; ++n)
        new_max = fmaxf(new_max, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      new_max = quad_max(new_max);
      rescale[half] = weight_of(max[half], new_max);
      max[half] = new_max;
      total[half] *= rescale[half];
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[n][i] = weight_of(s[n][i], new_max);
          total[half] += s[n][i];
        }
      }
    }
  }
};

template <typename T, int HEAD_DIM, int ARCH, int STAGES>
struct TileBlock : DecodeRows<T, HEAD_DIM, TILE_ROWS> {
  using Base = DecodeRows<T, HEAD_DIM, TILE_ROWS>;
  using Base::params;
  using TileQ = SmemTile<TILE_ROWS, HEAD_DIM>;
  using TileKV = SmemTile<TILE_KEYS, HEAD_DIM>;
  using Rows = SegmentRows<T, CHUNK_KEYS>;
  static constexpr int STAGE_BYTES = 2 * TileKV::BYTES;
  static constexpr int SMEM_BYTES = TileQ::BYTES + STAGES * STAGE_BYTES;
  static constexpr int COLUMNS = HEAD_DIM / 8;  // lanes of a row
  static_assert(TILE_ROWS * (HEAD_DIM * 4 + int(sizeof(Sum))) <= STAGES * STAGE_BYTES,
                "the results fit");

  TileStorage& storage;
  uint32_t smem_q;
  unsigned char* ring;

  __device__ uint32_t smem_k(int stage) const {
    return smem_q + TileQ::BYTES + stage * STAGE_BYTES;
  }

  // Queries, and what the options need of them, to shared memory; rows that do not exist are zeros.
  __device__ __forceinline__ void stage_queries(const Segment& s) const {
    const int column = threadIdx.x % COLUMNS * 8;
#pragma unroll 1
    for (int row = threadIdx.x / COLUMNS; row < TILE_ROWS; row += DECODE_THREADS / COLUMNS) {
      const bool valid = row < s.rows && column < params.head_dim;
      const T* q = static_cast<const T*>(params.q);
      if (valid) q += this->offset(params.q_strides, s, row) + column;
      cp_async_16(smem_q + TileQ::offset(row, column / 8), q, valid);
    }
    if (const int i = threadIdx.x; i < TILE_ROWS) storage.rows[i] = this->query_row(s, i);
  }

  // Copies this warp's chunk of a tile. Columns that do not exist become zeros.
  __device__ __forceinline__ void copy_chunk(const Rows& rows, RowPlace at, int stage) const {
    const int lane = threadIdx.x % 32, column = lane % COLUMNS * 8;
    const bool valid = column < params.head_dim;
    const T *k = rows.k_row(at), *v = rows.v_row(at);
    const int first = threadIdx.x / 32 * CHUNK_KEYS + lane / COLUMNS;
#pragma unroll
    for (int i = 0; i < CHUNK_KEYS; i += 32 / COLUMNS) {
      const uint32_t to = smem_k(stage) + TileKV::offset(first + i, column / 8);
      const int from = i + lane / COLUMNS;
      cp_async_16(to, pointer_of(k, from) + (valid ? column : 0), valid);
      cp_async_16(to + TileKV::BYTES, pointer_of(v, from) + (valid ? column : 0), valid);
    }
  }

  // Turns products into scores times log2(e), for the keys of a tile from `first` on.
  template <int N>
  __device__ __forceinline__ void apply_score(float (&s)[N][4], const Segment& segment, int row,
                                              int first) const {
    const bool masked = first < segment.inner_begin || first + TILE_KEYS > segment.inner_end;
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) {
      float& score = s[i / 4][i % 4];
      score = params.to_tanh == 0.f ? score * params.scale_log2
                                    : tanh_exp2(score * params.to_tanh) * params.scale_log2;
    }
    if (!params.alibi_slopes && !masked) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryRow query = storage.rows[row + half * 8];
      const int begin = max(segment.sequence.leftpad, query.diagonal - params.window_left);
      const int end = min(segment.sequence.length, query.diagonal + params.window_right + 1);
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) {
        float& score = s[i / 2][half * 2 + i % 2];
        const int key = first + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        score -= query.slope_log2 * fabsf(float(key - query.diagonal));
        if (masked && (key < begin || key >= end)) score = -INF;
      }
    }
  }

  __device__ __forceinline__ void attend(const Segment& s, float (&o)[1][HEAD_DIM / 8][4],
                                         TileSoftmax& softmax) const {
    const Rows rows{params, s};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = ceil_div(s.chunk_end - s.chunk, NUM_WARPS), own = s.chunk + warp;
    RowPlace next = {0, 0};
    if (tiles > 0) next = rows.place(own);
    int copied = 0;  // tiles
    const auto copy_next = [&] {
      if (copied < tiles) {
        const RowPlace at = next;
        const int chunk = own + copied * NUM_WARPS;
        if (copied + 1 < tiles) next = rows.place(chunk + NUM_WARPS);
        copy_chunk(rows, at, copied % STAGES);
      }
      ++copied;
      cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) copy_next();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();  // this tile has landed; no warp reads the one before any more
      copy_next();
      if (warp * 16 >= s.rows) continue;
      const uint32_t smem = smem_k(tile % STAGES);
      float acc[1][TILE_KEYS / 8][4];
      set_zero(acc);
      warp_gemm<T, ARCH, HEAD_DIM / 16>(acc, RowOperandA<TileQ>(smem_q, warp * 16),
                                        RowOperandB<TileKV>(smem, 0));
      apply_score(acc[0], s, warp * 16 + lane / 4, rows.first_key(s.chunk + tile * NUM_WARPS));
      float rescale[2];
      softmax.update(acc[0], rescale);
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[0][d][i] *= rescale[i / 2];
      }
      const RegisterOperandA<T, ARCH, 1, TILE_KEYS / 8> weights(acc);
      warp_gemm<T, ARCH, TILE_KEYS / 16>(o, weights,
                                         ColumnOperandB<TileKV, HEAD_DIM>(smem + TileKV::BYTES, 0));
    }
    cp_async_wait<0>();
  }

  // The results to shared memory, and from there to out or to the part.
  __device__ __forceinline__ void finish(const Segment& s, const float (&o)[1][HEAD_DIM / 8][4],
                                         const TileSoftmax& softmax) const {
    float (*out)[HEAD_DIM] = reinterpret_cast<float (*)[HEAD_DIM]>(ring);
    Sum* sums = reinterpret_cast<Sum*>(out + TILE_ROWS);
    const int lane = threadIdx.x % 32;
    __syncthreads();  // no warp reads the last tile any more
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x / 32 * 16 + half * 8 + lane / 4;
      const float total = quad_sum(softmax.total[half]);
      if (lane % 4 == 0) sums[row] = {softmax.max[half], total};
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; ++d)
        *reinterpret_cast<float2*>(&out[row][d * 8 + lane % 4 * 2]) =
            make_float2(o[0][d][2 * half], o[0][d][2 * half + 1]);
    }
    __syncthreads();  // the results are written
#pragma unroll 1
    for (int i = threadIdx.x * 4; i < s.rows * HEAD_DIM; i += 4 * DECODE_THREADS) {
      const int row = i / HEAD_DIM, column = i % HEAD_DIM;
      const float4 x = *reinterpret_cast<const float4*>(&out[row][column]);
      this->put(s, row, column, {x.x, x.y, x.z, x.w}, sums[row]);
    }
    __syncthreads();  // the results are read
  }
};

template <typename T, int HEAD_DIM, int ARCH, int STAGES, int SMEM_BYTES>
__global__ void __launch_bounds__(DECODE_THREADS, 2)
    flash_decode_tile(const __grid_constant__ FlashDecodeParams params) {
  using Block = TileBlock<T, HEAD_DIM, ARCH, STAGES>;
  static_assert(Block::SMEM_BYTES == SMEM_BYTES, "host and device disagree on shared memory");
  __shared__ TileStorage storage;
  extern __shared__ __align__(1024) unsigned char smem[];
  launch_next_kernel();
  wait_for_previous_kernel();
  const Block block{{params}, storage, smem_address(smem), smem + Block::TileQ::BYTES};
  if (!first_segment<TILE_ROWS, CHUNK_KEYS>(params, storage.segments[0], storage.rounds)) return;
  int number = 0;
#pragma unroll 1
  for (;;) {
    const Segment& s = storage.segments[number];
    Segment& following = storage.segments[number_after(number)];
    block.stage_queries(s);
    if (threadIdx.x == 0) set_next_segment<TILE_ROWS, CHUNK_KEYS>(following, params, s);
    TileSoftmax softmax;
    float o[1][HEAD_DIM / 8][4];
    set_zero(o);
    block.attend(s, o, softmax);
    block.finish(s, o, softmax);
    if (following.batch < 0) break;
    number = number_after(number);
  }
  block.finish_units(storage.segments, storage.last, number);
}
