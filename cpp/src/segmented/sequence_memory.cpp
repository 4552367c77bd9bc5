#include "segmented/sequence_memory.h"

#include <algorithm>
#include <numeric>

#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

// Byte offsets of a segment's small inputs in one block, and of its router's outputs in another.
constexpr std::size_t kLengthAt = 0, kLastAt = kAlignment, kPendingAt = 2 * kAlignment, kThresholdAt = 3 * kAlignment;
constexpr std::size_t kIdsAt = 4 * kAlignment;
constexpr std::size_t kScoreAt = 0, kFlagAt = kAlignment;

std::size_t bytes_of(std::int64_t integers) { return static_cast<std::size_t>(integers) * sizeof(std::int64_t); }

}  // namespace

SequenceBuffers::SequenceBuffers(std::vector<NetworkSpec> const& specs, DeviceNetworks device_networks,
                                 NetworksInfo const& info)
    : specs_(specs),
      info_(info),
      device_(std::move(device_networks.device)),
      networks_(std::move(device_networks.networks)) {
  std::size_t const num_segments = specs.size() - names::kAfterSegments;
  exits_ = allocate(specs[num_segments][names::kExitStates].size());
  indices_ = allocate(bytes_of(info.max_tokens));
  indices_host_ = device_->staging(indices_.size);
  std::iota(&indices_host_.at<std::int64_t>(0), &indices_host_.at<std::int64_t>(0) + info.max_tokens, 0);
  head_ = std::make_unique<Head>(specs, networks_, *device_, info, exits_);
  for (std::size_t k = 0; k < num_segments; ++k) add_segment(k);
  device_->upload(indices_.address, indices_host_.address, bytes_of(info.max_tokens));  // all memory is there
}

SequenceBuffers::~SequenceBuffers() {
  try {
    device_->synchronize();  // queued work uses the memory that is freed now
  } catch (std::exception const&) {  // it has failed, and nothing is queued
  }
}

void SequenceBuffers::add_segment(std::size_t k) {
  NetworkSpec const& spec = specs_[k];
  bool const has_router = k + 1 + names::kAfterSegments < specs_.size();
  Segment segment{};
  segment.spec = &spec;
  segment.control = allocate(kIdsAt + (k == 0 ? bytes_of(info_.max_tokens) : 0));
  segment.control_host = device_->staging(segment.control.size);
  segment.decision = allocate(2 * kAlignment);
  segment.decision_host = device_->staging(segment.decision.size);
  segment.addresses.resize(spec.tensors.size());
  auto const set = [&](char const* tensor, std::byte* address) { segment.addresses.at(spec.index(tensor)) = address; };
  if (k == 0) set(names::kInputIds, segment.control.address + kIdsAt);
  if (k > 0) set(names::kPendingStates, pending_.back().address);
  set(names::kTokenIndices, indices_.address);
  set(names::kPastLengths, segment.control.address + kLengthAt);
  set(names::kExitStates, exits_.address);
  if (has_router) {
    pending_.push_back(allocate(spec[names::kNextPendingStates].size()));
    set(names::kLastTokens, segment.control.address + kLastAt);
    set(names::kPendingLengths, segment.control.address + kPendingAt);
    set(names::kThresholds, segment.control.address + kThresholdAt);
    set(names::kNextPendingStates, pending_.back().address);
    set(names::kRouterScore, segment.decision.address + kScoreAt);
    set(names::kExitFlag, segment.decision.address + kFlagAt);
  }
  for (std::size_t output = 0; output < spec.tensors.size(); ++output) {
    std::size_t const input = spec.alias(output);
    if (input == output) continue;  // not updated in place
    if (segment.addresses[input] == nullptr) {
      owned_.push_back(allocate(spec.tensors[input].size()));
      segment.addresses[input] = owned_.back().address;
    }
    segment.addresses[output] = segment.addresses[input];
  }
  for (std::size_t input = 0; input < spec.tensors.size(); ++input) {
    if (!spec.is_kv_input(input) || segment.addresses[input] != nullptr) continue;
    for (Segment const& earlier : segments_) {  // whose K/V buffer it reads
      std::size_t const buffer = earlier.spec->index(spec.tensors[input].name);
      if (buffer < earlier.addresses.size()) segment.addresses[input] = earlier.addresses[buffer];
    }
  }
  segments_.push_back(std::move(segment));
}

void SequenceBuffers::clear() {
  for (Segment& segment : segments_) {
    for (std::size_t output = 0; output < segment.spec->tensors.size(); ++output) {
      std::size_t const input = segment.spec->alias(output);
      if (input == output || !segment.spec->is_kv_input(input)) continue;
      Tensor const& kv = segment.spec->tensors[input];  // [1, heads, capacity, head_dim]
      auto const heads = static_cast<std::size_t>(kv.shape[1]), capacity = static_cast<std::size_t>(kv.shape[2]);
      std::size_t const stride = kv.size() / heads;
      std::size_t const used = stride / capacity * static_cast<std::size_t>(segment.written);
      device_->clear(segment.addresses[input], used, heads, stride);
    }
    segment.written = 0;
  }
  for (Buffer const& states : pending_) device_->clear(states.address, states.size, 1, 0);  // read as padding
}

void SequenceBuffers::run(std::size_t k, std::int64_t const* ids, std::int64_t count, std::int64_t length,
                          std::int64_t pending, float threshold) {
  Segment& segment = segments_[k];
  std::int64_t const tokens = padded(count, length, info_.max_tokens, info_.capacity);
  segment.written = std::max(segment.written, length + tokens);
  if (segment.queued) synchronize();
  Buffer const& control = segment.control_host;
  control.at<std::int64_t>(kLengthAt) = length;
  control.at<std::int64_t>(kLastAt) = count - 1;
  control.at<std::int64_t>(kPendingAt) = pending;
  control.at<float>(kThresholdAt) = threshold;
  std::size_t uploaded = kIdsAt;
  if (k == 0) {
    auto* const staged = &control.at<std::int64_t>(kIdsAt);
    std::fill(std::copy_n(ids, count, staged), staged + tokens, 0);
    uploaded += bytes_of(tokens);
  }
  segment.queued = true;
  device_->launch({k, tokens}, [&] {
    device_->upload(segment.control.address, control.address, uploaded);
    networks_[k]->run(segment.addresses, tokens);
    if (k + 1 < segments_.size()) {
      device_->download(segment.decision_host.address, segment.decision.address, segment.decision.size);
    }
  });
}

Decision SequenceBuffers::decision(std::size_t k) {
  if (segments_[k].queued) synchronize();
  Buffer const& host = segments_[k].decision_host;
  return {host.at<float>(kScoreAt), host.at<std::int32_t>(kFlagAt) != 0};
}

void SequenceBuffers::append_logits(std::int64_t first_row, std::int64_t count, std::vector<float>& logits) {
  head_->append(first_row, count, logits);
  nothing_queued();
}

void SequenceBuffers::append_candidates(std::int64_t first_row, std::int64_t count, std::size_t needed,
                                        std::vector<Candidates>& found) {
  head_->append(first_row, count, needed, found);
  nothing_queued();
}

void SequenceBuffers::synchronize() {
  device_->synchronize();
  nothing_queued();
}

void SequenceBuffers::nothing_queued() {
  for (Segment& segment : segments_) segment.queued = false;
}

}  // namespace tide
