// A key mask in memory, as mask_record.cu writes it.
#pragma once
#include "../common/types.cuh"

// The head of the record. The bits lie behind it, `words` words for each sequence.
struct alignas(16) MaskRecord {
  const void* bias;  // the bias that is added beside the mask, or null
  int words;         // a multiple of 4, with bits of 0 behind the last key

  __device__ const uint32_t* bits(int batch) const {
    return reinterpret_cast<const uint32_t*>(this + 1) + int64_t(batch) * words;
  }
};

// A tile of keys may begin at the last key, so its bits end this many keys behind it.
constexpr int MASK_PADDING = 256;
