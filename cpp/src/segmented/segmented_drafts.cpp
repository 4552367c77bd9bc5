#include "segmented/segmented_drafts.h"

#include <algorithm>
#include <numeric>

#include "names.h"
#include "segmented/backend.h"
#include "segmented/numbers.h"

namespace tide {
namespace {

std::size_t size_of(std::int64_t integers) { return static_cast<std::size_t>(integers) * sizeof(std::int64_t); }

}  // namespace

DraftBuffers::DraftBuffers(NetworkSpec const& spec, DeviceNetworks device_networks, NetworksInfo const& sizes,
                           DraftsInfo const& info, std::size_t slots)
    : spec_(spec),
      info_(info),
      sizes_(sizes),
      device_(std::move(device_networks.device)),
      networks_(std::move(device_networks.networks)),
      dtype_(spec[names::kHiddenStates].dtype),
      lengths_(slots),
      written_(slots),
      embedding_(std::move(device_networks.embedding)),
      logits_(slots * info.tokens.size()),
      hidden_(slots * info.width) {
  sizes_.capacity = info.max_rows;
  sizes_.max_tokens = std::min(sizes.max_tokens, info.max_rows);
  sizes_.max_slot_tokens = std::min(sizes.max_slot_tokens, info.max_rows);
  auto const count = static_cast<std::int64_t>(slots);
  std::int64_t const most = std::max(sizes_.max_tokens, count * sizes_.max_slot_tokens);
  Tensor const& hidden = spec[names::kHiddenStates];
  indices_ = std::make_unique<Block>(*device_, std::vector<std::size_t>{size_of(sizes_.capacity)});
  inputs_ = std::make_unique<Block>(
      *device_, std::vector<std::size_t>{size_of(count), size_of(count), size_of(most), hidden.size({most})});
  outputs_ = std::make_unique<Block>(*device_, std::vector<std::size_t>{spec[names::kLogits].size({1, count}),
                                                                        spec[names::kNewHiddenStates].size({1, count})});
  for (std::size_t i = 0; i < spec.tensors.size(); ++i) {
    if (spec.is_kv_input(i)) kv_.push_back(device_->allocate(std::max(kAlignment, spec.tensors[i].size({1, count}))));
  }
  std::iota(indices_->host<std::int64_t>(0), indices_->host<std::int64_t>(0) + sizes_.capacity, 0);
  indices_->upload(0, size_of(sizes_.capacity));  // all memory is there
}

DraftBuffers::~DraftBuffers() {
  try {
    device_->synchronize();  // queued work uses the memory that is freed now
  } catch (std::exception const&) {  // it has failed, and nothing is queued
  }
}

void DraftBuffers::clear(std::size_t slot) {
  auto const written = static_cast<std::size_t>(written_[slot]);
  lengths_[slot] = 0;
  if (written == 0) return;
  std::size_t number = 0;
  for (std::size_t i = 0; i < spec_.tensors.size(); ++i) {
    if (!spec_.is_kv_input(i)) continue;
    Tensor const& tensor = spec_.tensors[i];  // [batch, heads, capacity, head_dim]
    auto const heads = static_cast<std::size_t>(tensor.shape[1]), capacity = static_cast<std::size_t>(tensor.shape[2]);
    std::size_t const stride = tensor.size() / heads;
    device_->clear(kv_[number++].address + slot * tensor.size(), stride / capacity * written, heads, stride);
  }
  written_[slot] = 0;
}

std::vector<DraftResult> DraftBuffers::run(std::vector<SlotDraft> const& drafts) {
  std::vector<SlotDraft const*> by_slot(slots());
  std::vector<std::int64_t> done(slots());
  for (SlotDraft const& draft : drafts) {
    by_slot[draft.slot] = &draft;
    if (draft.rows.before == 0) clear(draft.slot);  // of what an earlier sequence left there
    lengths_[draft.slot] = std::min(lengths_[draft.slot], draft.rows.before);
  }
  try {
    for (;;) {
      std::vector<RunCount> counts;
      for (std::size_t slot = 0; slot < slots(); ++slot) {
        if (by_slot[slot] == nullptr) continue;
        auto const rows = static_cast<std::int64_t>(by_slot[slot]->rows.ids.size()) - done[slot];
        if (rows > 0) counts.push_back({slot, std::min(rows, sizes_.max_tokens)});
      }
      if (counts.empty()) break;
      for (Run const& one : runs_over(counts, lengths_, sizes_)) run(one, by_slot, done);
      for (auto const& [slot, count] : counts) {
        done[slot] += count;
        lengths_[slot] += count;
      }
    }
  } catch (...) {
    for (SlotDraft const& draft : drafts) lengths_[draft.slot] = std::min(lengths_[draft.slot], draft.rows.before);
    throw;
  }
  std::vector<DraftResult> results;
  for (SlotDraft const& draft : drafts) {
    results.push_back({&logits_[draft.slot * info_.tokens.size()], &hidden_[draft.slot * info_.width]});
  }
  return results;
}

// One run over the rows after the `done` ones of its slots, whose lengths do not count them yet.
void DraftBuffers::run(Run const& run, std::vector<SlotDraft const*> const& by_slot, std::vector<std::int64_t> const& done) {
  std::size_t const count = run.slots(), width = info_.width, tokens = static_cast<std::size_t>(run.tokens);
  std::size_t const item = spec_[names::kHiddenStates].size() / width;
  auto* const lengths = inputs_->host<std::int64_t>(kLengths);
  auto* const last = inputs_->host<std::int64_t>(kLast);
  auto* const ids = inputs_->host<std::int64_t>(kIds);
  auto* const hidden = inputs_->host<std::byte>(kHidden);
  std::fill_n(ids, count * tokens, 0);
  std::fill_n(hidden, count * tokens * width * item, std::byte{0});
  for (std::size_t slot = run.start(); slot < run.stop(); ++slot) {
    lengths[slot - run.start()] = lengths_[slot];
    last[slot - run.start()] = 0;
    written_[slot] = std::max(written_[slot], lengths_[slot] + run.tokens);
  }
  for (std::size_t const slot : run.active) {
    std::size_t const number = slot - run.start(), first = static_cast<std::size_t>(done[slot]);
    DraftRows const& rows = by_slot[slot]->rows;
    std::size_t const added = std::min({rows.ids.size() - first, tokens, static_cast<std::size_t>(sizes_.max_tokens)});
    last[number] = static_cast<std::int64_t>(added) - 1;
    std::copy_n(rows.ids.begin() + done[slot], added, ids + number * tokens);
    narrow(dtype_, &rows.hidden[first * width], added * width, hidden + number * tokens * width * item);
  }
  std::vector<std::byte*> addresses;
  std::size_t kv = 0;
  for (std::size_t i = 0; i < spec_.tensors.size(); ++i) {
    Tensor const& tensor = spec_.tensors[i];
    std::byte* address = nullptr;
    if (tensor.name == names::kInputIds) address = inputs_->address(kIds);
    if (tensor.name == names::kHiddenStates) address = inputs_->address(kHidden);
    if (tensor.name == names::kTokenIndices || tensor.name == names::kKeyIndices) address = indices_->address(0);
    if (tensor.name == names::kPastLengths) address = inputs_->address(kLengths);
    if (tensor.name == names::kLastTokens) address = inputs_->address(kLast);
    if (tensor.name == names::kEmbedding) address = embedding_.address;
    if (tensor.name == names::kLogits) address = outputs_->address(kLogits);
    if (tensor.name == names::kNewHiddenStates) address = outputs_->address(kNewHidden);
    if (spec_.is_kv_input(i)) address = kv_[kv++].address + run.start() * tensor.size();
    if (spec_.alias(i) != i) address = addresses[spec_.alias(i)];
    addresses.push_back(address);
  }
  auto const batch_size = static_cast<std::int64_t>(count);
  std::size_t const vocabulary = info_.tokens.size();
  device_->launch({0, 0, static_cast<std::int64_t>(run.start()), batch_size, run.tokens, run.keys}, [&] {
    inputs_->upload(kHidden, count * tokens * width * item);
    networks_[0]->run(addresses, {run.tokens, batch_size, run.keys});
    outputs_->download(kNewHidden, count * width * item);
  });
  device_->synchronize();
  for (std::size_t const slot : run.active) {
    std::size_t const number = slot - run.start();
    std::copy_n(outputs_->host<float>(kLogits) + number * vocabulary, vocabulary, &logits_[slot * vocabulary]);
    widen(dtype_, outputs_->host<std::byte>(kNewHidden) + number * width * item, width, &hidden_[slot * width]);
  }
}

SegmentedDrafts::~SegmentedDrafts() { backend_.give_back_drafts(std::move(buffers_)); }

}  // namespace tide
