// A stack of pre-norm transformer blocks (GPT-2) for one new token of each of up to eight
// sequences:
//   h = x + proj(attention(qkv(ln1(x)))),  x = h + down(gelu(up(ln2(h))))
// and, if asked, the embeddings before, the last norm, the head and the largest logit after it. One
// cooperative launch: a block on each multiprocessor, all of them for all layers.
//
// The blocks divide every matrix by its rows (output features), and the keys of the heads by
// splits. A layer has five phases; each needs what all blocks have computed in the one before:
//   1. q, k, v = qkv(ln1(x)), k and v also into the caches
//   2. attention to a share of the keys of a head: output, log of the sum of exponentials
//   3. x += proj(shares merged)
//   4. hidden = gelu(up(ln2(x)))
//   5. x += down(hidden), in segments of the columns if they are many
//
// Roles. The last warp fills a ring of tiles in shared memory with the block's rows of weights, in
// the order of use (weight_ring.cuh). They are read once, which takes most of the time, and depend
// on nothing, so the ring is full while the other warps wait for other blocks. The seven other
// warps, the consumers, divide the columns of a row (row_dot.cuh) and sum their products in
// shared memory. A phase is short, so its latency counts: a consumer takes whole vectors from L2
// straight into the fragments of its product, and every block does the norm itself.
//
// Shared memory (DecodeStorage): the ring; the pointers of all layers; the block's rows of each
// matrix; one place for products, then the parts of the attention, then the best logits; one for
// the moments of the norm, then the new token; the number of keys of each sequence.
//
// The kernel ends: all blocks are on the GPU at once, and none waits at a barrier between phases
// but for the numbers themselves (tagged_words.cuh). The numbers of a phase depend on those of the
// phase before alone, so all blocks complete one phase after the other. The tokens at the end take
// one barrier of the grid, at which every block arrives. Within a block the warp that fills waits
// for nothing but free tiles, and both roles walk over the same tiles in the same order.
//
// Nothing is overwritten too early: in global memory by the argument in tagged_words.cuh; in the
// ring by its `empty` barriers; elsewhere in shared memory the consumers synchronise between those
// that read a place and those that write it.
#include "../common/grid_barrier.cuh"
#include "attention.cuh"
#include "inputs.cuh"
#include "outputs.cuh"
#include "steps.cuh"
#include "weight_ring.cuh"

constexpr int GROUP_ROWS = 28;  // rows whose products are summed at once
static_assert(GROUP_ROWS >= MAX_TILE_ROWS && GROUP_ROWS * MAX_BATCH <= CONSUMERS);

template <int ARCH, int HEAD_DIM, int TILES, int TILE_BYTES>
struct DecodeStorage {
  WeightRing<ARCH, TILES, TILE_BYTES> ring;
  alignas(16) BlockPointers layers[MAX_LAYERS];
  BlockRows rows[MATRICES];
  union {
    float products[CONSUMER_WARPS][GROUP_ROWS * MAX_BATCH];  // of each warp's columns
    AttentionStorage<HEAD_DIM> attention;
    uint64_t best[CONSUMER_WARPS][MAX_BATCH];
  };
  union {
    Moments moments[CONSUMER_WARPS][MAX_BATCH];
    NewToken<HEAD_DIM> token;
  };
  int keys[MAX_BATCH];  // keys with the new one; 0 if there is no room for it, or no such token
  int split_keys[MAX_BATCH];
};

