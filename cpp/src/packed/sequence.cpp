#include "packed/sequence.h"

#include <algorithm>
#include <utility>

#include "request.h"
#include "tide/state.h"

namespace tide {

PackedSequence::PackedSequence(Manifest const& manifest, ExitRule exit_rule)
    : SequenceState(manifest),
      rule(std::move(exit_rule)),
      skipped(lengths.size()),
      pending(lengths.size()),
      kv(manifest, kRoom) {}

std::vector<std::int64_t> PackedSequence::computed() const {
  std::vector<std::int64_t> tokens = lengths;
  for (std::size_t k = 0; k < tokens.size(); ++k) tokens[k] -= skipped[k];
  return tokens;
}

void PackedSequence::rewind(std::int64_t length) {
  std::vector<std::int64_t> const before = lengths;
  SequenceState::rewind(length);
  auto const width = static_cast<std::size_t>(manifest_.model.hidden_size);
  for (std::size_t k = 1; k < lengths.size(); ++k) {
    auto const left = static_cast<std::size_t>(std::max<std::int64_t>(length - before[k], 0));
    pending[k].resize(std::min(pending[k].size(), left * width));
  }
  lone_is_current = false;
}

void PackedSequence::reserve(std::size_t count) {
  kv.reserve(length_after(lengths[0], count, context_of(manifest_)), lengths);
}

void PackedSequence::write_kv(std::vector<std::vector<char> const*> const& blocks, std::int64_t size,
                              std::int64_t length) {
  reserve(blocks.size() * static_cast<std::size_t>(size));
  std::int64_t start = 0;
  for (std::vector<char> const* const block : blocks) {
    kv.write(start, *block);
    start += size;
  }
  lengths.assign(lengths.size(), length);
  lone_is_current = false;
}

StepResult PackedSequence::step_alone(LoneSequence& lone, StepRequest const& request) {
  std::int64_t const total = length_after(lengths[0], request.ids.size(), context_of(manifest_));
  if (!lone_is_current) lone.resume(lengths, computed(), pending);
  lone_is_current = false;  // in case of an exception
  StepResult const result =
      lone.step(request.ids.data(), request.ids.size(), total, request.logits_to_keep, request.full);
  std::vector<std::vector<float>> states = lone.pending_states();
  pending.swap(states);
  std::copy(lone.lengths().begin(), lone.lengths().end(), lengths.begin());
  for (std::size_t k = 0; k < lengths.size(); ++k) skipped[k] = lengths[k] - lone.computed()[k];
  lone_is_current = true;
  return result;
}

}  // namespace tide
