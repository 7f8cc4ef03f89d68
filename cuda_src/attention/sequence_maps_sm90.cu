// Tensor maps of packed sequences: from the map of all rows, one for each sequence that ends where
// the sequence does, so that the copy engine reads zeros past its end and writes nothing there.
// Without them a tile would read the next sequence, and 0 * NaN is NaN.
//
// One block a sequence, one warp a map: q, k, v and that of the output (forward) or its gradient.
// PTX ISA: "tensormap.replace", "membar / fence: fence.proxy.tensormap".
#include "../common/params.cuh"
#include "../ptx/tma.cuh"

template <int NUM_MAPS>
__global__ void __launch_bounds__(NUM_MAPS * 32)
    sequence_maps_sm90(const __grid_constant__ SequenceMapsParams params) {
  static_assert(sizeof(params.maps) == NUM_MAPS * sizeof(TensorMap),
                "host and device disagree on the number of maps");
  __shared__ TensorMap maps[NUM_MAPS];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const bool of_keys = warp == 1 || warp == 2;
  const int* cu_seqlens = of_keys ? params.cu_seqlens_k : params.cu_seqlens_q;

  uint32_t* map = reinterpret_cast<uint32_t*>(&maps[warp]);
  map[lane] = reinterpret_cast<const uint32_t*>(&params.maps[warp])[lane];
  __syncwarp();
  if (lane == 0) tensor_map_set_rows(maps[warp], cu_seqlens[blockIdx.x + 1]);
  __syncwarp();
  TensorMap* out = params.sequence_maps + warp * gridDim.x + blockIdx.x;
  reinterpret_cast<uint32_t*>(out)[lane] = map[lane];
}
