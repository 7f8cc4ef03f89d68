#pragma once

namespace text {

// The position of a query or a key, as the kernels give it to a text. In a tile without a mask
// `step` is a constant. So addresses of captures, and distances as floats, are those of the first
// row and column plus a constant, and what depends on the distance alone is computed once for all
// pairs that have it. A multiprocessor converts no more integers in a clock than it computes
// exponentials.
struct Place {
  int first;          // of a row or column of the fragment
  int step;           // from there
  float from_column;  // the distance of `first` from the first column of the fragment

  __device__ __forceinline__ operator int() const { return first + step; }
};

template <class T>
constexpr bool IS_PLACE = false;
template <>
constexpr bool IS_PLACE<Place> = true;

// float(a - b).
__device__ __forceinline__ float distance(int a, int b) { return float(a - b); }
__device__ __forceinline__ float distance(Place a, Place b) {
  return (a.from_column - b.from_column) + float(a.step - b.step);
}

// float(a - b + shift), where all elements have the same shift.
__device__ __forceinline__ float distance(int a, int b, int shift) { return float(a - b + shift); }
__device__ __forceinline__ float distance(Place a, Place b, int shift) {
  return (a.from_column - b.from_column + float(shift)) + float(a.step - b.step);
}

}  // namespace text
