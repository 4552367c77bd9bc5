#include "paged/drafter.h"

#include <algorithm>
#include <cstdlib>

#include "formatting.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

// The numbers of a field of the network's metadata, which commas join; empty: it is not there or holds something else.
std::vector<double> numbers_of(Ort::Session const& session, char const* field) {
  std::string text;
  std::vector<double> numbers;
  if (!session.metadata(field, text)) return numbers;
  for (char const* at = text.c_str(); *at != 0;) {
    char* end = nullptr;
    numbers.push_back(std::strtod(at, &end));
    if (end == at || (*end != 0 && *end != ',')) return {};
    at = *end == 0 ? end : end + 1;
  }
  return numbers;
}

// The heads and width of its K/V pages; zeros, which none have, where it has none.
ModelInfo::KvShape kv_shape_of(std::vector<Tensor> const& tensors) {
  for (Tensor const& tensor : tensors) {
    if (tensor.name != names::pages(0, names::kKinds[0]) || tensor.shape.size() != 4) continue;
    return {std::max<std::int64_t>(tensor.shape[1], 0), std::max<std::int64_t>(tensor.shape[3], 0)};
  }
  return {0, 0};
}

}  // namespace

DrafterNetwork::DrafterNetwork(Bundle const& bundle, std::optional<std::int64_t> threads)
    : session_(load_network(env_, bundle, kDrafterFile, threads)) {
  std::vector<Tensor> const tensors = tensors_of(session_);
  for (double const token : numbers_of(session_, names::kTokensMetadata)) {
    info_.tokens.push_back(static_cast<std::int64_t>(token));
  }
  info_.acceptance = numbers_of(session_, names::kAcceptanceMetadata);
  std::vector<double> const most = numbers_of(session_, names::kMaxTokensMetadata);
  info_.max_rows = most.size() == 1 ? static_cast<std::int64_t>(most[0]) : 0;
  std::int64_t const width = last_dimension(tensors, names::kHiddenStates);
  info_.width = static_cast<std::size_t>(width);
  manifest_.model.num_layers = 1;
  manifest_.model.context_length = info_.max_rows;
  manifest_.model.kv_shapes = {kv_shape_of(tensors)};
  manifest_.model.kv_layers = {0};

  NetworkSpec spec{kDrafterFile,
                   {{names::kInputIds, true, "int64", {1, kTokens}},
                    {names::kHiddenStates, true, "float32", {1, kTokens, width}},
                    {names::kPositionIds, true, "int64", {1, kTokens}},
                    {names::kLastTokens, true, "int64", {kTokens}},
                    {names::kSequenceStarts, true, "int64", {kTokens}},
                    {names::kLogits, false, "float32", {kTokens, static_cast<std::int64_t>(info_.tokens.size())}},
                    {names::kNewHiddenStates, false, "float32", {kTokens, width}}}};
  add_pages(spec, manifest_, {0}, {0});
  spec.check(tensors, bundle.file(kDrafterFile).path().string());
  check(bundle);
  pool_.emplace(manifest_);
}

// Checks what no tensor shows.
void DrafterNetwork::check(Bundle const& bundle) {
  std::string const file = quoted(bundle.file(kDrafterFile).path());
  std::string fingerprint;
  session_.metadata(names::kFingerprintMetadata, fingerprint);
  if (fingerprint != bundle.manifest.model.weights_sha256) {
    throw BundleError(file + " was trained for another model than the bundle's: run tide-export draft again");
  }
  auto const& tokens = info_.tokens;
  bool const ascending = std::adjacent_find(tokens.begin(), tokens.end(), std::greater_equal<>()) == tokens.end();
  bool const known = !tokens.empty() && tokens.front() >= 0 && tokens.back() < bundle.manifest.model.vocab_size;
  bool const shares = info_.acceptance.size() == kConfidences.size() &&
                      std::all_of(info_.acceptance.begin(), info_.acceptance.end(),
                                  [](double share) { return 0 <= share && share <= 1; });
  if (!ascending || !known || !shares || info_.max_rows < 2) {
    throw BundleError(file + " does not record its tokens as this release writes them: run tide-export draft again");
  }
}

PagedDrafts::PagedDrafts(DrafterNetwork& network, std::size_t slots)
    : network_(network),
      binding_(network.session_),
      pages_(binding_, *network.pool_, {0}, {0}),
      sequences_(slots) {}

std::vector<DraftResult> PagedDrafts::run(std::vector<SlotDraft> const& drafts) {
  std::int64_t rows = 0;
  auto const count = static_cast<std::int64_t>(drafts.size());
  for (SlotDraft const& draft : drafts) rows += static_cast<std::int64_t>(draft.rows.ids.size());
  auto const width = static_cast<std::int64_t>(network_.info_.width);
  auto const tokens = static_cast<std::int64_t>(network_.info_.tokens.size());
  if (rows != rows_ || count != count_) {
    rows_ = -1;  // in case of an exception
    bind(names::kInputIds, ids_, {1, rows}, true);
    bind(names::kHiddenStates, states_, {1, rows, width}, true);
    bind(names::kPositionIds, positions_, {1, rows}, true);
    bind(names::kLastTokens, last_, {count}, true);
    bind(names::kSequenceStarts, starts_, {count + 1}, true);
    bind(names::kLogits, logits_, {count, tokens}, false);
    bind(names::kNewHiddenStates, next_states_, {count, width}, false);
    rows_ = rows;
    count_ = count;
  }
  pages_.clear();
  auto id = ids_.begin();
  auto position = positions_.begin();
  auto state = states_.begin();
  std::int64_t end = 0;
  for (std::size_t i = 0; i < drafts.size(); ++i) {
    DraftRows const& added = drafts[i].rows;
    std::unique_ptr<PagedSequence>& sequence = sequences_[drafts[i].slot];
    if (!sequence) sequence = std::make_unique<PagedSequence>(network_.manifest_, *network_.pool_, ExitRule{});
    if (sequence->length() > added.before) sequence->rewind(added.before);
    pages_.add(*sequence, sequence->reserve(added.ids.size()));
    id = std::copy(added.ids.begin(), added.ids.end(), id);
    state = std::copy(added.states.begin(), added.states.end(), state);
    for (std::size_t row = 0; row < added.ids.size(); ++row) {
      *position++ = added.before + static_cast<std::int64_t>(row);
    }
    starts_[i] = end;
    end += static_cast<std::int64_t>(added.ids.size());
    last_[i] = end - 1;
  }
  starts_.back() = end;
  pages_.bind();
  try {
    network_.session_.Run(run_options_, binding_);
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed in the drafter: " + first_line(error));
  }
  std::vector<DraftResult> results;
  for (std::int64_t i = 0; i < count; ++i) {
    DraftRows const& added = drafts[static_cast<std::size_t>(i)].rows;
    sequences_[drafts[static_cast<std::size_t>(i)].slot]->lengths[0] =
        added.before + static_cast<std::int64_t>(added.ids.size());
    results.push_back({logits_.data() + i * tokens, next_states_.data() + i * width});
  }
  return results;
}

template <typename T>
void PagedDrafts::bind(char const* name, std::vector<T>& values, std::vector<std::int64_t> const& shape,
                       bool is_input) {
  std::size_t size = 1;
  for (std::int64_t const dim : shape) size *= static_cast<std::size_t>(dim);
  values.resize(size);
  Ort::Value const value = view(memory_, values.data(), shape);
  if (is_input) {
    binding_.BindInput(name, value);
  } else {
    binding_.BindOutput(name, value);
  }
}

}  // namespace tide
