// The matrix product of the simt kernels,
//   acc[row][col] += sum over k of A[k][row] B[k][col]
// on tiles of tile.cuh, ROWS x COLS elements a thread. A and B are lines in shared
// memory, one for each k, so a step of a thread with 8 x 8 elements is four 16-byte reads and 64
// FFMA. An operand is either resident, which is a whole tile of P or dS, or it comes from global
// memory in chunks of DEPTH lines, through registers and two buffers: while the block computes with
// one chunk, it loads the next one. The last chunk of a product loads the first one of the product
// that follows, so that no product begins with a wait.
#pragma once
#include "../../ptx/ld_global_if.cuh"
#include "tile.cuh"

constexpr int DEPTH = 8;

// The two buffers of an operand with lines of N elements.
template <int N>
struct LineBuffers {
  alignas(16) float lines[2][DEPTH * LINE<N>];
};

// The buffers of both operands of a product.
template <int M, int N>
struct OperandBuffers {
  LineBuffers<M> a;
  LineBuffers<N> b;
};

// The lines of an operand with N elements as a thread reads them, whose first element is `element`:
// from buffers, or from a resident tile.
template <int N, int WIDTH>
struct StagedLines {
  static constexpr int ELEMENTS = N;
  static constexpr int DISTANCE = LINE<WIDTH>;
  const float* first;

  __device__ StagedLines(const LineBuffers<WIDTH>& buffers, int element)
      : first(buffers.lines[0] + place_in_line<N>(element)) {}
  __device__ const float* chunk(int index) const { return first + index % 2 * DEPTH * DISTANCE; }
};
template <int N, int WIDTH>
__device__ __forceinline__ StagedLines<N, WIDTH> staged(const LineBuffers<WIDTH>& buffers,
                                                        int element) {
  return {buffers, element};
}

// K lines of N elements. The chunk after the last one, whose values nobody uses, is the first.
template <int N, int K>
struct ResidentLines {
  static constexpr int ELEMENTS = N;
  static constexpr int DISTANCE = LINE<N>;
  const float* first;

  __device__ ResidentLines(const float* tile, int element)
      : first(tile + place_in_line<N>(element)) {}
  __device__ const float* chunk(int index) const {
    return first + index % (K / DEPTH) * DEPTH * DISTANCE;
  }
};

// Loads four neighbouring elements. Elements that do not exist become zeros, so whatever lies there
// (NaN, another sequence) never enters the arithmetic.
template <typename T>
__device__ __forceinline__ float4 load_four(const T* src, bool exist) {
  Words<T, 4> x;
  if constexpr (sizeof(T) == 4) {
    const uint4 v = ld_global_if_128(src, exist);
    x.words[0] = v.x, x.words[1] = v.y, x.words[2] = v.z, x.words[3] = v.w;
  } else {
    const uint2 v = ld_global_if_64(src, exist);
    x.words[0] = v.x, x.words[1] = v.y;
  }
  return make_float4(x.at(0), x.at(1), x.at(2), x.at(3));
}
template <typename T>
__device__ __forceinline__ float4 load_one_by_one(const T* src, int count) {
  return make_float4(count > 0 ? to_float(src[0]) : 0.0f, count > 1 ? to_float(src[1]) : 0.0f,
                     count > 2 ? to_float(src[2]) : 0.0f, count > 3 ? to_float(src[3]) : 0.0f);
}

// Lines that are columns of a matrix: line k holds column k of its first N rows. Each thread copies
// four columns of N / 64 rows at a time; with 32 rows half of the threads do.
template <int N, typename T>
struct ColumnsOf {
  static constexpr int LOADS = ceil_div(N, 64);
  const T* src;
  int64_t step;
  int columns[LOADS];  // how many exist, from src on
  bool vectors;

