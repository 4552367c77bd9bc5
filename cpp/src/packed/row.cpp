#include "packed/row.h"

#include <algorithm>

#include "packed/networks.h"
#include "request.h"
#include "tide/state.h"

namespace tide {

Row::Row(Manifest const& manifest) : manifest_(manifest) {
  std::size_t const segments = manifest.checkpoints.size() + 1;
  lengths.assign(segments, 0);
  skipped.assign(segments, 0);
  waiting.resize(segments);
  for (std::size_t k = 0; k < segments; ++k) segment_of_.insert(segment_of_.end(), layers_of(manifest, k).count, k);
  for (ModelInfo::KvShape const shape : manifest.model.kv_shapes) {
    for (std::size_t kind = 0; kind < std::size(kKinds); ++kind) buffers_.emplace_back(shape);
  }
}

std::vector<std::int64_t> Row::computed() const {
  std::vector<std::int64_t> found = lengths;
  for (std::size_t k = 0; k < found.size(); ++k) found[k] -= skipped[k];
  return found;
}

void Row::rewind(std::int64_t length) {
  // What the buffers hold beyond is written over before it is read.
  for (std::int64_t& own : lengths) own = std::min(own, length);
}

void Row::reserve(std::size_t count) {
  std::int64_t const total = length_after(lengths[0], count, context_of(manifest_));
  if (total > capacity_) allocate(grown_capacity(manifest_, capacity_, total, kRoom));
}

void Row::allocate(std::int64_t capacity) {
  bound = false;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    buffers_[i] = buffers_[i].grown(capacity, lengths[segment_of_[i / std::size(kKinds)]]);
  }
  capacity_ = capacity;
}

}  // namespace tide
