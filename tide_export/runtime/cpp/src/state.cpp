// What exits and which segments run is decided in the graph; a state only lends it memory. K/V buffers are bound as
// input and output at once, so that the graph writes new keys in place and a skipped segment costs nothing; they grow
// by doubling. What is bound stays bound: a step binds only what differs from the step before.
#include "tide/state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "kv_buffer.h"
#include "names.h"
#include "request.h"
#include "session.h"
#include "text.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::size_t kNoneBound = std::numeric_limits<std::size_t>::max();

// Number of the first checkpoint whose score is above its threshold (NaN is not), else how many there are.
std::size_t first_above(std::vector<float> const& scores, std::vector<float> const& thresholds) {
  std::size_t number = 0;
  while (number < scores.size() && !(scores[number] > thresholds[number])) ++number;
  return number;
}

}  // namespace

struct State::Memory {
  struct Cache {
    std::string past, present;
    std::size_t segment;
    KvBuffer buffer;  // of the state's capacity, but where growing failed half-way
  };

  std::shared_ptr<Session> session;
  Manifest const& manifest;
  Ort::MemoryInfo const place = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
  Ort::RunOptions const run_options;
  Ort::IoBinding binding;

  std::int64_t const room, max_pending;
  bool const propagates;
  std::vector<std::int64_t> const depths;

  std::vector<std::int64_t> lengths;  // tokens in each segment's buffers, shallowest first; never rising
  std::vector<std::int64_t> ran;      // tokens that each segment has run over, where K/V are propagated
  std::vector<Cache> caches;
  std::int64_t capacity = 0;

  std::vector<std::string> pending_names;  // empty where nothing ever waits
  std::vector<Ort::Value> pending;         // what waits before segment 1, 2, ...; null: nothing
  float no_state = 0;
  Ort::Value nothing{nullptr};  // [1, 0, D]

  std::vector<float> thresholds, exit_thresholds, skip_thresholds;  // asked for; bound
  std::size_t forced_from = kNoneBound;  // checkpoints from this one on have a forced skip threshold
  bool all_forced = false;
  bool may_wait = true;       // whether a score could pass what is bound as skip thresholds
  bool left_nothing = false;  // whether the output for what waits is bound to one without tokens

  std::vector<std::int64_t> ids, kept_tokens;
  std::int64_t one_id = 0;
  bool one_id_bound = false;
  std::int32_t total = 0;
  std::vector<float> scores, logits;
  std::int64_t kept = 0;     // rows of logits that the binding is set up for
  Ort::Value rows{nullptr};  // the logits of the last step, where they are not in `logits`

  Memory(std::shared_ptr<Session> owner, std::vector<double> const& given, std::int64_t limit, std::int64_t spare)
      : session(std::move(owner)),
        manifest(session->manifest()),
        binding(session->onnxruntime()),
        room(spare),
        max_pending(limit),
        propagates(manifest.propagates()),
        depths(manifest.depths()),
        lengths(depths.size()),
        ran(depths.size()),
        thresholds(given.begin(), given.end()),
        exit_thresholds(thresholds),
        skip_thresholds(thresholds),
        scores(given.size(), std::numeric_limits<float>::quiet_NaN()),
        logits(static_cast<std::size_t>(manifest.model.vocab_size)) {
    std::int64_t const hidden = manifest.model.hidden_size;
    std::array<std::int64_t, 3> const no_tokens{1, 0, hidden};
    nothing = Ort::Value::CreateTensor<float>(place, &no_state, 0, no_tokens.data(), no_tokens.size());
    for (std::size_t k = 1; k <= thresholds.size() && !propagates; ++k) {
      pending_names.push_back(names::pending(k));
      pending.emplace_back(nullptr);
      binding.BindInput(pending_names.back().c_str(), nothing);
    }
    // Outputs of unknown size first: values come back in the order of the first binding.
    if (!pending_names.empty()) binding.BindOutput(names::kNewPending, place);
    keep_logits(1);
    if (!thresholds.empty()) {
      std::int64_t const count = static_cast<std::int64_t>(thresholds.size());
      bind_input(names::kThresholds, exit_thresholds.data(), {count});
      for (std::size_t k = 0; k < thresholds.size(); ++k) {
        bind_input(names::skip_threshold(k + 1).c_str(), &skip_thresholds[k], {1});
      }
      binding.BindOutput(names::kScores, tensor(scores.data(), {1, count}));
    }
    bind_input(names::kTotalLength, &total, {});
    std::size_t segment = 0;
    for (std::size_t layer = 0; layer < manifest.model.kv_shapes.size(); ++layer) {
      if (static_cast<std::int64_t>(layer) == depths[segment]) ++segment;
      for (char const* kind : {"key", "value"}) {
        caches.push_back({names::past(layer, kind), names::present(layer, kind), segment,
                          KvBuffer(manifest.model.kv_shapes[layer])});
      }
    }
  }

