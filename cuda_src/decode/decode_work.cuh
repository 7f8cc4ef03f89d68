// The division of the work of flash_decode.cu among its blocks, found on the GPU from the lengths.
//
// A unit is a key head of a sequence with up to ROWS of its queries. Its keys are cut into chunks,
// the loads of a warp, and a round is a chunk for each warp of a block. The rounds of all units
// stand in one row, and every block takes an equal and contiguous share of it (stream-K). So
// whatever the lengths, all blocks have as much to read, and of the units of a block only the first
// and the last can have parts elsewhere.
//
// Heads abreast. The keys of neighbouring heads lie beside each other in memory, which is fastest
// where all of a row is read at once. So `abreast` neighbouring blocks are a team, which has one
// share; its blocks read the same keys of as many neighbouring heads at about the same time. A
// unit of a team is one of each of its blocks.
//
// With `num_splits` the rounds of each unit are cut into as many parts, at places that follow from
// its length alone, and a block has one of them: then a result does not depend on the batch.
#pragma once
#include "../common/types.cuh"
#include "params.cuh"

constexpr int NUM_WARPS = 4;
constexpr int DECODE_THREADS = NUM_WARPS * 32;

// A sequence of a call. Its new tokens meet the diagonal at key length - tokens + token.
struct DecodeSequence {
  int tokens;       // the new ones
  int first_token;  // its first row in packed arrays, else 0
  int leftpad;      // keys before this one are none
  int position;     // of the first new token, as the call says
  int begin;        // the first key that a token sees
  int cached;       // keys from here on are in k and v instead of the cache
  int length;       // with the new tokens, if they count
  int chunks;       // with keys that a token may see

  template <int KEYS>
  __device__ void load(const FlashDecodeParams& params, int batch) {
    const int* cu_seqlens_q = params.cu_seqlens_q;
    const int first = cu_seqlens_q ? cu_seqlens_q[batch] : 0;
    const int count = cu_seqlens_q ? cu_seqlens_q[batch + 1] - first : params.seqlen;
    first_token = first;
    tokens = min(max(count, 0), params.seqlen);
    leftpad = params.leftpad ? max(params.leftpad[batch], 0) : 0;
    position = params.positions[batch];
    const int before = min(max(position, 0), params.pages.capacity);
    const int all = before + (params.counted ? tokens : 0);
    length = params.appends ? all : min(all, params.pages.capacity);
    cached = params.appends ? before : length;
    begin = max(leftpad, length - tokens - params.window_left);
    chunks = length > begin ? ceil_div(length, KEYS) - begin / KEYS : 0;
  }

  // Rounds of a unit: one without keys writes its zeros, too.
  __device__ int rounds() const { return max(ceil_div(chunks, NUM_WARPS), 1); }
};

// The units of a sequence, as one block of a team counts them.
template <int ROWS>
__device__ __forceinline__ int units_of(const FlashDecodeParams& params, int tokens) {
  return ceil_div(tokens * params.group, ROWS) * (params.heads_kv / params.abreast);
}

// What a block does next: chunks [chunk, chunk_end) of a unit. They may be none. The result is part
// number `part` of `parts` of this unit.
struct Segment {
  int batch;      // -1: nothing
  int next, end;  // in the row of all rounds: the ends of this segment and of the block's share
  int share;      // rounds of a share
  int before;     // rounds of all sequences before this one
  DecodeSequence sequence;
  int kv_head;
  int first_row;  // rows of a key head are queries, token by token, and within it head by head
  int rows;
  int chunk, chunk_end;
  int part, parts;
  int first_slot, slot_stride;
  int inner_begin, inner_end;  // keys that every row sees

  // The place of part `x` in memory. A block can have a part of the unit that it ends and one of
  // the unit that it begins. So the parts that begin a unit have the even places of their blocks.
  __device__ int slot(int x, bool fixed) const {
    return first_slot + (fixed || x == 0 ? x : 2 * x - 1) * slot_stride;
  }

  // Sets the rounds [begin, end) of the unit.
  __device__ void set_chunks(int begin, int end) {
    chunk = begin * NUM_WARPS;
    chunk_end = min(end * NUM_WARPS, sequence.chunks);
  }

  template <int ROWS>
  __device__ void set_unit(const FlashDecodeParams& params, int unit) {
    const int all = sequence.tokens * params.group, row_blocks = ceil_div(all, ROWS);
    const int heads = unit / row_blocks;
    kv_head = heads * params.abreast + blockIdx.x % params.abreast;
    first_row = (unit - heads * row_blocks) * ROWS;
    rows = min(ROWS, all - first_row);
    set_inner(params, first_row / params.group, (first_row + rows - 1) / params.group);
  }

