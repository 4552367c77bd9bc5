#include "packed/segment.h"

#include <algorithm>

#include "names.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {

SegmentRun::SegmentRun(BatchSessions& sessions, Manifest const& manifest, std::size_t k, Row& nobody)
    : session_(sessions.segments[k]),
      k_(k),
      layers_(layers_of(manifest, k)),
      last_(k + 1 == sessions.segments.size()),
      hidden_size_(manifest.model.hidden_size),
      exit_size_(static_cast<std::int64_t>(sessions.exit_size)),
      binding_(session_),
      slot_tokens_(sessions.rows, 0),
      slot_lengths_(sessions.rows, 1) {
  auto const rows = static_cast<std::int64_t>(sessions.rows);
  bind_input(names::kSlotTokens, slot_tokens_, {rows});
  bind_input(names::kSlotLengths, slot_lengths_, {rows});
  for (std::size_t place = 0; place < sessions.rows; ++place) bind_row(place, nobody);
}

void SegmentRun::bind_row(std::size_t place, Row& row) {
  for (std::size_t layer = layers_.first; layer < layers_.first + layers_.count; ++layer) {
    for (std::size_t kind = 0; kind < std::size(kKinds); ++kind) {
      Ort::Value const value = row.buffer(layer, kind).tensor(memory_);
      binding_.BindInput(names::slot(names::past(layer, kKinds[kind]), place).c_str(), value);
      binding_.BindOutput(names::slot(names::present(layer, kKinds[kind]), place).c_str(), value);
    }
  }
}

void SegmentRun::run(std::vector<Part> const& parts, std::int64_t* ids) {
  std::int64_t const tokens = prepare(parts);
  finish(names::kInputIds, view(memory_, ids, {1, tokens}));
}

void SegmentRun::run(std::vector<Part> const& parts, float* states_before) {
  std::int64_t const tokens = prepare(parts);
  finish(names::kHiddenStates, view(memory_, states_before, {1, tokens, hidden_size_}));
}

// Writes what says whose the tokens are. Gives their number.
std::int64_t SegmentRun::prepare(std::vector<Part> const& parts) {
  std::int64_t tokens = 0, asked = 0;
  for (Part const& part : parts) {
    tokens += part.count;
    asked += part.asked;
  }
  if (tokens != tokens_ || asked != asked_) allocate(tokens, asked);
  std::fill(slot_tokens_.begin(), slot_tokens_.end(), 0);
  std::fill(slot_lengths_.begin(), slot_lengths_.end(), 1);
  auto position = positions_.begin();
  auto last = last_tokens_.begin();
  std::int64_t end = 0;
  for (Part const& part : parts) {
    slot_tokens_[part.place] = part.count;
    slot_lengths_[part.place] = static_cast<std::int32_t>(part.total);
    end += part.count;
    for (std::int64_t i = part.total - part.count; i < part.total; ++i) *position++ = i;
    for (std::int64_t i = end - part.asked; i < end; ++i) *last++ = i;
  }
  return tokens;
}

void SegmentRun::allocate(std::int64_t tokens, std::int64_t asked) {
  tokens_ = asked_ = -1;  // should it fail half-way
  bind_input(names::kLastTokens, last_tokens_, {asked});
  bind_input(names::kPositionIds, positions_, {1, tokens});
  bind_output(names::kExitStates, states, {1, asked, exit_size_});
  if (!last_) {
    bind_output(names::kNewHiddenStates, hidden, {1, tokens, hidden_size_});
    bind_output(names::kRouterScore, scores, {asked, 1, 1});
  }
  tokens_ = tokens;
  asked_ = asked;
}

void SegmentRun::finish(char const* entry, Ort::Value const& value) {
  try {
    binding_.BindInput(entry, value);
    session_.Run(run_options_, binding_);
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed in " + names::segment(k_) + ": " + first_line(error));
  }
}

template <typename T>
void SegmentRun::bind_input(char const* name, std::vector<T>& values, std::vector<std::int64_t> const& shape) {
  values.resize(static_cast<std::size_t>(shape.back()));
  binding_.BindInput(name, view(memory_, values.data(), shape));
}

void SegmentRun::bind_output(char const* name, std::vector<float>& values, std::vector<std::int64_t> const& shape) {
  std::size_t size = 1;
  for (std::int64_t const each : shape) size *= static_cast<std::size_t>(each);
  values.resize(size);
  binding_.BindOutput(name, view(memory_, values.data(), shape));
}

}  // namespace tide
