#include "packed/sequence.h"

#include <algorithm>
#include <utility>

#include "names.h"
#include "packed/networks.h"
#include "request.h"
#include "tide/state.h"

namespace tide {

PackedSequence::PackedSequence(Manifest const& manifest, ExitRule exit_rule)
    : rule(std::move(exit_rule)), manifest_(manifest) {
  std::size_t const segments = manifest.checkpoints.size() + 1;
  lengths.assign(segments, 0);
  skipped.assign(segments, 0);
  pending.resize(segments);
  for (std::size_t k = 0; k < segments; ++k) segment_of_.insert(segment_of_.end(), layers_of(manifest, k).count, k);
  for (ModelInfo::KvShape const shape : manifest.model.kv_shapes) {
    for (std::size_t kind = 0; kind < std::size(names::kKinds); ++kind) buffers_.emplace_back(shape);
  }
}

std::vector<std::int64_t> PackedSequence::computed() const {
  std::vector<std::int64_t> tokens = lengths;
  for (std::size_t k = 0; k < tokens.size(); ++k) tokens[k] -= skipped[k];
  return tokens;
}

void PackedSequence::rewind(std::int64_t length) {
  check_rewind(manifest_, lengths[0], length);
  auto const width = static_cast<std::size_t>(manifest_.model.hidden_size);
  for (std::size_t k = 1; k < lengths.size(); ++k) {
    auto const left = static_cast<std::size_t>(std::max<std::int64_t>(length - lengths[k], 0));
    pending[k].resize(std::min(pending[k].size(), left * width));
  }
  // K/V beyond the new length are overwritten before they are read.
  for (std::int64_t& segment_length : lengths) segment_length = std::min(segment_length, length);
}

bool PackedSequence::reserve(std::size_t count) {
  std::int64_t const total = length_after(lengths[0], count, context_of(manifest_));
  if (total <= capacity_) return false;
  allocate(grown_capacity(manifest_, capacity_, total, kRoom));
  return true;
}

void PackedSequence::allocate(std::int64_t capacity) {
  std::vector<std::pair<KvBuffer*, KvBuffer>> replaced;  // and by what
  for (std::size_t const layer : manifest_.model.kv_read(0, segment_of_.size())) {
    for (std::size_t kind = 0; kind < std::size(names::kKinds); ++kind) {
      KvBuffer& held = buffer(layer, kind);
      replaced.emplace_back(&held, held.grown(capacity, lengths[segment_of_[layer]]));
    }
  }
  for (auto& [held, larger] : replaced) *held = std::move(larger);
  capacity_ = capacity;
}

}  // namespace tide
