#include "paged/run.h"

#include <algorithm>
#include <cassert>
#include <iterator>

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

std::vector<std::size_t> layers_read(Manifest const& manifest, std::size_t k) {
  Layers const layers = layers_of(manifest, k);
  return manifest.model.kv_read(layers.first, layers.count);
}

}  // namespace

SequenceInputs::SequenceInputs(Ort::IoBinding& binding, Manifest const& manifest, PagePool const& pool,
                           std::vector<std::size_t> const& read, std::vector<std::size_t> const& written,
                           std::vector<std::size_t> const& states, Adapters const* adapters)
    : binding_(binding), has_states_(!states.empty()), has_adapters_(adapters != nullptr) {
  if (has_adapters_) binding_.BindInput(names::kLoraWeights, adapters->tensor());
  for (std::size_t kind = 0; kind < std::size(names::kKinds); ++kind) {
    char const* const name = names::kKinds[kind];
    for (std::size_t const layer : read) {
      binding_.BindInput(names::pages(layer, name).c_str(), pool.tensor(layer, kind));
    }
    for (std::size_t const layer : written) {
      binding_.BindOutput(names::new_pages(layer, name).c_str(), pool.tensor(layer, kind));
    }
  }
  for (std::size_t const number : states) {
    auto const& [layer, of_layer, shape, undo] = manifest.model.states[number];
    binding_.BindInput(names::states(layer, of_layer).c_str(), pool.states.tensor(number));
    binding_.BindOutput(names::new_states(layer, of_layer).c_str(), pool.states.tensor(number));
  }
}

void SequenceInputs::clear() {
  if (!whole_) bound_ = 0;  // what was added last may have moved the memory that is bound, without a `bind` after it
  whole_ = false;
  sequences_.clear();
  positions_.clear();
  starts_.assign(1, 0);
  last_tokens_.clear();
  lengths_.clear();
  places_.clear();
  adapters_.clear();
}

void SequenceInputs::add(PagedSequence const& sequence, std::int64_t count, std::int64_t total, std::int64_t logits) {
  sequences_.push_back(&sequence);
  for (std::int64_t i = total - count; i < total; ++i) positions_.push_back(i);
  starts_.push_back(tokens());
  for (std::int64_t i = tokens() - logits; i < tokens(); ++i) last_tokens_.push_back(i);
  lengths_.push_back(total);
  places_.insert(places_.end(), {sequence.place(), sequence.settled});
  adapters_.push_back(sequence.adapter);
}

// Whether each page that a run may write is of one sequence alone.
[[maybe_unused]] static bool writes_no_page_twice(std::vector<PagedSequence const*> const& sequences) {
  std::vector<Page> written;
  for (PagedSequence const* const sequence : sequences) {
    auto const first = static_cast<std::ptrdiff_t>(sequence->lengths.back() / kPageTokens);
    written.insert(written.end(), sequence->pages().begin() + first, sequence->pages().end());
  }
  std::sort(written.begin(), written.end());
  return std::adjacent_find(written.begin(), written.end()) == written.end();
}

void SequenceInputs::bind() {
  assert(writes_no_page_twice(sequences_));
  std::size_t longest = 0;
  for (PagedSequence const* const sequence : sequences_) longest = std::max(longest, sequence->pages().size());
  std::size_t const count = sequences_.size();
  if (count != bound_ || longest > width_ || tokens() != bound_tokens_ || logits() != bound_logits_) {
    bound_ = 0;                                        // in case of an exception
    width_ = longest > width_ ? longest + longest / 2 : width_;  // not to be bound anew for every page
    table_.resize(std::max(table_.size(), count * width_));
    auto const rows = static_cast<std::int64_t>(count);
    bind_input(names::kPositionIds, positions_, {1, tokens()});
    bind_input(names::kSequenceStarts, starts_, {rows + 1});
    bind_input(names::kLastTokens, last_tokens_, {logits()});
    bind_input(names::kSequenceLengths, lengths_, {rows});
    bind_input(names::kPageTable, table_, {rows, static_cast<std::int64_t>(width_)});
    if (has_adapters_) bind_input(names::kAdapters, adapters_, {rows});
    if (has_states_) bind_input(names::kStatePlaces, places_, {rows, 2});
    bound_ = count;
    bound_tokens_ = tokens();
    bound_logits_ = logits();
  }
  auto row = table_.begin();
  for (PagedSequence const* const sequence : sequences_) {
    std::copy(sequence->pages().begin(), sequence->pages().end(), row);
    row += static_cast<std::ptrdiff_t>(width_);
  }
  whole_ = true;
}

NetworkRun::NetworkRun(Networks& networks, Manifest const& manifest, PagePool const& pool,
                       Adapters const& adapters, std::size_t k)
    : session_(networks.segment(k)),
      name_(names::segment(k)),
      has_next_(k + 1 < networks.segments()),
      hidden_size_(manifest.model.hidden_size),
      exit_size_(static_cast<std::int64_t>(networks.exit_size())),
      draft_size_(has_next_ ? 0 : static_cast<std::int64_t>(networks.draft_size())),
      binding_(session_),
      inputs_(binding_, manifest, pool, layers_read(manifest, k), kv_written(manifest, k),
             states_of(manifest, layers_of(manifest, k)),
             adapts(manifest, layers_of(manifest, k)) ? &adapters : nullptr) {}

void NetworkRun::run(std::vector<Part> const& parts, std::int64_t* ids) {
  prepare(parts);
  run_on(names::kInputIds, view(memory_, ids, {1, inputs_.tokens()}));
}

void NetworkRun::run(std::vector<Part> const& parts, float* entry) {
  prepare(parts);
  run_on(names::kHiddenStates, view(memory_, entry, {1, inputs_.tokens(), hidden_size_}));
}

// Writes the inputs that describe the sequences, and binds memory for the outputs.
void NetworkRun::prepare(std::vector<Part> const& parts) {
  inputs_.clear();
  for (Part const& part : parts) inputs_.add(*part.sequence, part.count, part.total, part.logits);
  if (inputs_.tokens() != tokens_ || inputs_.logits() != logits_) allocate();
  for (std::size_t i = 0; i < thresholds_.size(); ++i) thresholds_[i] = parts[i].threshold;
  inputs_.bind();
}

void NetworkRun::allocate() {
  std::int64_t const tokens = inputs_.tokens(), logits = inputs_.logits();
  tokens_ = logits_ = -1;  // in case of an exception
  bind_output(names::kExitStates, exit_states, {logits, exit_size_});
  if (draft_size_ > 0) bind_output(names::kDraftStates, draft_states, {1, tokens, draft_size_});
  if (has_next_) {
    bind_output(names::kNewHiddenStates, hidden, {1, tokens, hidden_size_});
    bind_output(names::kRouterScore, scores, {logits, 1});
    thresholds_.resize(static_cast<std::size_t>(logits));
    binding_.BindInput(names::kSlotThresholds, view(memory_, thresholds_.data(), {logits, 1}));
  }
  tokens_ = tokens;
  logits_ = logits;
}

void NetworkRun::run_on(char const* input, Ort::Value const& value) {
  try {
    binding_.BindInput(input, value);
    session_.Run(run_options_, binding_);
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed in " + name_ + ": " + first_line(error));
  }
}

void NetworkRun::bind_output(char const* name, std::vector<float>& values, std::vector<std::int64_t> const& shape) {
  values.resize(size_of(shape));
  binding_.BindOutput(name, view(memory_, values.data(), shape));
}

}  // namespace tide
