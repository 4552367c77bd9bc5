#include "segmented/sequence_memory.h"

#include <algorithm>
#include <cstring>

#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

// A segment's small inputs, and its verdict, each at an aligned place of one block.
constexpr std::size_t kLengthAt = 0, kLastAt = kAlignment, kThresholdAt = 2 * kAlignment;
constexpr std::size_t kScoreAt = 0, kFlagAt = kAlignment;

}  // namespace

Lane::Lane(std::vector<NetworkSpec> const& specs, LaneParts parts, NetworksInfo const& info, std::int64_t waiting_rows)
    : specs_(specs), info_(info), device_(std::move(parts.device)), networks_(std::move(parts.networks)) {
  NetworkSpec const& head = specs.back();
  std::size_t const count = specs.size() - 1;
  for (std::size_t k = 0; k < count; ++k) row_bytes_.push_back(k == 0 ? 0 : specs[k][names::kHiddenStates].size());
  row_bytes_.push_back(head[names::kExitStates].size());
  std::size_t const widest = *std::max_element(row_bytes_.begin(), row_bytes_.end());
  auto const run = static_cast<std::size_t>(info.max_tokens), asked = static_cast<std::size_t>(info.max_logits);
  scratch_ = allocate(run * widest);
  chunk_ = allocate(std::max(run, asked) * widest);
  ids_ = allocate(run * sizeof(std::int64_t));
  ids_host_ = device_->staging(run * sizeof(std::int64_t));
  for (std::size_t k = 0; k < count; ++k) segments_.push_back(made(k));
  for (std::size_t const row : row_bytes_) waiting_.push_back(allocate(static_cast<std::size_t>(waiting_rows) * row));
  vocabulary_ = head[names::kLogits].size() / sizeof(float);
  logits_ = allocate(head[names::kLogits].size(info.max_logits));
  logits_host_ = device_->staging(logits_.size);
}

Lane::~Lane() {
  try {
    device_->synchronize();  // what is queued uses the memory that goes now
  } catch (std::exception const&) {  // it failed, and is done with
  }
}

Lane::Segment Lane::made(std::size_t k) {
  NetworkSpec const& spec = specs_[k];
  bool const goes_on = k + 2 < specs_.size();
  Segment segment{};
  segment.spec = &spec;
  segment.entry = spec.place(k == 0 ? names::kInputIds : names::kHiddenStates);
  segment.result = spec.place(goes_on ? names::kNewHiddenStates : names::kFinalStates);
  segment.control = allocate(3 * kAlignment);
  segment.control_host = device_->staging(segment.control.size);
  segment.verdict = allocate(2 * kAlignment);
  segment.verdict_host = device_->staging(segment.verdict.size);
  Buffer const exit_states = allocate(spec[names::kExitStates].size());
  segment.exit_states = exit_states.address;
  segment.owned.push_back(exit_states);
  segment.addresses.resize(spec.tensors.size());
  auto const put = [&](char const* tensor, std::byte* address) { segment.addresses.at(spec.place(tensor)) = address; };
  put(names::kPastLengths, segment.control.address + kLengthAt);
  put(names::kLastTokens, segment.control.address + kLastAt);
  put(names::kExitStates, segment.exit_states);
  if (goes_on) {
    put(names::kExitThreshold, segment.control.address + kThresholdAt);
    put(names::kRouterScore, segment.verdict.address + kScoreAt);
    put(names::kExitFlag, segment.verdict.address + kFlagAt);
  }
  for (std::size_t output = 0; output < spec.tensors.size(); ++output) {
    std::size_t const input = spec.alias(output);
    if (input == output) continue;  // no K/V buffer
    segment.owned.push_back(allocate(spec.tensors[input].size()));
    segment.addresses[input] = segment.addresses[output] = segment.owned.back().address;
  }
  return segment;
}

void Lane::clear() {
  for (Segment& segment : segments_) {
    for (std::size_t output = 0; output < segment.spec->tensors.size(); ++output) {
      std::size_t const input = segment.spec->alias(output);
      if (input == output) continue;  // no K/V buffer
      Tensor const& kv = segment.spec->tensors[input];  // [1, heads, capacity, head_dim]
      auto const heads = static_cast<std::size_t>(kv.shape[1]), capacity = static_cast<std::size_t>(kv.shape[2]);
      std::size_t const stride = kv.size() / heads, used = stride / capacity * static_cast<std::size_t>(segment.written);
      device_->clear(segment.addresses[input], used, heads, stride);
    }
    segment.written = 0;
  }
  for (Buffer const& waiting : waiting_) device_->clear(waiting.address, waiting.size, 1, 0);  // of which padding is read
}

void Lane::set_threshold(std::size_t k, float threshold) {
  settle(k);
  segments_[k].control_host.at<float>(kThresholdAt) = threshold;
}