  // Sets what rows of the new tokens `first`, …, `last` see.
  __device__ void set_inner(const FlashDecodeParams& params, int first, int last) {
    const int diagonal = sequence.length - sequence.tokens;
    inner_begin = max(sequence.leftpad, diagonal + last - params.window_left);
    inner_end = min(sequence.length, diagonal + first + params.window_right + 1);
  }
};

// The functions that find segments write them to shared memory field by field. A thread calls them
// while it has keys and values in its registers, and none are left for a copy.

// Sets s to the segment that begins at round `begin` of all, which is one of sequence `batch` or of
// a later one. `before` is the number of rounds of the sequences before that.
template <int ROWS, int KEYS>
__device__ void set_segment(Segment& s, const FlashDecodeParams& params, int batch, int before,
                            int begin, int end, int share) {
  for (;; ++batch) {
    s.sequence.load<KEYS>(params, batch);
    const int work = units_of<ROWS>(params, s.sequence.tokens) * s.sequence.rounds();
    if (begin < before + work) break;
    before += work;
  }
  const int rounds = s.sequence.rounds(), unit = (begin - before) / rounds;
  const int unit_begin = before + unit * rounds;
  s.batch = batch, s.before = before, s.end = end, s.share = share;
  s.next = min(unit_begin + rounds, end);
  s.set_unit<ROWS>(params, unit);
  s.set_chunks(begin - unit_begin, s.next - unit_begin);
  const int abreast = params.abreast, first_team = unit_begin / share;
  s.part = blockIdx.x / abreast - first_team;
  s.parts = (unit_begin + rounds - 1) / share - first_team + 1;
  s.first_slot = 2 * first_team * abreast + blockIdx.x % abreast, s.slot_stride = abreast;
}

// Sets `following` to what is left of the share behind segment s.
template <int ROWS, int KEYS>
__device__ void set_next_segment(Segment& following, const FlashDecodeParams& params,
                                 const Segment& s) {
  if (s.next < s.end)
    set_segment<ROWS, KEYS>(following, params, s.batch, s.before, s.next, s.end, s.share);
  else
    following.batch = -1;
}

// Sets s to the part of a unit that the block has with a fixed number of splits; none is empty.
template <int ROWS, int KEYS>
__device__ void set_fixed_segment(Segment& s, const FlashDecodeParams& params) {
  const int splits = params.num_splits, item = blockIdx.x / splits;
  const int per_sequence = units_of<ROWS>(params, params.seqlen), batch = item / per_sequence;
  s.sequence.load<KEYS>(params, batch);
  const int unit = item - batch * per_sequence, rounds = s.sequence.rounds();
  s.part = blockIdx.x - item * splits;
  s.parts = min(splits, rounds);
  const bool exists = unit < units_of<ROWS>(params, s.sequence.tokens) && s.part < s.parts;
  s.batch = exists ? batch : -1;
  if (!exists) return;
  s.next = s.end = 0;
  s.set_unit<ROWS>(params, unit);
  s.set_chunks(int64_t(rounds) * s.part / s.parts, int64_t(rounds) * (s.part + 1) / s.parts);
  s.first_slot = item * splits, s.slot_stride = 1;
}

// Puts the first segment of the block into shared memory, and returns whether there is one. Thread
// i sums the chunks of a run of sequences; where the share begins in one of these, it also looks
// for the place.
template <int ROWS, int KEYS>
__device__ __forceinline__ bool first_segment(const FlashDecodeParams& params, Segment& first,
                                              int (&sums)[NUM_WARPS]) {
  if (params.num_splits) {
    if (threadIdx.x == 0) set_fixed_segment<ROWS, KEYS>(first, params);
    __syncthreads();
    return first.batch >= 0;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int run = ceil_div(params.batch, DECODE_THREADS), run_begin = threadIdx.x * run;
  int own = 0;
  for (int b = run_begin; b < min(run_begin + run, params.batch); ++b) {
    DecodeSequence s;
    s.load<KEYS>(params, b);
    own += units_of<ROWS>(params, s.tokens) * s.rounds();
  }
  int before = own;
#pragma unroll
  for (int delta = 1; delta < 32; delta *= 2) {
    const int lower = __shfl_up_sync(0xffffffffu, before, delta);
    if (lane >= delta) before += lower;
  }
  if (lane == 31) sums[warp] = before;
  before -= own;
  __syncthreads();  // the sums of all warps are written
  int total = 0;
#pragma unroll
  for (int i = 0; i < NUM_WARPS; ++i) {
    before += i < warp ? sums[i] : 0;
    total += sums[i];
  }
  const int share = ceil_div(total, int(gridDim.x) / params.abreast);
  const int begin = blockIdx.x / params.abreast * share, end = min(total, begin + share);
  if (begin >= end) return false;
  if (before <= begin && begin < before + own)
    set_segment<ROWS, KEYS>(first, params, run_begin, before, begin, end, share);
  __syncthreads();  // the segment is written
  return true;
}
