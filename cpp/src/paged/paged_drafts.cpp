#include "paged/paged_drafts.h"

#include "formatting.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {

DrafterNetwork::DrafterNetwork(Bundle const& bundle, std::optional<std::int64_t> threads)
    : session_(load_network(env_, bundle, kDrafterFile, threads)), info_(drafts_info(*bundle.manifest.drafter)) {
  DrafterInfo const& drafter = *bundle.manifest.drafter;
  if (info_.catches_up) {
    manifest_.model.num_layers = drafter.num_layers;
    manifest_.model.context_length = info_.max_rows;
    manifest_.model.kv_shapes.assign(static_cast<std::size_t>(drafter.num_layers), drafter.kv_shape);
    for (std::int64_t layer = 0; layer < drafter.num_layers; ++layer) {
      manifest_.model.kv_layers.push_back(layer);
      read_.push_back(static_cast<std::size_t>(layer));
    }
    written_ = read_;
  } else {
    manifest_ = bundle.manifest;
    read_.assign(drafter.kv_layers.begin(), drafter.kv_layers.end());
  }
  std::int64_t const width = drafter.state_size, tokens = static_cast<std::int64_t>(info_.tokens.size());
  NetworkSpec spec{kDrafterFile,
                   {{names::kInputIds, true, "int64", {1, kTokens}},
                    {names::kHiddenStates, true, "float32", {1, kTokens, width}},
                    {names::kPositionIds, true, "int64", {1, kTokens}},
                    {names::kLastTokens, true, "int64", {kTokens}},
                    {names::kSequenceStarts, true, "int64", {kTokens}}}};
  if (info_.block_size > 0) {
    spec.tensors.push_back({names::kLogits, false, "float32", {kTokens, info_.block_size - 1, tokens}});
  } else {
    spec.tensors.push_back({names::kLogits, false, "float32", {kTokens, tokens}});
    spec.tensors.push_back({names::kNewHiddenStates, false, "float32", {kTokens, width}});
  }
  add_pages(spec, manifest_, read_, written_);
  spec.check(tensors_of(session_), bundle.file(kDrafterFile).path().string());
  if (info_.catches_up) pool_.emplace(manifest_);
}

PagedDrafts::PagedDrafts(DrafterNetwork& network, std::size_t slots, PagedBatch& batch)
    : network_(network),
      batch_(batch),
      binding_(network.session_),
      inputs_(binding_, network.manifest_, network.pool_ ? *network.pool_ : batch.pool(), network.read_, network.written_,
              {}, nullptr),
      sequences_(slots) {}

std::vector<DraftResult> PagedDrafts::run(std::vector<SlotDraft> const& drafts) {
  std::int64_t const block = network_.info_.block_size;
  inputs_.clear();
  ids_.clear();
  hidden_.clear();
  for (SlotDraft const& draft : drafts) {
    DraftRows const& added = draft.rows;
    if (!network_.pool_) {  // all that the last row needs are the model's K/V of the tokens before it
      PagedSequence const& sequence = batch_.sequence(draft.slot);
      inputs_.add(sequence, 1, sequence.lengths.back(), 1);
      ids_.push_back(added.ids.back());
      hidden_.insert(hidden_.end(), added.hidden.end() - static_cast<std::ptrdiff_t>(network_.info_.width),
                     added.hidden.end());
      continue;
    }
    std::unique_ptr<PagedSequence>& sequence = sequences_[draft.slot];
    if (!sequence) sequence = std::make_unique<PagedSequence>(network_.manifest_, *network_.pool_, ExitRule{});
    if (sequence->length() > added.before) sequence->rewind(added.before);
    std::int64_t const count = static_cast<std::int64_t>(added.ids.size()) + block;
    std::int64_t const total = sequence->reserve(static_cast<std::size_t>(count));
    inputs_.add(*sequence, count, total, 1);
    ids_.insert(ids_.end(), added.ids.begin(), added.ids.end());
    hidden_.insert(hidden_.end(), added.hidden.begin(), added.hidden.end());
    if (block == 0) continue;
    ids_.push_back(added.ids.back());  // the rest of the block is masked
    ids_.resize(static_cast<std::size_t>(inputs_.tokens()));
    hidden_.resize(ids_.size() * network_.info_.width);
  }
  inputs_.bind();
  std::size_t const count = drafts.size(), width = network_.info_.width, tokens = network_.info_.tokens.size();
  std::size_t const each = network_.info_.drafts_of_run();
  logits_.resize(count * each * tokens);
  next_hidden_.resize(count * width);
  auto const rows = static_cast<std::int64_t>(count), columns = static_cast<std::int64_t>(width);
  try {
    binding_.BindInput(names::kInputIds, view(memory_, ids_.data(), {1, inputs_.tokens()}));
    binding_.BindInput(names::kHiddenStates, view(memory_, hidden_.data(), {1, inputs_.tokens(), columns}));
    std::vector<std::int64_t> shape = {rows, static_cast<std::int64_t>(tokens)};
    if (block > 0) shape.insert(shape.begin() + 1, block - 1);
    binding_.BindOutput(names::kLogits, view(memory_, logits_.data(), shape));
    if (block == 0) {
      binding_.BindOutput(names::kNewHiddenStates, view(memory_, next_hidden_.data(), {rows, columns}));
    }
    network_.session_.Run(run_options_, binding_);
  } catch (Ort::Exception const& error) {
    throw GenerationError("ONNX Runtime failed in the drafter: " + first_line(error));
  }
  std::vector<DraftResult> results;
  for (std::size_t i = 0; i < count; ++i) {
    DraftRows const& added = drafts[i].rows;
    if (network_.pool_) {
      sequences_[drafts[i].slot]->lengths[0] = added.before + static_cast<std::int64_t>(added.ids.size());
    }
    results.push_back({logits_.data() + i * each * tokens, block > 0 ? nullptr : next_hidden_.data() + i * width});
  }
  return results;
}

}  // namespace tide