  __device__ explicit ColumnsOf(const Matrix<const T>& m)
      : step(64 * m.row_stride), vectors(m.vectors) {
    const int row = int(threadIdx.x) / 2, column = int(threadIdx.x) % 2 * 4;
    src = m.data + row * m.row_stride + column;
#pragma unroll
    for (int t = 0; t < LOADS; ++t)
      columns[t] = row + 64 * t < min(N, m.rows) ? m.columns - column : 0;
  }
  __device__ __forceinline__ void load(float4* v, int chunk) const {
    const int first = chunk * DEPTH;
    if (vectors) {
#pragma unroll
      for (int t = 0; t < LOADS; ++t) v[t] = load_four(src + first + t * step, first < columns[t]);
    } else {
#pragma unroll
      for (int t = 0; t < LOADS; ++t)
        v[t] = load_one_by_one(src + first + t * step, columns[t] - first);
    }
  }
  template <int WIDTH>
  __device__ __forceinline__ static void store(LineBuffers<WIDTH>& buffers, const float4* v,
                                               int chunk) {
    const int row = int(threadIdx.x) / 2;
    if (N < 64 && row >= N) return;
    float* dst =
        buffers.lines[chunk % 2] + int(threadIdx.x) % 2 * 4 * LINE<WIDTH> + place_in_line<N>(row);
#pragma unroll
    for (int t = 0; t < LOADS; ++t) {
      dst[32 * t] = v[t].x;
      dst[32 * t + LINE<WIDTH>] = v[t].y;
      dst[32 * t + 2 * LINE<WIDTH>] = v[t].z;
      dst[32 * t + 3 * LINE<WIDTH>] = v[t].w;
    }
  }
};

// Lines that are rows of a matrix, with N columns each. Each thread copies four columns of N / 64
// lines at a time; with 32 columns half of the threads do.
template <int N, typename T>
struct RowsOf {
  static constexpr int LOADS = ceil_div(N, 64);
  static constexpr int PER_LINE = N / 4;  // threads
  static constexpr int STEP = SIMT_THREADS / PER_LINE;
  const T* src;
  int64_t row_stride;
  int rows;  // how many exist, from src on; 0 if the columns do not
  int columns;
  bool vectors;

  __device__ explicit RowsOf(const Matrix<const T>& m)
      : row_stride(m.row_stride), vectors(m.vectors) {
    const int column = int(threadIdx.x) % PER_LINE * 4;
    const int row = int(threadIdx.x) / PER_LINE;
    src = m.data + row * m.row_stride + column;
    columns = m.columns - column;
    rows = columns > 0 && row < DEPTH ? m.rows - row : 0;
  }
  __device__ __forceinline__ void load(float4* v, int chunk) const {
    const int first = chunk * DEPTH;
    if (vectors) {
#pragma unroll
      for (int t = 0; t < LOADS; ++t)
        v[t] = load_four(src + (first + t * STEP) * row_stride, first + t * STEP < rows);
    } else {
#pragma unroll
      for (int t = 0; t < LOADS; ++t)
        v[t] = load_one_by_one(src + (first + t * STEP) * row_stride,
                               first + t * STEP < rows ? columns : 0);
    }
  }
  template <int WIDTH>
  __device__ __forceinline__ static void store(LineBuffers<WIDTH>& buffers, const float4* v,
                                               int chunk) {
    const int line = int(threadIdx.x) / PER_LINE;
    if (N < 64 && line >= DEPTH) return;
    float* dst = buffers.lines[chunk % 2] + line * LINE<WIDTH> +
                 place_in_line<N>(int(threadIdx.x) % PER_LINE * 4);
#pragma unroll
    for (int t = 0; t < LOADS; ++t) *reinterpret_cast<float4*>(dst + t * STEP * LINE<WIDTH>) = v[t];
  }
};

// Takes the place of the copy of an operand that is resident.
struct NoCopy {
  static constexpr int LOADS = 0;
  __device__ void load(float4*, int) const {}
  template <int N>
  __device__ static void store(LineBuffers<N>&, const float4*, int) {}
};

// What a product copies: lines of A, lines of B, or both.
template <class A, class B>
struct Copies {
  A a;
  B b;
  static constexpr int LOADS = A::LOADS + B::LOADS;

  __device__ __forceinline__ void load(float4* v, int chunk) const {
    a.load(v, chunk);
    b.load(v + A::LOADS, chunk);
  }
  template <class Buffers>
  __device__ __forceinline__ static void store(Buffers& buffers, const float4* v, int chunk) {
    A::store(buffers.a, v, chunk);
    B::store(buffers.b, v + A::LOADS, chunk);
  }
};
template <class A, class B>
Copies(A, B) -> Copies<A, B>;

// The number of chunks for so many lines. It is even, so that each product begins with buffer 0.
__device__ __forceinline__ int chunks_of(int lines) { return ceil_div(lines, 2 * DEPTH) * 2; }