void Lane::run(std::size_t k, std::int64_t const* ids, std::int64_t count, std::int64_t length, std::int64_t target,
               std::int64_t keep) {
  std::int64_t const most = info_.max_tokens;
  if (k + 1 == segments_.size()) {  // its rows are those from the run on that the first kept token is in
    std::int64_t const start = (count - keep) / most * most;
    kept_ = keep;
    kept_from_ = count - keep - start;
    target = -start;
  }
  for (std::int64_t first = 0; first < count; first += most) {
    std::int64_t const chunk = std::min(count - first, most);
    std::int64_t const tokens = padded(chunk, length + first, most, info_.capacity);
    segments_[k].written = std::max(segments_[k].written, length + first + tokens);
    settle(k);
    Buffer const& control = segments_[k].control_host;
    control.at<std::int64_t>(kLengthAt) = length + first;
    control.at<std::int64_t>(kLastAt) = chunk - 1;
    if (k == 0) {
      auto* const staged = &ids_host_.at<std::int64_t>(0);
      std::fill(std::copy_n(ids + first, chunk, staged), staged + tokens, 0);
    }
    run_chunk(k, k == 0 ? ids_.address : rows_at(k, first, tokens), chunk, tokens,
              std::max<std::int64_t>(0, target + first));
  }
}

// Where what waits before segment k lies from row `first` on, aligned and with room for `tokens`.
std::byte* Lane::rows_at(std::size_t k, std::int64_t first, std::int64_t tokens) {
  reserve(k, first + tokens);
  std::byte* const start = waiting_[k].address + static_cast<std::size_t>(first) * row_bytes_[k];
  if (first == 0) return start;
  device_->copy(chunk_.address, start, static_cast<std::size_t>(tokens) * row_bytes_[k]);
  return chunk_.address;
}

void Lane::run_chunk(std::size_t k, std::byte* source, std::int64_t chunk, std::int64_t tokens, std::int64_t target) {
  Segment& segment = segments_[k];
  bool const goes_on = k + 1 < segments_.size();
  std::size_t const row = row_bytes_[k + 1];
  reserve(k + 1, target + tokens);
  std::byte* const destination = waiting_[k + 1].address + static_cast<std::size_t>(target) * row;
  // Straight to its place where that is always the same; else by way of the scratch rows.
  std::byte* const result = target == 0 ? destination : scratch_.address;
  segment.addresses[segment.entry] = source;
  segment.addresses[segment.result] = result;
  device_->launch({k, tokens, source, result}, [&] {
    if (k == 0) {
      device_->upload(ids_.address, ids_host_.address, static_cast<std::size_t>(tokens) * sizeof(std::int64_t));
    }
    device_->upload(segment.control.address, segment.control_host.address, segment.control.size);
    networks_[k]->run(segment.addresses, tokens);
    if (goes_on) device_->download(segment.verdict_host.address, segment.verdict.address, segment.verdict.size);
  });
  queued_.insert(k);
  if (target != 0) device_->copy(destination, scratch_.address, static_cast<std::size_t>(chunk) * row);
}

Verdict Lane::verdict(std::size_t k) {
  settle(k);
  Buffer const& host = segments_[k].verdict_host;
  return {host.at<float>(kScoreAt), host.at<std::uint8_t>(kFlagAt) != 0};
}

float const* Lane::logits(std::size_t k) { return head(segments_[k].exit_states, 1); }

float const* Lane::rows() {
  rows_.resize(static_cast<std::size_t>(kept_) * vocabulary_);
  for (std::int64_t first = 0; first < kept_; first += info_.max_logits) {
    std::int64_t const count = std::min(kept_ - first, info_.max_logits);
    std::int64_t const tokens = padded(count, 0, info_.max_logits, info_.max_logits);
    float const* const made = head(rows_at(segments_.size(), kept_from_ + first, tokens), tokens);
    std::copy_n(made, static_cast<std::size_t>(count) * vocabulary_,
                rows_.data() + static_cast<std::size_t>(first) * vocabulary_);
  }
  return rows_.data();
}

// Logits [tokens, V] of the states at an address.
float const* Lane::head(std::byte* states, std::int64_t tokens) {
  std::size_t const size = static_cast<std::size_t>(tokens) * vocabulary_ * sizeof(float);
  device_->launch({segments_.size(), tokens, states, logits_.address}, [&] {
    networks_.back()->run({states, logits_.address}, tokens);
    device_->download(logits_host_.address, logits_.address, size);
  });
  device_->synchronize();
  queued_.clear();
  return &logits_host_.at<float>(0);
}

// Waits for segment k's last run, if it may still be on its way.
void Lane::settle(std::size_t k) {
  if (queued_.count(k) == 0) return;
  device_->synchronize();
  queued_.clear();
}

// Room for `rows` hidden states before segment k; those that wait there move along. At least doubles, so that few
// copies are made.
void Lane::reserve(std::size_t k, std::int64_t rows) {
  auto const needed = static_cast<std::size_t>(rows) * row_bytes_[k];
  std::size_t const held = waiting_[k].size / row_bytes_[k] * row_bytes_[k];
  if (needed <= held) return;
  Buffer const larger = device_->allocate(std::max(needed, 2 * held));
  device_->copy(larger.address, waiting_[k].address, held);
  device_->synchronize();  // the old rows are freed now
  queued_.clear();
  waiting_[k] = larger;
}

}  // namespace tide