  template <typename T>
  Ort::Value tensor(T* data, std::vector<std::int64_t> const& shape) const {
    return view(place, data, shape);
  }

  template <typename T>
  void bind_input(char const* name, T* data, std::vector<std::int64_t> const& shape) {
    binding.BindInput(name, tensor(data, shape));
  }

  // Tokens of the sequence after a step over `count` more, if it may have so many.
  std::int64_t checked_total(std::int64_t const* given, std::size_t count) const {
    std::int64_t const vocabulary = manifest.model.vocab_size;
    for (std::size_t i = 0; i < count; ++i) {
      if (given[i] >= 0 && given[i] < vocabulary) continue;
      throw GenerationError("a step holds token id " + std::to_string(given[i]) + ", outside the vocabulary 0.." +
                            std::to_string(vocabulary - 1));
    }
    return length_after(manifest, lengths[0], count);
  }

  StepResult step(std::int64_t const* given, std::size_t count, std::int64_t logits_to_keep, bool full) {
    std::int64_t const after = checked_total(given, count);
    if (logits_to_keep < 1) {
      throw GenerationError("logits_to_keep must be a whole number, 1 or more, not " + std::to_string(logits_to_keep));
    }
    std::size_t segments_run = 1;
    try {
      if (after > capacity) grow(after);
      take_ids(given, count);
      total = static_cast<std::int32_t>(after);
      force(after, full || (propagates && (count > 1 || after == 1)));
      std::int64_t const keep = std::min(logits_to_keep, after - lengths.back());  // all the last segment may run over
      if (keep != kept || keep > 1) keep_logits(keep);
      if (!pending_names.empty() && (may_wait || !left_nothing)) {
        binding.BindOutput(names::kNewPending, place);  // a filled slot would pin last step's shape
        left_nothing = false;
      }
      session->onnxruntime().Run(run_options, binding);
      segments_run += first_above(scores, skip_thresholds);
      take_outputs(segments_run, after, static_cast<std::int64_t>(count));
    } catch (Ort::Exception const& error) {
      throw GenerationError("ONNX Runtime failed at token " + std::to_string(after) + ": " + first_line(error));
    }
    StepResult result;
    result.vocabulary = logits.size();
    result.rows = rows ? static_cast<std::size_t>(rows.GetTensorTypeAndShapeInfo().GetShape()[0]) : 1;
    result.logits = rows ? rows.GetTensorData<float>() : logits.data();
    result.exit_layer = depths[first_above(scores, exit_thresholds)];
    result.segments_run = static_cast<std::int64_t>(segments_run);
    result.scores = scores.data();
    return result;
  }

  void take_ids(std::int64_t const* given, std::size_t count) {
    if (count > 1) {
      ids.assign(given, given + count);
      one_id_bound = false;
      bind_input(names::kInputIds, ids.data(), {1, static_cast<std::int64_t>(count)});
      return;
    }
    one_id = given[0];
    if (!one_id_bound) bind_input(names::kInputIds, &one_id, {1, 1});
    one_id_bound = true;
  }

  // Writes the thresholds of this step, where they are not those of the last.
  //
  // Segments 0 .. k-1 give segment k all it has not seen yet, so what would wait is known before the step; deeper
  // segments have at least as many waiting, so those forced are the deepest.
  void force(std::int64_t after, bool full) {
    std::size_t forced = thresholds.size();
    while (forced > 0 && !pending_names.empty() && after - lengths[forced] > max_pending) --forced;
    if (thresholds.empty() || (forced == forced_from && full == all_forced)) return;
    // Written in place: the graph reads this memory.
    for (std::size_t k = 0; k < thresholds.size(); ++k) {
      exit_thresholds[k] = full ? static_cast<float>(kOff) : thresholds[k];
      skip_thresholds[k] = k < forced ? exit_thresholds[k] : static_cast<float>(kOff);
    }
    forced_from = forced;
    all_forced = full;
    may_wait = std::any_of(skip_thresholds.begin(), skip_thresholds.end(), [](float value) { return value < 1; });
  }

  // One row goes to memory of our own; how many more there will be is known only when the last segment runs.
  void keep_logits(std::int64_t count) {
    if (count != kept) {
      kept_tokens.assign(static_cast<std::size_t>(2 * count), 0);
      for (std::int64_t i = 0; i < count; ++i) kept_tokens[static_cast<std::size_t>(2 * i + 1)] = i - count;
      bind_input(names::kKeptTokens, kept_tokens.data(), {count, 2});
    }
    if (count > 1) {
      binding.BindOutput(names::kLogits, place);
    } else if (kept != 1) {
      binding.BindOutput(names::kLogits, tensor(logits.data(), {1, manifest.model.vocab_size}));
    }
    kept = count;
  }

