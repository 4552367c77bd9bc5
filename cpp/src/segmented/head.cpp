#include "segmented/head.h"

#include <algorithm>
#include <numeric>

#include "names.h"

namespace tide {

Head::Head(std::vector<NetworkSpec> const& specs, std::vector<std::unique_ptr<Network>> const& networks, Device& device,
           NetworksInfo const& info, Buffer exits)
    : info_(info),
      networks_(networks),
      device_(device),
      head_(specs.size() - names::kAfterSegments),
      exits_(std::move(exits)) {
  Tensor const& logits = specs[head_][names::kLogits];
  Tensor const& values = specs[head_ + 2][names::kCandidateLogits];
  vocabulary_ = static_cast<std::size_t>(logits.shape.back());
  most_ = static_cast<std::size_t>(values.shape.back());
  rows_ = device.allocate(std::max(kAlignment, static_cast<std::size_t>(info.max_logits) * sizeof(std::int64_t)));
  rows_host_ = device.staging(rows_.size);
  logits_ = device.allocate(std::max(kAlignment, logits.size(info.max_logits)));
  logits_host_ = device.staging(logits_.size);
  std::size_t const tokens = specs[head_ + 2][names::kCandidateTokens].size(info.max_logits);
  values_at_ = (tokens + kAlignment - 1) / kAlignment * kAlignment;
  found_ = device.allocate(values_at_ + std::max(kAlignment, values.size(info.max_logits)));
  found_host_ = device.staging(found_.size);
}

std::size_t Head::count(std::size_t candidates) const {
  return candidates <= 1 || candidates < most_ ? candidates : 0;
}

void Head::append(std::int64_t first_row, std::int64_t count, std::vector<float>& logits) {
  for (std::int64_t first = 0; first < count; first += info_.max_logits) {
    std::int64_t const rows = std::min(count - first, info_.max_logits);
    run(first_row + first, rows, 0);
    float const* const found = &logits_host_.at<float>(0);
    logits.insert(logits.end(), found, found + static_cast<std::size_t>(rows) * vocabulary_);
  }
}

void Head::append(std::int64_t first_row, std::int64_t count, std::size_t needed, std::vector<Candidates>& found) {
  for (std::int64_t first = 0; first < count; first += info_.max_logits) {
    std::int64_t const rows = std::min(count - first, info_.max_logits);
    run(first_row + first, rows, needed == 1 ? 1 : 2);
    for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row) found.push_back(candidates(row, needed));
  }
}

void Head::run(std::int64_t first_row, std::int64_t rows, std::size_t finder) {
  std::int64_t const tokens = padded(rows, 0, info_.max_logits, info_.max_logits);
  auto const count = static_cast<std::size_t>(tokens);
  auto* const staged = &rows_host_.at<std::int64_t>(0);
  std::fill_n(staged, tokens, 0);
  std::iota(staged, staged + rows, first_row);
  std::byte *const ids = found_.address, *const values = found_.address + values_at_;
  device_.launch({head_ + finder, tokens}, [&] {
    device_.upload(rows_.address, rows_host_.address, count * sizeof(std::int64_t));
    networks_[head_]->run({exits_.address, rows_.address, logits_.address}, tokens);
    if (finder == 0) device_.download(logits_host_.address, logits_.address, count * vocabulary_ * sizeof(float));
    if (finder == 1) {
      networks_[head_ + 1]->run({logits_.address, ids, values}, tokens);
      device_.download(found_host_.address, ids, count * sizeof(std::int32_t));
      device_.download(found_host_.address + values_at_, values, count * sizeof(float));
    }
    if (finder == 2) {
      networks_[head_ + 2]->run({logits_.address, values, ids}, tokens);
      device_.download(found_host_.address, ids, values_at_ + count * most_ * sizeof(float));
    }
  });
  device_.synchronize();
}

Candidates Head::candidates(std::size_t row, std::size_t needed) {
  if (needed == 1) {
    return {{found_host_.at<std::int32_t>(row * sizeof(std::int32_t))},
            {found_host_.at<float>(values_at_ + row * sizeof(float))}};
  }
  float const* const values = &found_host_.at<float>(values_at_ + row * most_ * sizeof(float));
  auto const* const ids = &found_host_.at<std::int64_t>(row * most_ * sizeof(std::int64_t));
  Candidates found;
  if (values[needed - 1] > values[most_ - 1]) {
    auto const kept = static_cast<std::size_t>(
        std::count_if(values, values + most_, [&](float value) { return value >= values[needed - 1]; }));
    std::vector<std::size_t> order(kept);  // they are in front
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return ids[a] < ids[b]; });
    for (std::size_t const index : order) {
      found.tokens.push_back(ids[index]);
      found.logits.push_back(values[index]);
    }
    return found;
  }
  std::size_t const size = vocabulary_ * sizeof(float);
  device_.download(logits_host_.address, logits_.address + row * size, size);
  device_.synchronize();
  found.logits.assign(&logits_host_.at<float>(0), &logits_host_.at<float>(0) + vocabulary_);
  found.tokens.resize(vocabulary_);
  std::iota(found.tokens.begin(), found.tokens.end(), 0);
  return found;
}

}  // namespace tide