// The warp that fills the ring. It runs ahead of the others, so it also prefetches the old keys and
// values and the biases into L2.
template <typename T, int ARCH, int HEAD_DIM, int SEQUENCES, class Storage>
__device__ __forceinline__ void fill_ring(const DecodeStackParams& params, Storage& storage,
                                          uint32_t launch) {
  typename decltype(storage.ring)::Place at;
#pragma unroll 1
  for (Step step(params, launch); step.more(); step.next(params)) {
    if (step.matrix == Matrix::qkv)
      DecodeAttention<T, ARCH, HEAD_DIM, SEQUENCES>{params, step, storage.keys, storage.split_keys}
          .prefetch();
    const MatrixRows matrix =
        rows_of_block<T>(params, storage.layers[step.layer], storage.rows, step);
    if (matrix.bias && threadIdx.x % 32 < matrix.rows)
      prefetch_l2(static_cast<const T*>(matrix.bias) + matrix.begin + threadIdx.x % 32);
#pragma unroll 1
    for (TileWalk tile(matrix); tile.more(); tile.next()) {
      // Rows are counted from the first lead on.
      const int first = tile.leads ? 0 : tile.row + matrix.num_leads;
      storage.ring.fill(at, matrix, first, tile.leads + tile.count);
    }
  }
  storage.ring.finish_filling(at);
}

// The warps that compute.
template <typename T, int ARCH, int HEAD_DIM, int SEQUENCES, int TILES, int TILE_BYTES>
struct Consumer {
  using Storage = DecodeStorage<ARCH, HEAD_DIM, TILES, TILE_BYTES>;

  const DecodeStackParams& params;
  Storage& storage;
  typename decltype(Storage::ring)::Place at;

  __device__ void run(uint32_t launch) {
    uint64_t best = 0;
    Step step(params, launch);
    begin(step.residual_tag);
#pragma unroll 1
    for (; step.more(); step.next(params)) {
      const BlockPointers& weights = storage.layers[step.layer];
      const MatrixRows matrix = rows_of_block<T>(params, weights, storage.rows, step);
      const DecodeOutput<T> output{
          params, storage.keys, step, matrix.bias, best, int(threadIdx.x % MAX_BATCH) / SEQUENCES};
      const Addend<T> added = addend(matrix, 0, output);
      // The consumers must synchronise before they overwrite the memory of the products, which
      // the step before has read. A norm synchronises anyway.
      if (step.matrix == Matrix::proj) {
        attend(step);
        consumers_sync();
        Fragments<SEQUENCES, 1, WIDTH_PIECES<T>> x;
        load_attended<T, ARCH>(x, params, storage.keys, step.tag);
        multiply(matrix, x, added, output);
        continue;
      }
      SharedPieces<T, ARCH, SEQUENCES> x;
      if (step.normalised()) {
        const uint32_t tag = step.residual_tag ^ (step.matrix == Matrix::up);
        load_normalised<T, ARCH, SEQUENCES>(x, params, storage.ring.wait(at), matrix.pitch, tag,
                                            storage.moments);
      } else {
        consumers_sync();
        const int first = step.segment * params.segment;
        load_hidden<T, ARCH, SEQUENCES>(x, params, first, matrix.bytes / int(sizeof(T)), step.tag);
      }
      multiply(matrix, x, added, output);
    }
    // All blocks have read params.launches, because each has sent words that this one has received.
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.launches = launch + 1;
    if (params.next_tokens) choose_tokens(best);
  }

 private:
  // Sends the residual: x, or the embeddings, or NaN for a sequence that cannot go on.
  __device__ void begin(uint32_t tag) {
    const BlockRows own = storage.rows[int(Matrix::proj)];
    const int n = threadIdx.x % SEQUENCES, copy = threadIdx.x % MAX_BATCH / SEQUENCES;
    if (n >= params.batch) return;
    for (int i = threadIdx.x / MAX_BATCH; i < own.rows; i += CONSUMERS / MAX_BATCH) {
      const int column = own.begin + i;
      float value = __uint_as_float(0x7fffffffu);
      if (storage.keys[n] && params.x) {
        value = to_float(static_cast<const T*>(params.x)[n * params.x_stride + column]);
      } else if (storage.keys[n]) {
        const int64_t token = params.tokens[n], position = storage.keys[n] - 1;
        value =
            to_float(static_cast<const T*>(params.token_embedding)[token * params.width + column]) +
            to_float(
                static_cast<const T*>(params.position_embedding)[position * params.width + column]);
      }
      send(residual_word(params, copy, n, column), value, tag);
    }
  }