  // What waits after this step is what waits before the next: the memory changes hands, nothing is copied. Segments
  // that ran have nothing left waiting, and of those that did not only the first was given something new.
  void take_outputs(std::size_t segments_run, std::int64_t after, std::int64_t count) {
    bool const left_waiting = !pending_names.empty() && segments_run < lengths.size();
    std::vector<Ort::Value> outputs;
    if (left_waiting || kept > 1) outputs = binding.GetOutputValues();
    rows = kept > 1 ? std::move(outputs[pending_names.empty() ? 0 : 1]) : Ort::Value(nullptr);
    if (propagates) {
      std::fill(lengths.begin(), lengths.end(), after);
      for (std::size_t k = 0; k < segments_run; ++k) ran[k] += count;
      return;
    }
    for (std::size_t k = 0; k + 1 < segments_run; ++k) {
      if (pending[k]) set_pending(k, Ort::Value(nullptr));
    }
    if (left_waiting) set_pending(segments_run - 1, std::move(outputs[0]));
    left_nothing = !left_waiting;
    std::fill_n(lengths.begin(), segments_run, after);
  }

  void set_pending(std::size_t k, Ort::Value value) {
    binding.BindInput(pending_names[k].c_str(), value ? value : nothing);
    pending[k] = std::move(value);
  }

  // Moves K/V to buffers of at least `needed` tokens, one after the other so that only one exists twice.
  void grow(std::int64_t needed) {
    std::int64_t const larger = grown_capacity(manifest, capacity, needed, room);
    for (Cache& cache : caches) {
      KvBuffer larger_one = cache.buffer.grown(larger, lengths[cache.segment]);
      Ort::Value const value = larger_one.tensor(place);
      binding.BindInput(cache.past.c_str(), value);
      binding.BindOutput(cache.present.c_str(), value);
      cache.buffer = std::move(larger_one);
    }
    capacity = larger;
  }

  void rewind(std::int64_t length) {
    if (length < 0 || length > lengths[0]) {
      throw GenerationError("a sequence of " + std::to_string(lengths[0]) + " tokens cannot be rewound to " +
                            std::to_string(length));
    }
    if (propagates && length < lengths[0]) {
      throw GenerationError("a sequence whose K/V are propagated cannot be rewound");
    }
    for (std::size_t k = 0; k < pending.size(); ++k) {
      if (lengths[k] <= length || !pending[k]) continue;
      std::int64_t const left = std::max<std::int64_t>(length - lengths[k + 1], 0);
      set_pending(k, left > 0 ? first_states(pending[k], left) : Ort::Value(nullptr));
    }
    // What the buffers hold beyond is written over before it is read.
    for (std::int64_t& own : lengths) own = std::min(own, length);
  }

  // A copy of the first `count` of the states [1, n, D].
  Ort::Value first_states(Ort::Value const& states, std::int64_t count) const {
    Ort::AllocatorWithDefaultOptions allocator;
    std::array<std::int64_t, 3> const shape{1, count, manifest.model.hidden_size};
    Ort::Value copy = Ort::Value::CreateTensor<float>(allocator, shape.data(), shape.size());
    auto const bytes = static_cast<std::size_t>(count * manifest.model.hidden_size) * sizeof(float);
    std::memcpy(copy.GetTensorMutableData<float>(), states.GetTensorData<float>(), bytes);
    return copy;
  }

  void set_thresholds(std::vector<double> const& given) {
    check_thresholds(manifest, given);
    std::vector<float> const asked(given.begin(), given.end());
    if (asked == thresholds) return;
    thresholds = asked;
    forced_from = kNoneBound;  // what is bound is of the old ones
  }
};

State::State(std::shared_ptr<Session> session, std::vector<double> const& thresholds, std::int64_t max_pending,
             std::int64_t room)
    : memory_(std::make_unique<Memory>(std::move(session), thresholds, max_pending, room)) {}
State::State(State&&) noexcept = default;
State& State::operator=(State&&) noexcept = default;
State::~State() = default;

StepResult State::step(std::int64_t const* ids, std::size_t count, std::int64_t logits_to_keep, bool full) {
  return memory_->step(ids, count, logits_to_keep, full);
}
StepResult State::step(std::vector<std::int64_t> const& ids, std::int64_t logits_to_keep, bool full) {
  return memory_->step(ids.data(), ids.size(), logits_to_keep, full);
}
void State::rewind(std::int64_t length) { memory_->rewind(length); }
void State::set_thresholds(std::vector<double> const& thresholds) { memory_->set_thresholds(thresholds); }

std::int64_t State::length() const { return memory_->lengths[0]; }
std::vector<std::int64_t> const& State::lengths() const { return memory_->lengths; }
std::vector<std::int64_t> const& State::computed() const {
  return memory_->propagates ? memory_->ran : memory_->lengths;
}
std::vector<std::int64_t> State::waiting() const {
  std::vector<std::int64_t> found;
  for (std::size_t k = 1; k < memory_->lengths.size(); ++k) {
    found.push_back(memory_->lengths[k - 1] - memory_->lengths[k]);
  }
  return found;
}
std::int64_t State::capacity() const { return memory_->capacity; }

}  // namespace tide
