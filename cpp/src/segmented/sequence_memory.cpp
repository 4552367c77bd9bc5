#include "segmented/sequence_memory.h"

#include <algorithm>
#include <cstring>

#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

// Byte offsets of a segment's small inputs in one block, and of its router's outputs in another.
constexpr std::size_t kLengthAt = 0, kLastAt = kAlignment, kThresholdAt = 2 * kAlignment;
constexpr std::size_t kScoreAt = 0, kFlagAt = kAlignment;

// Rows of a pending buffer: the bundle's pending tokens and a new one, padded.
std::size_t pending_capacity(Manifest const& manifest) {
  std::int64_t const capacity = manifest.networks->capacity;
  return static_cast<std::size_t>(padded(std::min(manifest.max_pending, capacity - 1) + 1, 0, capacity, capacity));
}

}  // namespace

SequenceBuffers::SequenceBuffers(std::vector<NetworkSpec> const& specs, DeviceNetworks device_networks,
                                 Manifest const& manifest)
    : specs_(specs),
      info_(*manifest.networks),
      device_(std::move(device_networks.device)),
      networks_(std::move(device_networks.networks)) {
  NetworkSpec const& head = specs.back();
  std::size_t const count = specs.size() - 1;
  for (std::size_t k = 0; k < count; ++k) row_bytes_.push_back(k == 0 ? 0 : specs[k][names::kHiddenStates].size());
  row_bytes_.push_back(head[names::kExitStates].size());
  std::size_t const widest = *std::max_element(row_bytes_.begin(), row_bytes_.end());
  auto const run = static_cast<std::size_t>(info_.max_tokens), logits = static_cast<std::size_t>(info_.max_logits);
  scratch_ = allocate(run * widest);
  chunk_ = allocate(std::max(run, logits) * widest);
  ids_ = allocate(run * sizeof(std::int64_t));
  ids_host_ = device_->staging(run * sizeof(std::int64_t));
  for (std::size_t k = 0; k < count; ++k) segments_.push_back(make_segment(k));
  for (std::size_t const row : row_bytes_) pending_.push_back(allocate(pending_capacity(manifest) * row));
  vocabulary_ = head[names::kLogits].size() / sizeof(float);
  logits_ = allocate(head[names::kLogits].size(info_.max_logits));
  logits_host_ = device_->staging(logits_.size);
}

SequenceBuffers::~SequenceBuffers() {
  try {
    device_->synchronize();  // queued work uses the memory that is freed now
  } catch (std::exception const&) {  // it has failed, and nothing is queued
  }
}

SequenceBuffers::Segment SequenceBuffers::make_segment(std::size_t k) {
  NetworkSpec const& spec = specs_[k];
  bool const has_router = k + 2 < specs_.size();
  Segment segment{};
  segment.spec = &spec;
  segment.input = spec.index(k == 0 ? names::kInputIds : names::kHiddenStates);
  segment.output = spec.index(has_router ? names::kNewHiddenStates : names::kFinalStates);
  segment.control = allocate(3 * kAlignment);
  segment.control_host = device_->staging(segment.control.size);
  segment.decision = allocate(2 * kAlignment);
  segment.decision_host = device_->staging(segment.decision.size);
  Buffer const exit_states = allocate(spec[names::kExitStates].size());
  segment.exit_states = exit_states.address;
  segment.owned.push_back(exit_states);
  segment.addresses.resize(spec.tensors.size());
  auto const set = [&](char const* tensor, std::byte* address) { segment.addresses.at(spec.index(tensor)) = address; };
  set(names::kPastLengths, segment.control.address + kLengthAt);
  set(names::kLastTokens, segment.control.address + kLastAt);
  set(names::kExitStates, segment.exit_states);
  if (has_router) {
    set(names::kExitThreshold, segment.control.address + kThresholdAt);
    set(names::kRouterScore, segment.decision.address + kScoreAt);
    set(names::kExitFlag, segment.decision.address + kFlagAt);
  }
  for (std::size_t output = 0; output < spec.tensors.size(); ++output) {
    std::size_t const input = spec.alias(output);
    if (input == output) continue;  // not a K/V buffer
    segment.owned.push_back(allocate(spec.tensors[input].size()));
    segment.addresses[input] = segment.addresses[output] = segment.owned.back().address;
  }
  for (std::size_t input = 0; input < spec.tensors.size(); ++input) {
    if (!spec.is_kv_input(input) || segment.addresses[input] != nullptr) continue;
    for (Segment const& earlier : segments_) {  // whose K/V buffer it reads
      std::size_t const buffer = earlier.spec->index(spec.tensors[input].name);
      if (buffer < earlier.addresses.size()) segment.addresses[input] = earlier.addresses[buffer];
    }
  }
  return segment;
}

void SequenceBuffers::clear() {
  for (Segment& segment : segments_) {
    for (std::size_t output = 0; output < segment.spec->tensors.size(); ++output) {
      std::size_t const input = segment.spec->alias(output);
      if (input == output) continue;  // not a K/V buffer
      Tensor const& kv = segment.spec->tensors[input];  // [1, heads, capacity, head_dim]
      auto const heads = static_cast<std::size_t>(kv.shape[1]), capacity = static_cast<std::size_t>(kv.shape[2]);
      std::size_t const stride = kv.size() / heads;
      std::size_t const used = stride / capacity * static_cast<std::size_t>(segment.written);
      device_->clear(segment.addresses[input], used, heads, stride);
    }
    segment.written = 0;
  }
  for (Buffer const& rows : pending_) device_->clear(rows.address, rows.size, 1, 0);  // read as padding
}

void SequenceBuffers::set_threshold(std::size_t k, float threshold) {
  wait_for(k);
  segments_[k].control_host.at<float>(kThresholdAt) = threshold;
}

