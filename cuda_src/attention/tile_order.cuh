// The order of tiles: which tile a thread block computes. Blocks start in the order of their index,
// so this order decides which tiles share the L2 cache, and which are left for the end of a launch.
//
// The heads are divided into sections of heads_per_section, whose keys and values fit L2 together.
// Inside a section the tiles with the most work come first, of all heads (with a causal mask the
// last query tile has the most), so that the launch ends with short tiles. With one head a section
// the tiles come head by head.
#pragma once
#include "../ptx/opaque.cuh"
#include "params.cuh"

struct Tile {
  int block;  // its number along the sequence; under a causal mask 0 has the least work
  int head;
  int batch;
};

// Returns the tile of a block. There are fewer than 2^31 tiles, so all numbers fit 32 bits if a
// section has no more heads than exist. The first line ensures that, because the host counts the
// heads of all sequences, but with a list of packed tiles `batch` is 1.
__device__ inline Tile tile_of_block(uint32_t index, int blocks_per_head, int heads, int batch,
                                     int heads_per_section) {
  heads_per_section = min(heads_per_section, heads * batch);
  const uint32_t section_size = uint32_t(heads_per_section) * blocks_per_head;
  const int first = index / section_size * heads_per_section;
  const uint32_t rest = index % section_size;  // unsigned divisions take fewer registers
  const uint32_t section_heads = min(heads_per_section, heads * batch - first);
  const uint32_t head = first + rest % section_heads;
  const int block = blocks_per_head - 1 - int(rest / section_heads);
  return {block, int(head % uint32_t(heads)), int(head / uint32_t(heads))};
}

// The tiles of a persistent kernel, in their order. Packed sequences have a list of the tiles that
// exist, which sequence_maps_sm90.cu has written: from the shortest sequence to the longest, each
// block by block. The order runs from the end of the list, so that it begins with the longest
// sequence. Element 0 of the list holds its length.
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

// The index of the next tile of a persistent block. With a counter, a block that is free takes the
// next tile of all, so that the blocks end at about the same time. The counter is 0 before and
// after the launch: the blocks ask num_tiles times in all, once after each tile, and count
// num_tiles wraps it to 0. Without a counter a block takes every gridDim.x-th tile.
__device__ inline uint32_t next_tile_index(uint32_t* counter, uint32_t index, uint32_t num_tiles) {
  return fresh_grid_size() + (counter ? atomicInc(counter, num_tiles - 1) : index);
}
