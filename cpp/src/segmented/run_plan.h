// Plans over which slots of a batch a segment runs at once, and how far runs are padded.
//
// A network takes adjacent slots, because their K/V buffers are contiguous, and the same number of tokens of each. A run
// reads its weights once for any number of slots, so idle slots in between are included as padding: their rows are written
// after the slot's last token, and overwritten before they are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tide/manifest.h"

namespace tide {

// The tokens that one slot has to run.
struct RunCount {
  std::size_t slot;
  std::int64_t count;
};

// A run over slots start .. stop-1, `tokens` of each, whose attention reads the first `keys` tokens of their buffers.
struct Run {
  std::vector<std::size_t> active;  // slots that have something to run, ascending; the others are padding
  std::int64_t tokens, keys = 0;

  std::size_t start() const { return active.front(); }
  std::size_t stop() const { return active.back() + 1; }
  std::size_t slots() const { return stop() - start(); }
};

// Pads a run over `count` tokens after `length` in the cache to the next power of two, if that fits the largest
// optimization profile (`max_tokens`) and the K/V buffers (`capacity` tokens).
std::int64_t padded(std::int64_t count, std::int64_t length, std::int64_t max_tokens, std::int64_t capacity);

// How many tokens of K/V buffers attention reads where the longest sequence has `length`: 512, 2048, 8192, ... or all, so
// that there are few sizes to record; on CUDA all, where the operator reads each sequence's own.
std::int64_t keys_for(std::int64_t length, NetworksInfo const& info);

// The runs of one segment over some slots, each slot in one of them.
//
// Slots with few tokens are combined in as few runs as there is room for padding: a sequence whose buffers are nearly
// full splits them. One with more than `info.max_slot_tokens`, a prompt, has a run to itself, after those, so that what
// their padding wrote after its last token is overwritten.
//
// counts: by ascending slots; 1 or more tokens, no more than a run takes.
// lengths: tokens in the segment's K/V buffers, of every slot there is.
std::vector<Run> runs_over(std::vector<RunCount> const& counts, std::vector<std::int64_t> const& lengths,
                           NetworksInfo const& info);

}  // namespace tide
