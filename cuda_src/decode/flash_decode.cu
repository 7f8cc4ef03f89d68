// A decode step of attention. The new tokens of each sequence attend to its cache of keys and
// values, whose pages may have any size (paged_rows.cuh), and enter it before if k and v are given.
// With t one of the `tokens` new ones of sequence b, and keys as FlashDecodeParams counts them:
//
//   k_cache[b, positions[b] + t] = k[b, t], and v_cache likewise
//   out[b, t, h] = softmax(score(q[b, t, h] K^T)) V    over the keys that token t sees
//
// It is one launch; the host knows neither lengths nor tables. T is the dtype; HEAD_DIM is that of
// the tiles, a multiple of 64; ROWS is 8 or 16, the queries that a key head meets at once: those of
// the query heads that share it, token by token. ARCH is the compute capability.
//
// Division of work (decode_work.cuh). A block takes segments, one after the other: some of the
// chunks of a key head and up to ROWS of its queries. Its warps take the chunks in turns. The new
// tokens are the last keys, and are read from k and v. A warp computes with one chunk while it
// loads the next one to registers (flash_decode_keys.cuh), and behind the last chunk of a segment
// that is the first one of the next. Keys are the rows of its tensor-core products, and queries the
// eight columns. Each warp has a softmax of its own. At the end of a segment the results of the
// warps are merged in shared memory, and those of parts of a unit in global memory
// (flash_decode_merge.cuh).
//
// Overlap. The old keys can be loaded while the kernel that computes the new ones still runs
// (dependent_launch.cuh). Without new ones, an earlier kernel may have written any of the keys.
//
// Why nothing is overwritten while it is read. One warp writes the new keys and values to the
// cache, behind the old ones; all warps read the new ones from k and v instead. In shared memory a
// barrier lies between each writing and reading: all threads meet twice in a segment or more often,
// before its chunks and before it is merged. What a segment is stands in one of three places in
// turn, and is written during the segment before, so the one that is overwritten has been merged.
//
// Source: Flash-Decoding, pytorch.org/blog/flash-decoding; stream-K, arXiv:2301.03598.
#include "flash_decode_block.cuh"

template <typename T, int HEAD_DIM, int ROWS, int ARCH>
__global__ void __launch_bounds__(DECODE_THREADS, decode_blocks(HEAD_DIM, ROWS))
    flash_decode(const __grid_constant__ FlashDecodeParams params) {
  __shared__ DecodeStorage<SAME, HEAD_DIM, ROWS> storage;
  decode_step<DecodeBlock<T, SAME, HEAD_DIM, ROWS, ARCH>>(params, storage);
}
