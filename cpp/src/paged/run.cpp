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

PageBindings::PageBindings(Ort::IoBinding& binding, Manifest const& manifest, PagePool const& pool,
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

void PageBindings::clear() {
  if (!whole_) bound_ = 0;  // what was added last may have moved the memory that is bound, without a `bind` after it
  whole_ = false;
  lengths_.clear();
  places_.clear();
  adapters_.clear();
  sequences_.clear();
}

void PageBindings::add(PagedSequence const& sequence, std::int64_t total) {
  lengths_.push_back(total);
  places_.insert(places_.end(), {sequence.place(), sequence.settled});
  adapters_.push_back(sequence.adapter);
  sequences_.push_back(&sequence);
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

void PageBindings::bind() {
  assert(writes_no_page_twice(sequences_));
  std::size_t longest = 0;
  for (PagedSequence const* const sequence : sequences_) longest = std::max(longest, sequence->pages().size());
  std::size_t const count = sequences_.size();
  if (count != bound_ || longest > width_) {
    bound_ = 0;                                        // in case of an exception
    width_ = std::max(longest + longest / 2, width_);  // not to be bound anew for every page
    table_.resize(std::max(table_.size(), count * width_));
    auto const rows = static_cast<std::int64_t>(count);
    binding_.BindInput(names::kSequenceLengths, view(memory_, lengths_.data(), {rows}));
    binding_.BindInput(names::kPageTable, view(memory_, table_.data(), {rows, static_cast<std::int64_t>(width_)}));
    if (has_adapters_) binding_.BindInput(names::kAdapters, view(memory_, adapters_.data(), {rows}));
    if (has_states_) binding_.BindInput(names::kStatePlaces, view(memory_, places_.data(), {rows, 2}));
    bound_ = count;
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
      pages_(binding_, manifest, pool, layers_read(manifest, k), kv_written(manifest, k),
             states_of(manifest, layers_of(manifest, k)),
             adapts(manifest, layers_of(manifest, k)) ? &adapters : nullptr) {}

void NetworkRun::run(std::vector<Part> const& parts, std::int64_t* ids) {
  std::int64_t const tokens = prepare(parts);
  run_on(names::kInputIds, view(memory_, ids, {1, tokens}));
}

void NetworkRun::run(std::vector<Part> const& parts, float* states) {
  std::int64_t const tokens = prepare(parts);
  run_on(names::kHiddenStates, view(memory_, states, {1, tokens, hidden_size_}));
}

// Writes the inputs that describe the sequences. Returns the number of tokens.
std::int64_t NetworkRun::prepare(std::vector<Part> const& parts) {
  std::int64_t tokens = 0, logits = 0;
  for (Part const& part : parts) {
    tokens += part.count;
    logits += part.logits;
  }
  if (tokens != tokens_ || logits != logits_ || parts.size() + 1 != starts_.size()) {
    allocate(tokens, logits, parts.size());
  }
  pages_.clear();
  auto position = positions_.begin();
  auto last = last_tokens_.begin();
  auto threshold = thresholds_.begin();
  auto start = starts_.begin();
  std::int64_t end = 0;
  *start++ = 0;
  for (Part const& part : parts) {
    pages_.add(*part.sequence, part.total);
    *start++ = end += part.count;
    for (std::int64_t i = part.total - part.count; i < part.total; ++i) *position++ = i;
    if (has_next_) *threshold++ = part.threshold;
    for (std::int64_t i = end - part.logits; i < end; ++i) *last++ = i;
  }
  pages_.bind();
  return tokens;
}

void NetworkRun::allocate(std::int64_t tokens, std::int64_t logits, std::size_t sequences) {
  tokens_ = logits_ = -1;  // in case of an exception
  bind_input(names::kPositionIds, positions_, {1, tokens});
  bind_input(names::kSequenceStarts, starts_, {static_cast<std::int64_t>(sequences) + 1});
  bind_input(names::kLastTokens, last_tokens_, {logits});
  bind_output(names::kExitStates, exit_states, {logits, exit_size_});
  if (draft_size_ > 0) bind_output(names::kDraftStates, draft_states, {1, tokens, draft_size_});
  if (has_next_) {
    bind_output(names::kNewHiddenStates, hidden, {1, tokens, hidden_size_});
    bind_input(names::kSlotThresholds, thresholds_, {logits, 1});
    bind_output(names::kRouterScore, scores, {logits, 1});
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

template <typename T>
void NetworkRun::bind_input(char const* name, std::vector<T>& values, std::vector<std::int64_t> const& shape) {
  values.resize(size_of(shape));
  binding_.BindInput(name, view(memory_, values.data(), shape));
}

void NetworkRun::bind_output(char const* name, std::vector<float>& values, std::vector<std::int64_t> const& shape) {
  values.resize(size_of(shape));
  binding_.BindOutput(name, view(memory_, values.data(), shape));
}

}  // namespace tide
