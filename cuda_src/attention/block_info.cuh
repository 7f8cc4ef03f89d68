// The rows of a sequence, the keys that a query sees, and the tiles that a block visits.
//
// Query i meets the diagonal at key i + diagonal, and sees the keys
//   [i + diagonal - window_left, i + diagonal + window_right] within [0, seqlen_k).
// All sums fit 32 bits: the host limits lengths to 2^29 and windows to seqlen_q + seqlen_k.
#pragma once
#include "params.cuh"

// One sequence: its lengths, its first rows in the arrays, and its window.
struct Sequence {
  int seqlen_q;
  int seqlen_k;
  int64_t start_q;  // first row in the packed tensor; 0 when not packed
  int64_t start_k;
  int64_t accum_start;  // first row in lse_log2, delta and dq_accum
  int diagonal;
  int window_left;
  int window_right;

  // Keys that query row sees: [key_begin(row), key_end(row)).
  __device__ int key_begin(int row) const { return max(0, row + diagonal - window_left); }
  __device__ int key_end(int row) const { return min(seqlen_k, row + diagonal + window_right + 1); }

  // Queries that see key col: [query_begin(col), query_end(col)).
  __device__ int query_begin(int col) const { return max(0, col - diagonal - window_right); }
  __device__ int query_end(int col) const {
    return min(seqlen_q, col - diagonal + window_left + 1);
  }
};

// Params: FlashFwdParams or FlashBwdParams.
template <typename Params>
__device__ inline Sequence load_sequence(const Params& params, int batch) {
  const AttentionShape& shape = params.shape;
  const int* cu_seqlens_q = params.cu_seqlens_q;
  const int* cu_seqlens_k = params.cu_seqlens_k;
  Sequence s;
  const int start_q = cu_seqlens_q ? cu_seqlens_q[batch] : 0;
  const int start_k = cu_seqlens_k ? cu_seqlens_k[batch] : 0;
  s.seqlen_q = cu_seqlens_q ? cu_seqlens_q[batch + 1] - start_q : shape.seqlen_q;
  s.seqlen_k = cu_seqlens_k ? cu_seqlens_k[batch + 1] - start_k : shape.seqlen_k;
  s.start_q = start_q;
  s.start_k = start_k;
  // Rows beyond seqused are treated as if they did not exist.
  if (params.seqused_q) s.seqlen_q = max(0, min(s.seqlen_q, params.seqused_q[batch]));
  if (params.seqused_k) s.seqlen_k = max(0, min(s.seqlen_k, params.seqused_k[batch]));
  // In packed tensors, start_q + batch * ALIGN rounded down to a multiple of ALIGN leaves every
  // sequence room for its length rounded up, and needs no prefix sum over padded lengths.
  s.accum_start = cu_seqlens_q ? (start_q + int64_t(batch) * ACCUM_ROW_ALIGN) / ACCUM_ROW_ALIGN *
                                     ACCUM_ROW_ALIGN
                               : int64_t(batch) * round_up(shape.seqlen_q, ACCUM_ROW_ALIGN);
  s.diagonal = shape.top_left ? 0 : s.seqlen_k - s.seqlen_q;
  s.window_left = shape.window_left;
  s.window_right = shape.window_right;
  return s;
}

// The pages that have keys which some query of a sequence sees: the first and the last, and in
// these the first row that is seen and the number of rows.
struct SeenPages {
  int first;
  int last;
  int first_row;
  int last_rows;

  __device__ SeenPages(const PagedRows& rows, const Sequence& s) {
    const int begin = s.key_begin(0);
    first = rows.page_of(begin);
    first_row = begin - first * rows.page_size;
    last = rows.page_of(max(0, s.seqlen_k - 1));
    last_rows = s.seqlen_k - last * rows.page_size;
  }
};

// The tiles [begin, end) that a block visits. In the tiles [inner_begin, inner_end) among them
// every query sees every key, so they need no mask.
struct TileRange {
  int begin;
  int end;
  int inner_begin;
  int inner_end;

  __device__ bool needs_mask(int tile) const { return tile < inner_begin || tile >= inner_end; }
};

// The key tiles that contain keys which the queries [row_begin, row_end) see.
__device__ inline TileRange key_tiles(const Sequence& s, int row_begin, int row_end, int block_n) {
  TileRange t;
  t.begin = s.key_begin(row_begin) / block_n;
  t.end = ceil_div(max(0, s.key_end(row_end - 1)), block_n);
  t.inner_begin = ceil_div(s.key_begin(row_end - 1), block_n);
  t.inner_end = max(0, s.key_end(row_begin)) / block_n;
  return t;
}

// The query tiles that contain queries which see one of the keys [col_begin, col_end).
__device__ inline TileRange query_tiles(const Sequence& s, int col_begin, int col_end,
                                        int block_m) {
  TileRange t;
  t.begin = s.query_begin(col_begin) / block_m;
  t.end = ceil_div(max(0, s.query_end(col_end - 1)), block_m);
  t.inner_begin = ceil_div(s.query_begin(col_end - 1), block_m);
  t.inner_end = max(0, s.query_end(col_begin)) / block_m;
  return t;
}
