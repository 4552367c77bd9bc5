#include "segmented/memory.h"

#include <numeric>

#include "names.h"
#include "segmented/device_step.h"
#include "segmented/numbers.h"
#include "tide/state.h"

namespace tide {
namespace {

std::size_t bytes_of(std::int64_t integers) { return static_cast<std::size_t>(integers) * sizeof(std::int64_t); }

}  // namespace

SegmentBuffers::SegmentBuffers(std::vector<NetworkSpec> const& specs, DeviceNetworks device_networks,
                               NetworksInfo const& info, std::size_t slots)
    : specs_(specs),
      info_(info),
      device_(std::move(device_networks.device)),
      networks_(std::move(device_networks.networks)),
      written_(slots),
      embedding_(std::move(device_networks.embedding)),
      exit_states_(specs[specs.size() - names::kAfterSegments][names::kExitStates]),
      last_run_(slots) {
  std::size_t const num_segments = specs.size() - names::kAfterSegments;
  auto const count = static_cast<std::int64_t>(slots);
  exits_ = device_->allocate(std::max(kAlignment, specs[num_segments][names::kExitStates].size({1, count})));
  head_ = std::make_unique<Head>(specs, networks_, *device_, info, exits_, embedding_, slots);
  indices_ = std::make_unique<Block>(*device_, std::vector<std::size_t>{bytes_of(info.capacity)});
  std::iota(indices_->host<std::int64_t>(0), indices_->host<std::int64_t>(0) + info.capacity, 0);
  for (std::size_t k = 0; k < num_segments; ++k) add_segment(k);
  indices_->upload(0, bytes_of(info.capacity));  // all memory is there
}

SegmentBuffers::~SegmentBuffers() {
  try {
    device_->synchronize();  // queued work uses the memory that is freed now
  } catch (std::exception const&) {  // it has failed, and nothing is queued
  }
}

DeviceStep& SegmentBuffers::device_step() {
  if (device_step_ == nullptr) device_step_ = std::make_unique<DeviceStep>(*this);
  return *device_step_;
}

std::byte* SegmentBuffers::allocate(std::size_t size) {
  owned_.push_back(device_->allocate(std::max(size, kAlignment)));
  return owned_.back().address;
}

// Finds or allocates the memory that segment k reads and writes, of all slots.
void SegmentBuffers::add_segment(std::size_t k) {
  NetworkSpec const& spec = specs_[k];
  auto const slots = static_cast<std::int64_t>(written_.size());
  Segment segment{&spec, std::vector<Place>(spec.tensors.size()), {}};
  Place none;  // of a tensor that the segment does not have
  auto const place = [&](char const* tensor) -> Place& {
    std::size_t const index = spec.index(tensor);
    return index < spec.tensors.size() ? segment.places[index] : none;
  };
  place(names::kPastLengths).input = kLengths;
  place(names::kLastTokens).input = kLast;
  place(names::kPendingLengths).input = kPending;
  place(names::kThresholds).input = kThreshold;
  place(names::kInputIds).input = kIds;
  place(names::kRouterScore).verdict = kScores;
  place(names::kExitFlag).verdict = kFlags;
  for (char const* indices : {names::kTokenIndices, names::kKeyIndices}) place(indices).address = indices_->address(0);
  place(names::kExitStates).address = exits_.address;
  place(names::kEmbedding).address = embedding_.address;
  if (k > 0) {
    NetworkSpec const& before = *segments_.back().spec;
    place(names::kPendingStates).address = segments_.back().places[before.index(names::kNextPendingStates)].address;
  }
  for (std::size_t output = 0; output < spec.tensors.size(); ++output) {
    std::size_t const input = spec.alias(output);
    if (input == output) continue;  // not updated in place
    Place& updated = segment.places[input];
    if (updated.address == nullptr) updated.address = allocate(spec.tensors[input].size({1, slots}));
    segment.places[output].address = updated.address;
  }
  for (std::size_t input = 0; input < spec.tensors.size(); ++input) {
    if (!spec.is_kv_input(input) || segment.places[input].address != nullptr) continue;
    for (Segment const& earlier : segments_) {  // whose K/V buffer it reads
      std::size_t const buffer = earlier.spec->index(spec.tensors[input].name);
      if (buffer < earlier.places.size()) segment.places[input] = earlier.places[buffer];
    }
  }
  for (std::size_t i = 0; i < spec.tensors.size(); ++i) {
    if (spec.tensors[i].shape[0] == kSequences) segment.places[i].stride = spec.tensors[i].size();
  }
  segments_.push_back(std::move(segment));
}

void SegmentBuffers::clear(std::size_t slot) {
  auto const written = static_cast<std::size_t>(written_[slot]);
  if (written == 0) return;
  for (Segment const& segment : segments_) {
    for (std::size_t output = 0; output < segment.spec->tensors.size(); ++output) {
      std::size_t const input = segment.spec->alias(output);
      if (input == output) continue;
      Tensor const& tensor = segment.spec->tensors[input];
      std::byte* const start = segment.places[input].address + slot * segment.places[input].stride;
      if (segment.spec->is_kv_input(input)) {  // [batch, heads, capacity, head_dim]
        auto const heads = static_cast<std::size_t>(tensor.shape[1]), capacity = static_cast<std::size_t>(tensor.shape[2]);
        std::size_t const stride = tensor.size() / heads;
        device_->clear(start, stride / capacity * written, heads, stride);
      } else if (tensor.name == names::kNextPendingStates) {  // of which padding is read
        auto const rows = static_cast<std::size_t>(info_.state_rows);
        device_->clear(start, tensor.size() / rows * std::min(written, rows), 1, 0);
      }
    }
  }
  written_[slot] = 0;
}

void SegmentBuffers::run(std::size_t k, std::vector<RunRequest> const& runs, std::vector<std::int64_t> const& lengths,
                         std::vector<std::int64_t> const& following, bool verdict) {
  std::vector<RunCount> counts;
  for (RunRequest const& one : runs) counts.push_back({one.slot, one.count});
  std::size_t index = 0;
  for (Run const& run : runs_over(counts, lengths, info_)) {
    RunBuffers& buffers = run_buffers(k, index);
    auto* const past = buffers.inputs.host<std::int64_t>(kLengths);
    auto* const last = buffers.inputs.host<std::int64_t>(kLast);
    auto* const pending = buffers.inputs.host<std::int64_t>(kPending);
    auto* const thresholds = buffers.inputs.host<float>(kThreshold);
    auto* const ids = buffers.inputs.host<std::int64_t>(kIds);
    auto const tokens = static_cast<std::size_t>(run.tokens);
    for (std::size_t slot = run.start(); slot < run.stop(); ++slot) {
      note_written(slot, lengths[slot] + run.tokens);
      std::size_t const number = slot - run.start();
      past[number] = lengths[slot];
      last[number] = 0;
      pending[number] = lengths[slot] - following[slot];
      thresholds[number] = kNever;
    }
    if (k == 0) std::fill_n(ids, run.slots() * tokens, 0);
    auto one = runs.begin();
    for (std::size_t const slot : run.active) {
      while (one->slot != slot) ++one;
      std::size_t const number = slot - run.start();
      last[number] = one->count - 1;
      thresholds[number] = one->threshold;
      if (k == 0) std::copy_n(one->ids, one->count, ids + number * tokens);
      last_run_[slot] = {&buffers, number};
    }
    launch(k, index++, run, buffers, verdict);
  }
}

// The buffers of a run of segment k, ready to be written to.
SegmentBuffers::RunBuffers& SegmentBuffers::run_buffers(std::size_t k, std::size_t index) {
  std::vector<std::unique_ptr<RunBuffers>>& existing = segments_[k].runs;
  if (index == existing.size()) {
    auto const slots = static_cast<std::int64_t>(written_.size());
    std::size_t const of_slots = bytes_of(slots), ids = bytes_of(std::max(info_.max_tokens, slots * info_.max_slot_tokens));
    existing.push_back(std::make_unique<RunBuffers>(RunBuffers{
        Block(*device_, {of_slots, of_slots, of_slots, of_slots, k == 0 ? ids : 0}), Block(*device_, {of_slots, of_slots})}));
  }
  if (existing[index]->queued) wait();
  return *existing[index];
}

void SegmentBuffers::launch(std::size_t k, std::size_t index, Run const& run, RunBuffers& buffers, bool verdict) {
  std::size_t const slots = run.slots();
  auto const batch_size = static_cast<std::int64_t>(slots);
  SmallAddresses small{};
  for (std::size_t part = 0; part < kNoInput; ++part) small.inputs[part] = buffers.inputs.address(part);
  for (std::size_t part = 0; part < kNoVerdict; ++part) small.verdict[part] = buffers.verdict.address(part);
  buffers.queued = true;
  bool const copied = verdict && k + 1 < segments_.size();
  WorkKey const key = {static_cast<std::int64_t>(k), static_cast<std::int64_t>(index),
                       static_cast<std::int64_t>(run.start()), batch_size, run.tokens, run.keys, copied};
  auto const work = [&] {
    if (k == 0) buffers.inputs.upload(kIds, bytes_of(batch_size * run.tokens));
    if (k > 0) buffers.inputs.upload(kThreshold, slots * sizeof(float));
    run_network(k, run.start(), small, {run.tokens, batch_size, run.keys});
    if (copied) buffers.verdict.download(kFlags, slots * sizeof(std::int32_t));
  };
  if (run.tokens > DeviceStep::kMaxTokens || !records_runs_) return work();
  device_->launch(key, work);
}

void SegmentBuffers::run_network(std::size_t k, std::size_t start, SmallAddresses const& small, RunSize const& size) const {
  std::vector<std::byte*> addresses;
  for (Place const& place : segments_[k].places) {
    std::byte* const address = place.input != kNoInput       ? small.inputs[place.input]
                               : place.verdict != kNoVerdict ? small.verdict[place.verdict]
                                                             : place.address + start * place.stride;
    addresses.push_back(address);
  }
  networks_[k]->run(addresses, size);
}

bool SegmentBuffers::exits(std::size_t slot) const {
  auto const [buffers, index] = last_run_[slot];
  return buffers->verdict.host<std::int32_t>(kFlags)[index] != 0;
}

float SegmentBuffers::score(std::size_t slot) const {
  auto const [buffers, index] = last_run_[slot];
  return buffers->verdict.host<float>(kScores)[index];
}

void SegmentBuffers::logits(std::vector<HeadRow>& rows) {
  head_->run(rows);
  nothing_queued();
}

void SegmentBuffers::queue_exit_states(std::vector<ExitStateRows> rows) {
  std::size_t const slot = exit_states_.size(), row = slot / static_cast<std::size_t>(info_.state_rows);
  std::size_t size = 0;
  for (ExitStateRows const& one : rows) size += static_cast<std::size_t>(one.count) * row;
  if (size > exit_states_host_.size) exit_states_host_ = device_->staging(size);
  std::byte* target = exit_states_host_.address;
  for (ExitStateRows const& one : rows) {
    std::size_t const bytes = static_cast<std::size_t>(one.count) * row;
    device_->download(target, exits_.address + one.slot * slot + static_cast<std::size_t>(one.first) * row, bytes);
    target += bytes;
  }
  queued_ = std::move(rows);
}

void SegmentBuffers::take_exit_states() {
  auto const width = static_cast<std::size_t>(exit_states_.shape.back());
  std::size_t const item = exit_states_.size() / width / static_cast<std::size_t>(info_.state_rows);
  std::byte const* source = exit_states_host_.address;
  for (ExitStateRows const& one : queued_) {
    std::size_t const count = static_cast<std::size_t>(one.count) * width, before = one.results->size();
    one.results->resize(before + count);
    widen(exit_states_.dtype, source, count, one.results->data() + before);
    source += count * item;
  }
  queued_.clear();
}

void SegmentBuffers::wait() {
  device_->synchronize();
  nothing_queued();
}

void SegmentBuffers::nothing_queued() {
  for (Segment& segment : segments_) {
    for (auto const& run : segment.runs) run->queued = false;
  }
}

}  // namespace tide