  // The phase of the attention, which comes before the projection.
  __device__ void attend(const Step& step) {
    const DecodeAttention<T, ARCH, HEAD_DIM, SEQUENCES> attention{params, step, storage.keys,
                                                                  storage.split_keys};
    const auto first = attention.unit(blockIdx.x);
    attention(storage.attention, storage.token, first, attention.first_chunk(first));
  }

  // The number that a thread adds to its output of the group of rows that begins at `row`.
  __device__ Addend<T> addend(const MatrixRows& matrix, int row,
                              const DecodeOutput<T>& output) const {
    const int mine = row + threadIdx.x / MAX_BATCH, n = threadIdx.x % SEQUENCES;
    const bool has_output = threadIdx.x < GROUP_ROWS * MAX_BATCH && mine < matrix.rows;
    if (!has_output || n >= params.batch) return {};
    return output.addend(matrix.begin + mine, n);
  }

  // Multiplies the block's rows of a matrix with the vectors; `added` is addend() of the first
  // rows.
  template <class X>
  __device__ void multiply(const MatrixRows& matrix, const X& x, Addend<T> added,
                           const DecodeOutput<T>& output) {
    constexpr int VECTORS = X::SEQUENCES == MAX_BATCH ? SEQUENCES : MAX_BATCH;
    constexpr bool HALVES = HAS_MMA<T, ARCH> && X::HOLDERS > 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int n = threadIdx.x % SEQUENCES;
    int pending = 0;  // rows whose products lie in shared memory
#pragma unroll 1
    for (TileWalk tile(matrix); tile.more(); tile.next()) {
      const uint8_t* rows = storage.ring.wait(at) + tile.leads * matrix.pitch;
#pragma unroll 1
      for (int first = 0; first < tile.count; first += 16) {
        float d[4];
        const uint8_t* row = rows + first * matrix.pitch;
        const int count = tile.count - first;
        if (HALVES && count <= 8) {
          constexpr TileRows ROWS = HALVES ? TileRows::UP_TO_8 : TileRows::UP_TO_16;
          row_dot<T, ARCH, VECTORS, ROWS>(d, row, count, matrix.pitch, matrix.bytes, x);
        } else {
          row_dot<T, ARCH, VECTORS, TileRows::UP_TO_16>(d, row, count, matrix.pitch, matrix.bytes,
                                                        x);
        }
        float* products = storage.products[warp] + (pending + first + g) * MAX_BATCH + 2 * c;
        if (first + g < tile.count) *reinterpret_cast<float2*>(products) = {d[0], d[1]};
        if (first + g + 8 < tile.count)
          *reinterpret_cast<float2*>(products + 8 * MAX_BATCH) = {d[2], d[3]};
      }
      storage.ring.release(at);
      pending += tile.count;
      if (!tile.last() && pending + tile.tile_rows <= GROUP_ROWS) continue;

      // ---- sum the products of the warps ----
      consumers_sync();
      const int row = tile.row + tile.count - pending + int(threadIdx.x / MAX_BATCH);
      const bool has_sum = threadIdx.x < pending * MAX_BATCH;
      float sum = 0.f;
      if (has_sum) {
#pragma unroll
        for (int i = 0; i < CONSUMER_WARPS; ++i) sum += storage.products[i][threadIdx.x];
      }
      // All vectors of a sequence get its sum, one for each copy.
#pragma unroll
      for (int mask = SEQUENCES; mask < MAX_BATCH; mask *= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (has_sum && n < params.batch) output.store(matrix.begin + row, n, sum + added.value());
      pending = 0;
      if (tile.last()) break;
      added = addend(matrix, tile.row + tile.count, output);
      consumers_sync();  // before the products are overwritten
    }
  }

  // Finds the largest logit of each sequence: that of a thread, of a block, and of all blocks.
  __device__ void choose_tokens(uint64_t best) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int mask = MAX_BATCH; mask < 32; mask *= 2)
      best = max(best, __shfl_xor_sync(0xffffffffu, best, mask));
    consumers_sync();  // the products have been read
    if (lane < MAX_BATCH) storage.best[warp][lane] = best;
    consumers_sync();
    if (threadIdx.x < MAX_BATCH) {
      for (int i = 0; i < CONSUMER_WARPS; ++i) best = max(best, storage.best[i][threadIdx.x]);
      params.best[blockIdx.x * MAX_BATCH + threadIdx.x] = best;
    }
    consumers_sync();
    if (threadIdx.x == 0) wait_for_all_blocks(params.barrier);
    consumers_sync();
    if (blockIdx.x > 0) return;
#pragma unroll 1
    for (int n = warp; n < params.batch; n += CONSUMER_WARPS) {
      best = 0;
      for (int i = lane; i < gridDim.x; i += 32)
        best = max(best, ld_global_cg(params.best + i * MAX_BATCH + n));
      for (int mask = 1; mask < 32; mask *= 2)
        best = max(best, __shfl_xor_sync(0xffffffffu, best, mask));
      if (lane > 0) continue;
      const int keys = storage.keys[n];
      params.next_tokens[n] = keys ? row_of_ranked(best) : -1;
      if (params.advance && keys) params.lengths[n] = keys;
    }
  }
};

