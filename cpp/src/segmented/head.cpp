#include "segmented/head.h"

#include <algorithm>
#include <numeric>

#include "names.h"
#include "segmented/run_plan.h"

namespace tide {
namespace {

enum Found : std::size_t { kBestToken, kBestLogit, kTopLogits, kTopTokens };  // the small outputs

}  // namespace

Head::Head(std::vector<NetworkSpec> const& specs, std::vector<std::unique_ptr<Network>> const& networks, Device& device,
           NetworksInfo const& info, Buffer exits, Buffer embedding, std::size_t slots)
    : info_(info),
      networks_(networks),
      device_(device),
      head_(specs.size() - names::kAfterSegments),
      slots_(slots),
      found_tensors_{specs[head_ + 1][names::kBestTokens], specs[head_ + 1][names::kBestLogits],
                     specs[head_ + 2][names::kCandidateLogits], specs[head_ + 2][names::kCandidateTokens]},
      exits_(std::move(exits)),
      embedding_(std::move(embedding)),
      rows_(device, {static_cast<std::size_t>(info.max_logits) * sizeof(std::int64_t)}) {
  Tensor const& logits = specs[head_][names::kLogits];
  vocabulary_ = static_cast<std::size_t>(logits.shape.back());
  most_ = static_cast<std::size_t>(found_tensors_[kTopTokens].shape.back());
  logits_ = device.allocate(std::max(kAlignment, logits.size({info.max_logits})));
  logits_host_ = device.staging(logits_.size);
  std::vector<std::size_t> sizes;
  for (Tensor const& tensor : found_tensors_) sizes.push_back(tensor.size({info.max_logits}));
  found_ = std::make_unique<Block>(device, sizes);
}

std::size_t Head::count(std::size_t candidates) const {
  return candidates <= 1 || candidates < most_ ? candidates : 0;
}

void Head::run(std::vector<HeadRow>& rows) {
  auto const limit = static_cast<std::size_t>(info_.max_logits);
  while (rows.size() > limit) {
    std::vector<HeadRow> part(rows.begin(), rows.begin() + info_.max_logits);
    run_part(part);
    rows.erase(rows.begin(), rows.begin() + info_.max_logits);
  }
  if (!rows.empty()) run_part(rows);
}

void Head::run_part(std::vector<HeadRow>& rows) {
  Plan const run = plan(rows);
  set_rows(rows, run);
  device_.launch({static_cast<std::int64_t>(head_), run.tokens, run.fetched, run.fetches()}, [&] {
    upload_rows(run);
    queue(run);
  });
  device_.synchronize();
  take(rows, run);
}

Head::Plan Head::plan(std::vector<HeadRow>& rows) const {
  std::stable_partition(rows.begin(), rows.end(), [](HeadRow const& row) { return row.needed == 0; });
  Plan plan;
  plan.tokens = padded(static_cast<std::int64_t>(rows.size()), 0, info_.max_logits, info_.max_logits);
  for (HeadRow const& row : rows) {
    plan.whole += row.needed == 0;
    plan.best = plan.best || row.needed == 1;
    plan.top = plan.top || row.needed > 1;
  }
  plan.fetched = plan.whole == 0 ? 0 : padded(plan.whole, 0, plan.tokens, plan.tokens);
  return plan;
}

std::int64_t Head::index(HeadRow const& row) const {
  return static_cast<std::int64_t>(row.slot) * info_.state_rows + row.row;
}

void Head::set_rows(std::vector<HeadRow> const& rows, Plan const& plan) const {
  auto* const indices = rows_.host<std::int64_t>(0);
  std::fill_n(indices, plan.tokens, 0);
  for (std::size_t i = 0; i < rows.size(); ++i) indices[i] = index(rows[i]);
}

void Head::upload_rows(Plan const& plan) const {
  rows_.upload(0, static_cast<std::size_t>(plan.tokens) * sizeof(std::int64_t));
}

void Head::queue(Plan const& plan) const {
  auto const slots = static_cast<std::int64_t>(slots_);
  std::byte* const logits = logits_.address;
  std::vector<std::byte*> addresses = {exits_.address, rows_.address(0)};
  if (info_.embedding && info_.embedding->tied) addresses.push_back(embedding_.address);
  addresses.push_back(logits);
  networks_[head_]->run(addresses, {plan.tokens, slots});
  if (plan.best) {
    networks_[head_ + 1]->run({logits, found_->address(kBestToken), found_->address(kBestLogit)}, {plan.tokens, slots});
  }
  if (plan.top) {
    networks_[head_ + 2]->run({logits, found_->address(kTopLogits), found_->address(kTopTokens)}, {plan.tokens, slots});
  }
  std::size_t const size = static_cast<std::size_t>(plan.fetched) * vocabulary_ * sizeof(float);
  if (plan.fetched > 0) device_.download(logits_host_.address, logits, size);
  Found const last = plan.top ? kTopTokens : kBestLogit;
  if (plan.best || plan.top) found_->download(last, found_tensors_[last].size({plan.tokens}));
}

void Head::take(std::vector<HeadRow> const& rows, Plan const& plan) {
  float const* logits = &logits_host_.at<float>(0);
  auto const whole = static_cast<std::size_t>(plan.whole);
  for (std::size_t i = 0; i < whole; ++i, logits += vocabulary_) {
    if (rows[i].results == nullptr) continue;
    rows[i].results->logits.insert(rows[i].results->logits.end(), logits, logits + vocabulary_);
  }
  for (std::size_t i = whole; i < rows.size(); ++i) {
    if (rows[i].results != nullptr) rows[i].results->candidates.push_back(candidates(i, rows[i].needed));
  }
}

Candidates Head::candidates(std::size_t index, std::size_t needed) {
  if (needed == 1) return {{found_->host<std::int32_t>(kBestToken)[index]}, {found_->host<float>(kBestLogit)[index]}};
  float const* const values = found_->host<float>(kTopLogits) + index * most_;
  auto const* const ids = found_->host<std::int64_t>(kTopTokens) + index * most_;
  Candidates found;
  if (values[needed - 1] > values[most_ - 1]) {
    auto const kept = static_cast<std::size_t>(
        std::count_if(values, values + most_, [&](float value) { return value >= values[needed - 1]; }));
    std::vector<std::size_t> order(kept);  // they are in front
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return ids[a] < ids[b]; });
    for (std::size_t const at : order) {
      found.tokens.push_back(ids[at]);
      found.logits.push_back(values[at]);
    }
    return found;
  }
  std::size_t const size = vocabulary_ * sizeof(float);
  device_.download(logits_host_.address, logits_.address + index * size, size);
  device_.synchronize();
  found.logits.assign(&logits_host_.at<float>(0), &logits_host_.at<float>(0) + vocabulary_);
  found.tokens.resize(vocabulary_);
  std::iota(found.tokens.begin(), found.tokens.end(), 0);
  return found;
}

}  // namespace tide