void SequenceBuffers::run(std::size_t k, std::int64_t const* ids, std::int64_t count, std::int64_t length,
                          std::int64_t target, std::int64_t keep) {
  std::int64_t const max_tokens = info_.max_tokens;
  if (k + 1 == segments_.size()) {  // keeps the rows from the chunk on that holds the first token of `position_logits`
    std::int64_t const start = (count - keep) / max_tokens * max_tokens;
    num_logits_ = keep;
    first_logits_row_ = count - keep - start;
    target = -start;
  }
  for (std::int64_t first = 0; first < count; first += max_tokens) {
    std::int64_t const chunk = std::min(count - first, max_tokens);
    std::int64_t const tokens = padded(chunk, length + first, max_tokens, info_.capacity);
    segments_[k].written = std::max(segments_[k].written, length + first + tokens);
    wait_for(k);
    Buffer const& control = segments_[k].control_host;
    control.at<std::int64_t>(kLengthAt) = length + first;
    control.at<std::int64_t>(kLastAt) = chunk - 1;
    if (k == 0) {
      auto* const staged = &ids_host_.at<std::int64_t>(0);
      std::fill(std::copy_n(ids + first, chunk, staged), staged + tokens, 0);
    }
    run_chunk(k, k == 0 ? ids_.address : pending_rows(k, first, tokens), chunk, tokens,
              std::max<std::int64_t>(0, target + first));
  }
}

// The pending rows before segment k from row `first` on, at an aligned address with room for `tokens`.
std::byte* SequenceBuffers::pending_rows(std::size_t k, std::int64_t first, std::int64_t tokens) {
  reserve(k, first + tokens);
  std::byte* const rows = pending_[k].address + static_cast<std::size_t>(first) * row_bytes_[k];
  if (first == 0) return rows;
  device_->copy(chunk_.address, rows, static_cast<std::size_t>(tokens) * row_bytes_[k]);
  return chunk_.address;
}

void SequenceBuffers::run_chunk(std::size_t k, std::byte* source, std::int64_t chunk, std::int64_t tokens,
                                std::int64_t target) {
  Segment& segment = segments_[k];
  bool const has_router = k + 1 < segments_.size();
  std::size_t const row = row_bytes_[k + 1];
  reserve(k + 1, target + tokens);
  std::byte* const destination = pending_[k + 1].address + static_cast<std::size_t>(target) * row;
  // Row 0 is always the same address; other rows are copied from the scratch rows, so that recordings can be replayed.
  std::byte* const result = target == 0 ? destination : scratch_.address;
  segment.addresses[segment.input] = source;
  segment.addresses[segment.output] = result;
  queued_.insert(k);
  device_->launch({k, tokens, source, result}, [&] {
    if (k == 0) {
      device_->upload(ids_.address, ids_host_.address, static_cast<std::size_t>(tokens) * sizeof(std::int64_t));
    }
    device_->upload(segment.control.address, segment.control_host.address, segment.control.size);
    networks_[k]->run(segment.addresses, tokens);
    if (has_router) device_->download(segment.decision_host.address, segment.decision.address, segment.decision.size);
  });
  if (target != 0) device_->copy(destination, scratch_.address, static_cast<std::size_t>(chunk) * row);
}

Decision SequenceBuffers::decision(std::size_t k) {
  wait_for(k);
  Buffer const& host = segments_[k].decision_host;
  return {host.at<float>(kScoreAt), host.at<std::uint8_t>(kFlagAt) != 0};
}

float const* SequenceBuffers::logits(std::size_t k) { return head(segments_[k].exit_states, 1); }

float const* SequenceBuffers::position_logits() {
  rows_.resize(static_cast<std::size_t>(num_logits_) * vocabulary_);
  for (std::int64_t first = 0; first < num_logits_; first += info_.max_logits) {
    std::int64_t const count = std::min(num_logits_ - first, info_.max_logits);
    std::int64_t const tokens = padded(count, 0, info_.max_logits, info_.max_logits);
    float const* const logits = head(pending_rows(segments_.size(), first_logits_row_ + first, tokens), tokens);
    std::copy_n(logits, static_cast<std::size_t>(count) * vocabulary_,
                rows_.data() + static_cast<std::size_t>(first) * vocabulary_);
  }
  return rows_.data();
}

// Logits [tokens, V] of the states at this address.
float const* SequenceBuffers::head(std::byte* states, std::int64_t tokens) {
  std::size_t const size = static_cast<std::size_t>(tokens) * vocabulary_ * sizeof(float);
  device_->launch({segments_.size(), tokens, states, logits_.address}, [&] {
    networks_.back()->run({states, logits_.address}, tokens);
    device_->download(logits_host_.address, logits_.address, size);
  });
  device_->synchronize();
  queued_.clear();
  return &logits_host_.at<float>(0);
}

// Waits for segment k's last run, if it may still be queued.
void SequenceBuffers::wait_for(std::size_t k) {
  if (queued_.count(k) == 0) return;
  device_->synchronize();
  queued_.clear();
}

// Grows the pending buffer before segment k to `rows` rows. At least doubles it, so that few copies are made.
void SequenceBuffers::reserve(std::size_t k, std::int64_t rows) {
  auto const needed = static_cast<std::size_t>(rows) * row_bytes_[k];
  std::size_t const size = pending_[k].size / row_bytes_[k] * row_bytes_[k];
  if (needed <= size) return;
  Buffer const larger = device_->allocate(std::max(needed, 2 * size));
  device_->copy(larger.address, pending_[k].address, size);
  device_->synchronize();  // the old buffer is freed now
  queued_.clear();
  pending_[k] = larger;
}

}  // namespace tide