// The number of keys of a sequence with the new one; 0 if the cache is full or there is no such
// token.
__device__ __forceinline__ int count_keys(const DecodeStackParams& params, int n) {
  if (n >= params.batch) return 0;
  const int length = params.lengths[n];
  if (length < 0 || length >= params.max_length) return 0;
  if (params.x) return length + 1;
  const int token = params.tokens[n];
  return token < 0 || token >= params.vocab || length >= params.positions ? 0 : length + 1;
}

template <typename T, int ARCH, int HEAD_DIM, int SEQUENCES, int TILES, int TILE_BYTES,
          int SMEM_BYTES>
__global__ void __launch_bounds__(32 * (CONSUMER_WARPS + 1), 1)
    decode_stack(const __grid_constant__ DecodeStackParams params) {
  using Storage = DecodeStorage<ARCH, HEAD_DIM, TILES, TILE_BYTES>;
  static_assert(sizeof(Storage) == SMEM_BYTES, "host and device disagree on shared memory");
  extern __shared__ __align__(128) uint8_t smem[];
  Storage& storage = *reinterpret_cast<Storage*>(smem);

  // ---- what both roles read ----
  const uint32_t launch = *params.launches;
  constexpr int WORDS = sizeof(BlockPointers) / 8;
  for (int i = threadIdx.x; i < params.num_layers * WORDS; i += blockDim.x)
    reinterpret_cast<uint64_t*>(storage.layers)[i] =
        reinterpret_cast<const uint64_t*>(params.layers)[i];
  if (threadIdx.x < MAX_BATCH) {
    const int keys = count_keys(params, threadIdx.x), splits = num_splits(keys, params.splits);
    storage.keys[threadIdx.x] = keys;
    storage.split_keys[threadIdx.x] = ceil_div(attended_keys(keys), splits);
  } else if (threadIdx.x < MAX_BATCH + MATRICES) {
    const int i = threadIdx.x - MAX_BATCH;
    storage.rows[i] = block_rows<T, TILE_BYTES>(params, Matrix(i));
  }
  if (threadIdx.x == 0) storage.ring.init();
  __syncthreads();

  if (threadIdx.x >= CONSUMERS) {
    fill_ring<T, ARCH, HEAD_DIM, SEQUENCES>(params, storage, launch);
  } else {
    Consumer<T, ARCH, HEAD_DIM, SEQUENCES, TILES, TILE_BYTES>{params, storage}.run(launch);
  }
}