template <int DISTANCE, int N>
__device__ __forceinline__ void load_fours(float (&dst)[N], const float* src) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(src + i / 4 * DISTANCE);
    dst[i] = v.x, dst[i + 1] = v.y, dst[i + 2] = v.z, dst[i + 3] = v.w;
  }
}

// multiply_add() does nothing with its sum between two chunks.
struct NoPause {
  static constexpr bool PAUSES = false;
};

// Divides the sum of Q K^T into chains of CHUNKS chunks. What is summed up waits in shared memory,
// where P will lie, as registers are few.
struct ScoreChains {
  static constexpr bool PAUSES = true;
  static constexpr int CHUNKS = 4;
  float* tile;

  template <int ROWS, int COLS>
  __device__ __forceinline__ void operator()(float (&sum)[ROWS][COLS], int chunk, bool last) const {
    if (!last && (chunk + 1) % CHUNKS != 0) return;
    float* own = tile + threadIdx.x;
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
#pragma unroll
      for (int j = 0; j < COLS; ++j) {
        float& waiting = own[(e * COLS + j) * SIMT_THREADS];
        if (chunk >= CHUNKS) sum[e][j] += waiting;
        if (!last) waiting = sum[e][j], sum[e][j] = 0.0f;
      }
    }
    if (last) __syncthreads();  // no thread reads what waited any more
  }
};

// Returns the chains of a score. One chain over a wide head would cost a large float32 score digits
// that its weight shows.
template <typename T, int HEAD_DIM, int SIZE>
__device__ __forceinline__ auto score_chains(float (&tile)[SIZE]) {
  if constexpr (sizeof(T) == 4 && HEAD_DIM > ScoreChains::CHUNKS * DEPTH) {
    return ScoreChains{tile};
  } else {
    return NoPause{};
  }
}

// acc += A B over all chunks. Chunk 0 is in the buffers already, and a barrier has made it visible;
// at the end chunk 0 of the next product is, whose copies the function `next` returns. pause(acc,
// chunk, last) follows each chunk.
template <int ROWS, int COLS, class LinesA, class LinesB, class Buffers, class This, class MakeNext,
          class Pause = NoPause>
__device__ __forceinline__ void multiply_add(float (&acc)[ROWS][COLS], LinesA a, LinesB b,
                                             int chunks, Buffers& buffers, const This& copies,
                                             MakeNext next, Pause pause = {}) {
  using Next = decltype(next());
  constexpr int LOADS = This::LOADS > Next::LOADS ? This::LOADS : Next::LOADS;
  // Two sets of fragments: the block computes with one while it reads the other.
  float a_frag[2][ROWS], b_frag[2][COLS];
  load_fours<LinesA::ELEMENTS / 2>(a_frag[0], a.chunk(0));
  load_fours<LinesB::ELEMENTS / 2>(b_frag[0], b.chunk(0));
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const bool last = chunk + 1 == chunks;
    float4 values[LOADS];
    if (last) {
      next().load(values, 0);
    } else {
      copies.load(values, chunk + 1);
    }
    const float* line_a = a.chunk(chunk);
    const float* line_b = b.chunk(chunk);
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      if (k + 1 == DEPTH) {
        if (last) {
          Next::store(buffers, values, 0);
        } else {
          This::store(buffers, values, chunk + 1);
        }
        // The next chunk is complete. No thread reads this one any more, since the last step
        // computes with fragments that are in registers already.
        __syncthreads();
        line_a = a.chunk(chunk + 1) - DEPTH * LinesA::DISTANCE;
        line_b = b.chunk(chunk + 1) - DEPTH * LinesB::DISTANCE;
      }
      load_fours<LinesA::ELEMENTS / 2>(a_frag[(k + 1) % 2], line_a + (k + 1) * LinesA::DISTANCE);
      load_fours<LinesB::ELEMENTS / 2>(b_frag[(k + 1) % 2], line_b + (k + 1) * LinesB::DISTANCE);
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
#pragma unroll
        for (int j = 0; j < COLS; ++j) acc[e][j] += a_frag[k % 2][e] * b_frag[k % 2][j];
      }
    }
    if constexpr (Pause::PAUSES) pause(acc, chunk, last);
  }
}

// Copies the first chunk of a kernel's first product.
template <class Buffers, class Copy>
__device__ __forceinline__ void copy_first_chunk(Buffers& buffers, const Copy& copies) {
  float4 values[Copy::LOADS];
  copies.load(values, 0);
  copies.store(buffers, values, 0);
  __syncthreads();  // the chunk is complete
}
