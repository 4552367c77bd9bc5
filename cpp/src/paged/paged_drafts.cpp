#include "paged/paged_drafts.h"

#include <algorithm>

#include "formatting.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {

DrafterNetwork::DrafterNetwork(Bundle const& bundle, std::optional<std::int64_t> threads)
    : session_(load_network(env_, bundle, kDrafterFile, threads)), info_(drafts_info(*bundle.manifest.drafter)) {
  DrafterInfo const& drafter = *bundle.manifest.drafter;
  manifest_.model.num_layers = 1;
  manifest_.model.context_length = info_.max_rows;
  manifest_.model.kv_shapes = {drafter.kv_shape};
  manifest_.model.kv_layers = {0};
  std::int64_t const width = drafter.state_size;
  NetworkSpec spec{kDrafterFile,
                   {{names::kInputIds, true, "int64", {1, kTokens}},
                    {names::kHiddenStates, true, "float32", {1, kTokens, width}},
                    {names::kPositionIds, true, "int64", {1, kTokens}},
                    {names::kLastTokens, true, "int64", {kTokens}},
                    {names::kSequenceStarts, true, "int64", {kTokens}},
                    {names::kLogits, false, "float32", {kTokens, static_cast<std::int64_t>(info_.tokens.size())}},
                    {names::kNewHiddenStates, false, "float32", {kTokens, width}}}};
  add_pages(spec, manifest_, {0}, {0});
  spec.check(tensors_of(session_), bundle.file(kDrafterFile).path().string());
  pool_.emplace(manifest_);
}

PagedDrafts::PagedDrafts(DrafterNetwork& network, std::size_t slots)
    : network_(network),
      binding_(network.session_),
      pages_(binding_, network.manifest_, *network.pool_, {0}, {0}, {}, nullptr),
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
