// What a text reads of captures that learn. The program of such a kernel begins with
// text::for_each_read() and text::start_reads(), which the host writes (capture_gradients.py).
#pragma once
#include "learning.cuh"

// The sums of a thread, one for each place of the text that reads.
struct ReadSums {
  GradientSum sums[text::NUM_READS];

  // Adds dS * (derivative of the score by what was read) for a score, of which `raw` is scale * S.
  __device__ __forceinline__ void add(float ds, float raw, int batch, int head, int query, int key,
                                      const Captures& captures) {
    if (ds == 0.f) return;
    text::for_each_read(captures, [&](int slot, const auto& capture, int read) {
      text::start_reads(captures);
      capture.start(read);
      const text::Dual y = text::user_score(text::Dual(raw), batch, head, query, key, captures);
      sums[slot].add(capture.read, ds * y.slope);
    });
  }

  __device__ __forceinline__ void flush() const {
#pragma unroll
    for (int i = 0; i < text::NUM_READS; ++i) sums[i].flush();
  }
};
