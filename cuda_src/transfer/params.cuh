// Kernel arguments of transfer/. The host reads them here (runtime/structs.py).
#pragma once
#include "../common/types.cuh"

constexpr int ARRAYS = 3;       // that one launch copies, or sums
constexpr int MOST_PEERS = 16;  // ranks that it writes for

// Rows of an array, and where they go in the memory of a rank; all in bytes.
struct RowArray {
  const void* from;
  int64_t from_pitch;  // from row to row
  int64_t from_step;   // from what one rank gets to what the next one gets
  int64_t to;          // from the beginning of the memory
  int64_t to_pitch;
  int64_t width;  // of a row; 0 for no array
};

struct PutRowsParams {
  const int* moves;  // [count, 3]: a rank, a row, and the row there
  RowArray arrays[ARRAYS];
  void* peers[MOST_PEERS];  // the memory of each rank
  int64_t count;
};

struct SumArray {
  const void* slots;  // [slots, width]
  void* out;          // [rows, width]
  int64_t width;      // 0 for no array
};

struct SumRowsParams {
  const int*
      parts;  // [rows, 3]: the first slot of a row, how many it has, and from one to the next
  SumArray arrays[ARRAYS];
  int64_t rows;
};
