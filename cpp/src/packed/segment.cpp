#include "packed/segment.h"

#include <algorithm>

#include "formatting.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

std::size_t size_of(std::vector<std::int64_t> const& shape) {
  std::size_t size = 1;
  for (std::int64_t const dim : shape) size *= static_cast<std::size_t>(dim);
  return size;
}

}  // namespace

SegmentRun::SegmentRun(BatchSessions& sessions, Manifest const& manifest, std::size_t k, PackedSequence& padding)
    : session_(sessions.segments[k]),
      k_(k),
      layers_(layers_of(manifest, k)),
      kv_read_(manifest.model.kv_read(layers_.first, layers_.count)),
      last_(k + 1 == sessions.segments.size()),
      hidden_size_(manifest.model.hidden_size),
      exit_size_(static_cast<std::int64_t>(sessions.exit_size)),
      binding_(session_),
      slot_tokens_(sessions.slots, 0),
      slot_lengths_(sessions.slots, 1) {
  auto const slots = static_cast<std::int64_t>(sessions.slots);
  bind_input(names::kSlotTokens, slot_tokens_, {slots});
  bind_input(names::kSlotLengths, slot_lengths_, {slots});
  for (std::size_t slot = 0; slot < sessions.slots; ++slot) bind(slot, padding);
}

void SegmentRun::bind(std::size_t slot, PackedSequence& sequence) {
  for (std::size_t const layer : kv_read_) {
    for (std::size_t kind = 0; kind < std::size(names::kKinds); ++kind) {
      Ort::Value const value = sequence.kv.buffer(layer, kind).tensor(memory_);
      binding_.BindInput(names::slot(names::past(layer, names::kKinds[kind]), slot).c_str(), value);
      if (layer < layers_.first) continue;  // an earlier segment's
      binding_.BindOutput(names::slot(names::present(layer, names::kKinds[kind]), slot).c_str(), value);
    }
  }
}

void SegmentRun::run(std::vector<Part> const& parts, std::int64_t* ids) {
  std::int64_t const tokens = prepare(parts);
  run_on(names::kInputIds, view(memory_, ids, {1, tokens}));
}

void SegmentRun::run(std::vector<Part> const& parts, float* states) {
  std::int64_t const tokens = prepare(parts);
  run_on(names::kHiddenStates, view(memory_, states, {1, tokens, hidden_size_}));
}

// Writes the inputs that assign tokens to slots. Returns the number of tokens.
std::int64_t SegmentRun::prepare(std::vector<Part> const& parts) {
  std::int64_t tokens = 0, logits = 0;
  for (Part const& part : parts) {
    tokens += part.count;
    logits += part.logits;
  }
  if (tokens != tokens_ || logits != logits_) allocate(tokens, logits);
  std::fill(slot_tokens_.begin(), slot_tokens_.end(), 0);
  std::fill(slot_lengths_.begin(), slot_lengths_.end(), 1);
  auto position = positions_.begin();
  auto last = last_tokens_.begin();
  auto threshold = thresholds_.begin();
  std::int64_t end = 0;
  for (Part const& part : parts) {
    if (!last_) *threshold++ = part.threshold;
    slot_tokens_[part.slot] = part.count;
    slot_lengths_[part.slot] = static_cast<std::int32_t>(part.total);
    end += part.count;
    for (std::int64_t i = part.total - part.count; i < part.total; ++i) *position++ = i;
    for (std::int64_t i = end - part.logits; i < end; ++i) *last++ = i;
  }
  return tokens;
}

void SegmentRun::allocate(std::int64_t tokens, std::int64_t logits) {
  tokens_ = logits_ = -1;  // in case of an exception
  bind_input(names::kLastTokens, last_tokens_, {logits});
  bind_input(names::kPositionIds, positions_, {1, tokens});
  bind_output(names::kExitStates, exit_states, {logits, exit_size_});
  if (!last_) {
    bind_output(names::kNewHiddenStates, hidden, {1, tokens, hidden_size_});
    bind_input(names::kSlotThresholds, thresholds_, {logits, 1});
    bind_output(names::kRouterScore, scores, {logits, 1});
  }
  tokens_ = tokens;
  logits_ = logits;
}

void SegmentRun::run_on(char const* input, Ort::Value const& value) {
  try {
    binding_.BindInput(input, value);
    session_.Run(run_options_, binding_);
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed in " + names::segment(k_) + ": " + first_line(error));
  }
}

template <typename T>
void SegmentRun::bind_input(char const* name, std::vector<T>& values, std::vector<std::int64_t> const& shape) {
  values.resize(size_of(shape));
  binding_.BindInput(name, view(memory_, values.data(), shape));
}

void SegmentRun::bind_output(char const* name, std::vector<float>& values, std::vector<std::int64_t> const& shape) {
  values.resize(size_of(shape));
  binding_.BindOutput(name, view(memory_, values.data(), shape));
}

}  // namespace tide
