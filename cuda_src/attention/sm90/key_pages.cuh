// Keys and values in pages of a cache, for the sm_90 forward kernel: the program of a kernel that
// reads them begins with `#define KEYS_IN_PAGES`, and its arguments with KeyPages. The maps of K
// and V are then (head_dim, rows of a page, heads, pages) of the cache, with boxes that lie within
// a page, as page_size is a multiple of box_rows unless a sequence has one page only.
#pragma once
#include "../../decode/paged_rows.cuh"

struct alignas(64) PagesOfKeys {
  const int* table;  // [batch, pages of a sequence]
  const void* v;     // the cache
  PagedRows rows;
  int64_t v_row_bytes;
  int box_rows;
};

#ifdef KEYS_IN_PAGES
constexpr bool HAS_PAGES = true;
using KeyPages = PagesOfKeys;
#else
constexpr bool HAS_PAGES = false;
struct KeyPages {};  // a base class of no bytes
#endif
