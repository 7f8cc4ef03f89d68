// From the index of a thread block to its tile. Blocks start in index order, so the order decides
// two things: what shares the L2 cache, and what is left for the end of the launch.
//
// Heads are cut into sections of heads_per_section whose keys and values fit the L2 together.
// Inside a section the longest tiles of all heads come first (with a causal mask the last query
// tile is the longest), so that the launch ends on short ones. One head a section gives the plain
// order.
#pragma once
#include "params.cuh"

struct Tile {
  int block;  // along the sequence, 0 is the shortest
  int head;
  int batch;
};

// There are fewer than 2^31 tiles, so everything fits 32 bits once a section has no more heads than
// there are: the host counts those of all sequences, a list of packed tiles has them in its blocks.
__device__ inline Tile tile_of_block(uint32_t index, int blocks_per_head, int heads, int batch,
                                     int heads_per_section) {
  heads_per_section = min(heads_per_section, heads * batch);
  const uint32_t section_size = uint32_t(heads_per_section) * blocks_per_head;
  const int first = index / section_size * heads_per_section;
  const int rest = index % section_size;
  const int section_heads = min(heads_per_section, heads * batch - first);
  const int head = first + rest % section_heads;
  return {blocks_per_head - 1 - rest / section_heads, head % heads, head / heads};
}

// The tiles of a persistent kernel. Of packed sequences only those that exist, which another kernel
// has listed: the sequences from the shortest to the longest, so that the order starts with the
// longest, each block by block. Element 0 of the list holds its length.
struct TileOrder {
  int blocks_per_head;
  int heads;
  int batch;
  int heads_per_section;
  const PackedTile* packed_tiles;

  __device__ TileOrder(const AttentionShape& shape, int blocks_per_head, int heads,
                       const PackedTile* packed_tiles)
      : blocks_per_head(packed_tiles ? packed_tiles[0].block : blocks_per_head),
        heads(heads),
        batch(packed_tiles ? 1 : shape.batch),
        heads_per_section(shape.heads_per_section),
        packed_tiles(packed_tiles) {}

  __device__ uint32_t size() const { return uint32_t(blocks_per_head) * heads * batch; }

  __device__ Tile at(uint32_t index) const {
    Tile tile = tile_of_block(index, blocks_per_head, heads, batch, heads_per_section);
    if (packed_tiles) {
      const PackedTile found = packed_tiles[1 + tile.block];
      tile.block = found.block;
      tile.batch = found.batch;
    }
    return tile;
  }
};

// The next tile of a persistent block: whoever is free takes the next one, so the longest come
// first and nobody waits at the end. The counter starts at 0 and is 0 again when all blocks are
// done: they ask num_tiles times in all, num_tiles - gridDim.x of them with success. Without a
// counter the blocks take turns.
__device__ inline uint32_t next_tile_index(uint32_t* counter, uint32_t index, uint32_t num_tiles) {
  return gridDim.x + (counter ? atomicInc(counter, num_tiles - 1) : index);
}
