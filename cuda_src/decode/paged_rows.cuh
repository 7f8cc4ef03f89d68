// The rows of keys and values in a cache of pages: the one place that turns the number of a key
// into an address. A contiguous cache has no table, and one page a sequence.
#pragma once
#include "../common/types.cuh"

// Row `key % page_size` of page `table[sequence][key / page_size]` is that of a key.
//
// An entry of the table that is no page of the cache is read as page 0: nothing outside of the
// cache is touched, and the result of such a sequence means nothing.
struct PagedRows {
  int64_t table_stride;  // from sequence to sequence
  uint32_t multiplier;   // page_of(); a page may have any size
  int shift;
  int page_size;
  int num_pages;
  int capacity;  // keys that a sequence can have, at most 2^29

  // key / page_size, exact for 0 <= key < 2^31. With shift = ceil(log2(page_size)) the multiplier
  // is floor(2^(31 + shift) / page_size) + 1 (Granlund and Montgomery 1994, "Division by Invariant
  // Integers using Multiplication", theorem 4.2).
  __device__ int page_of(int key) const { return __umulhi(2u * key, multiplier) >> shift; }

  __device__ bool has(int page) const { return uint32_t(page) < uint32_t(num_pages); }

  __device__ int existing(int page) const { return has(page) ? page : 0; }
};

// Where a key lies: the entry of the table, which need not exist, and the row in its page.
struct RowPlace {
  int page;
  int row;
};

// Params has `pages`, and `page_table` and `sequences`, which may be null: the page of a contiguous
// cache is that of the sequence's number.
template <class Params>
__device__ __forceinline__ RowPlace place_of(const Params& params, int batch, int key) {
  const PagedRows& pages = params.pages;
  if (!params.page_table) return {params.sequences ? params.sequences[batch] : batch, key};
  const int number = pages.page_of(key);
  return {params.page_table[batch * pages.table_stride + number], key - number * pages.page_size};
}
