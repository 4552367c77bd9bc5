#include "segmented/device_step.h"

#include <algorithm>
#include <utility>

#include "names.h"

namespace tide {
namespace {

constexpr std::size_t kMaxSlots = 1024;  // threads of a block

std::size_t pitch_of(std::size_t slots) {
  constexpr std::size_t kRow = kAlignment / sizeof(float);
  return (slots + kRow - 1) / kRow * kRow;
}

std::int64_t power_of_two(std::int64_t count) {
  std::int64_t rounded = 1;
  while (rounded < count) rounded *= 2;
  return rounded;
}

// Whether the device must decide over how many tokens of a slot the segments run, or whether.
bool is_open(DeviceRequest const& one, std::vector<std::vector<std::int64_t>> const& lengths) {
  auto const pending = [&](auto const& of_segment) { return of_segment[one.slot] != lengths[0][one.slot]; };
  return std::any_of(one.thresholds.begin(), one.thresholds.end(), [](float threshold) { return threshold < kSure; }) ||
         std::any_of(lengths.begin(), lengths.end(), pending);
}

}  // namespace

DeviceStep::DeviceStep(SegmentBuffers& buffers)
    : buffers_(buffers),
      device_(buffers.device()),
      segments_(buffers.segments()),
      pitch_(pitch_of(buffers.slots())),
      inputs_(device_, [&] {
        NetworksInfo const& info = buffers.info();
        auto const slots = static_cast<std::int64_t>(buffers.slots());
        std::size_t const all = segments_ * pitch_, wide = all * sizeof(std::int64_t);
        auto const ids = static_cast<std::size_t>(slots * kMaxTokens) * sizeof(std::int64_t);
        return std::vector<std::size_t>{wide, wide, wide, all * sizeof(float), sizeof(Sharing),
                                        buffers.slots() * sizeof(SlotRule), wide, all * sizeof(float),
                                        static_cast<std::size_t>(info.max_logits) * sizeof(RowChoice), ids};
      }()),
      outcomes_(device_, {buffers.slots() * sizeof(Outcome), segments_ * pitch_ * sizeof(float),
                          segments_ * pitch_ * sizeof(std::int32_t)}) {}

bool DeviceStep::queue(std::vector<DeviceRequest> const& slots, std::vector<std::vector<std::int64_t>> const& lengths,
                       double compaction_threshold, bool scores, std::vector<HeadRow>& rows) {
  comes_again_ = false;
  if (!device_.records() || rows.size() > static_cast<std::size_t>(buffers_.info().max_logits)) return false;
  if (!plan(slots, lengths)) return false;
  if (std::exchange(queued_, true)) device_.synchronize();  // a step that failed
  shape_.copies_scores = scores;
  head_ = buffers_.head().plan(rows);
  head_.tokens = std::max(head_.tokens, std::min(static_cast<std::int64_t>(shape_.slots), buffers_.info().max_logits));
  std::int64_t const kind = static_cast<std::int64_t>(segments_ + names::kAfterSegments) + shape_.decides * 2 + scores;
  WorkKey const key = {kind, static_cast<std::int64_t>(shape_.start), static_cast<std::int64_t>(shape_.slots),
                       shape_.tokens, shape_.pending, shape_.keys, head_.tokens, head_.fetched, head_.fetches()};
  for (std::size_t slot = shape_.start; slot < shape_.start + shape_.slots; ++slot) {
    for (std::size_t k = 0; k < segments_; ++k) buffers_.note_written(slot, lengths[k][slot] + most(k));
  }
  if (!shape_.decides) {
    fill(slots, lengths, compaction_threshold, rows);
    device_.launch(key, [this] {
      run_first();
      for (std::size_t k = 1; k < segments_; ++k) run(k, shape_.tokens);
      run_last();
    });
    return true;
  }
  bool const recorded = device_.record(key, [&] {
    fill({}, lengths, compaction_threshold, {});  // all slots are padding while it is recorded
    return work();
  });
  comes_again_ = device_.decides();
  queued_ = recorded;
  if (!recorded) return false;
  fill(slots, lengths, compaction_threshold, rows);
  device_.replay(key);
  return true;
}

// Sets the shape of a step; returns whether it can be run in one launch.
bool DeviceStep::plan(std::vector<DeviceRequest> const& slots, std::vector<std::vector<std::int64_t>> const& lengths) {
  std::size_t block = 1;
  while (slots.front().slot / block != slots.back().slot / block) block *= 2;
  shape_.start = slots.front().slot / block * block;
  shape_.slots = std::min(block, buffers_.slots() - shape_.start);
  shape_.decides = std::any_of(slots.begin(), slots.end(), [&](DeviceRequest const& one) { return is_open(one, lengths); });
  shape_.tokens = shape_.pending = 0;
  for (DeviceRequest const& one : slots) {
    shape_.tokens = std::max(shape_.tokens, power_of_two(one.total - lengths[0][one.slot]));
    if (shape_.decides && one.max_pending > 0) shape_.pending = std::max(shape_.pending, power_of_two(one.max_pending));
  }
  if (shape_.slots > kMaxSlots) return false;
  std::int64_t longest = 0;
  for (std::size_t k = 0; k < segments_; ++k) {
    for (DeviceRequest const& one : slots) {
      if (one.total - lengths[k][one.slot] > most(k)) return false;
    }
    for (std::size_t slot = shape_.start; slot < shape_.start + shape_.slots; ++slot) {
      longest = std::max(longest, lengths[k][slot] + most(k));
    }
  }
  shape_.keys = keys_for(longest, buffers_.info());
  return longest <= shape_.keys;
}

// The most tokens of a slot, a power of two, in a run of segment k.
std::int64_t DeviceStep::most(std::size_t k) const {
  NetworksInfo const& info = buffers_.info();
  std::int64_t const limit = std::min(kMaxTokens, shape_.slots == 1 ? info.max_tokens : info.max_slot_tokens);
  std::int64_t most = power_of_two(shape_.tokens + std::min(kMaxTokens, shape_.pending) * static_cast<std::int64_t>(k));
  while (most > limit) most /= 2;
  return most;
}

// Writes what the device reads of a step: of slots in it, and of others, which are padding.
void DeviceStep::fill(std::vector<DeviceRequest> const& slots, std::vector<std::vector<std::int64_t>> const& lengths,
                      double compaction_threshold, std::vector<HeadRow> const& rows) {
  *inputs_.host<Sharing>(kShare) = {compaction_threshold, static_cast<std::int32_t>(slots.size()),
                                    buffers_.info().cumulative};
  auto* const rules = inputs_.host<SlotRule>(kRules);
  auto* const outcomes = outcomes_.host<Outcome>(kOutcomes);
  for (std::size_t number = 0; number < shape_.slots; ++number) {
    rules[number] = {0, 0, 0};
    outcomes[number] = {-1, 0, 0, 0.0F};
    for (std::size_t k = 0; k < segments_; ++k) {
      std::size_t const slot = shape_.start + number, at = place(k, number);
      inputs_.host<std::int64_t>(kLengths)[at] = lengths[k][slot];
      inputs_.host<std::int64_t>(kPending)[at] = lengths[k][slot] - lengths[std::min(k + 1, segments_ - 1)][slot];
      inputs_.host<std::int64_t>(kLast)[at] = 0;
      inputs_.host<float>(kThreshold)[at] = kNever;
      inputs_.host<std::int64_t>(kCounts)[at] = 0;
      inputs_.host<float>(kPlanned)[at] = kNever;
    }
  }
  auto* const ids = inputs_.host<std::int64_t>(kIds);
  std::fill_n(ids, static_cast<std::int64_t>(shape_.slots) * shape_.tokens, 0);
  for (DeviceRequest const& one : slots) {
    std::size_t const number = one.slot - shape_.start;
    rules[number] = {one.max_pending, 1, one.verifies};
    outcomes[number].scheduled = 1;
    for (std::size_t k = 0; k < segments_; ++k) {
      std::size_t const at = place(k, number);
      inputs_.host<std::int64_t>(kCounts)[at] = one.total - lengths[k][one.slot];
      if (k < one.thresholds.size()) inputs_.host<float>(kPlanned)[at] = one.thresholds[k];
      if (k > 0 && shape_.decides) continue;  // the device sets these
      inputs_.host<std::int64_t>(kLast)[at] = one.total - lengths[k][one.slot] - 1;
      inputs_.host<float>(kThreshold)[at] = inputs_.host<float>(kPlanned)[at];
    }
    std::copy_n(one.ids, one.total - lengths[0][one.slot], ids + static_cast<std::int64_t>(number) * shape_.tokens);
  }
  buffers_.head().set_rows(rows, head_);
  auto* const choices = inputs_.host<RowChoice>(kChoices);
  std::fill_n(choices, head_.tokens, RowChoice{0, 0, 0});
  for (std::size_t i = 0; i < rows.size(); ++i) {
    HeadRow exited = rows[i];
    exited.row = names::kExitRow;
    choices[i] = {buffers_.head().index(exited), buffers_.head().index(rows[i]),
                  static_cast<std::int64_t>(rows[i].slot - shape_.start)};
  }
}

// Queues a run of segment k over `tokens` of each slot.
void DeviceStep::run(std::size_t k, std::int64_t tokens) const {
  std::size_t const wide = place(k, 0) * sizeof(std::int64_t), narrow = place(k, 0) * sizeof(float);
  SegmentBuffers::SmallAddresses const small{
      {inputs_.address(kLengths) + wide, inputs_.address(kLast) + wide, inputs_.address(kPending) + wide,
       inputs_.address(kThreshold) + narrow, inputs_.address(kIds)},
      {outcomes_.address(kScores) + narrow, outcomes_.address(kFlags) + narrow}};
  buffers_.run_network(k, shape_.start, small, {tokens, static_cast<std::int64_t>(shape_.slots), shape_.keys});
}

void DeviceStep::run_first() const {
  inputs_.upload(kIds, shape_.slots * static_cast<std::size_t>(shape_.tokens) * sizeof(std::int64_t));
  if (shape_.decides) outcomes_.upload(kOutcomes, shape_.slots * sizeof(Outcome));
  if (!shape_.decides) buffers_.head().upload_rows(head_);
  run(0, shape_.tokens);
}

void DeviceStep::run_last() const {
  buffers_.head().queue(head_);
  if (shape_.copies_scores) return outcomes_.download(kScores, segments_ * pitch_ * sizeof(float));
  if (shape_.decides) outcomes_.download(kOutcomes, shape_.slots * sizeof(Outcome));
}

// The step with the decisions of the device.
ChosenWork DeviceStep::work() const {
  ChosenWork work;
  work.first = [this] { run_first(); };
  for (std::size_t k = 1; k < segments_; ++k) {
    std::vector<std::function<void()>>& variants = work.choices.emplace_back();
    for (std::int64_t tokens = 1; tokens <= most(k); tokens *= 2) variants.push_back([this, k, tokens] { run(k, tokens); });
  }
  work.last = [this] { run_last(); };
  auto const at = [](Block const& block, std::size_t part, auto type) {
    return reinterpret_cast<decltype(type)*>(block.address(part));
  };
  work.decision = {at(inputs_, kShare, Sharing{}),      at(inputs_, kRules, SlotRule{}),
                   at(inputs_, kCounts, std::int64_t{}),  at(inputs_, kPlanned, float{}),
                   at(outcomes_, kScores, float{}),       at(outcomes_, kFlags, std::int32_t{}),
                   at(inputs_, kChoices, RowChoice{}),    at(outcomes_, kOutcomes, Outcome{}),
                   at(inputs_, kLast, std::int64_t{}),
                   at(inputs_, kThreshold, float{}),
                   reinterpret_cast<std::int64_t*>(buffers_.head().rows()),
                   static_cast<std::int32_t>(shape_.slots), static_cast<std::int32_t>(segments_),
                   static_cast<std::int32_t>(pitch_), static_cast<std::int32_t>(head_.tokens)};
  return work;
}

void DeviceStep::finish(std::vector<HeadRow>& rows) {
  device_.synchronize();
  queued_ = false;
  std::vector<bool> taken(shape_.slots);
  for (HeadRow& row : rows) {
    std::size_t const number = row.slot - shape_.start;
    if (exit(row.slot) && taken[number]) row.results = nullptr;
    taken[number] = true;
  }
  buffers_.head().take(rows, head_);
}

std::size_t DeviceStep::segments_run(std::size_t slot) const {
  if (!shape_.decides) return segments_;
  return static_cast<std::size_t>(outcomes_.host<Outcome>(kOutcomes)[slot - shape_.start].segments_run);
}

std::optional<std::size_t> DeviceStep::exit(std::size_t slot) const {
  if (!shape_.decides) return std::nullopt;
  std::size_t const number = slot - shape_.start;
  Outcome const& outcome = outcomes_.host<Outcome>(kOutcomes)[number];
  bool const verifies = inputs_.host<SlotRule>(kRules)[number].verifies != 0;
  if (outcome.exit < 0 || !at_its_exit(verifies, segments_run(slot) == segments_)) return std::nullopt;
  return static_cast<std::size_t>(outcome.exit);
}

}  // namespace tide
