// What exits and which segments run is decided in the graph; a sequence only lends it memory. K/V buffers are bound as
// input and output at once, so that the graph writes new keys in place and a skipped segment costs nothing; they grow
// by doubling. What is bound stays bound: a step binds only what differs from the step before.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "branched/graph_backend.h"
#include "onnxruntime/kv_buffer.h"
#include "names.h"
#include "request.h"
#include "formatting.h"
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

class GraphSequence final : public Sequence {
 public:
  GraphSequence(GraphSession& session, std::vector<float> const& thresholds, std::int64_t max_pending,
                std::int64_t room)
      : session_(session),
        manifest_(session.manifest()),
        binding_(session.onnxruntime()),
        room_(room),
        max_pending_(max_pending),
        propagates_(manifest_.propagates()),
        depths_(manifest_.depths()),
        lengths_(depths_.size()),
        ran_(depths_.size()),
        thresholds_(thresholds),
        exit_thresholds_(thresholds_),
        skip_thresholds_(thresholds_),
        scores_(thresholds.size(), std::numeric_limits<float>::quiet_NaN()),
        logits_(static_cast<std::size_t>(manifest_.model.vocab_size)) {
    std::int64_t const hidden = manifest_.model.hidden_size;
    std::array<std::int64_t, 3> const no_tokens{1, 0, hidden};
    nothing_ = Ort::Value::CreateTensor<float>(place_, &no_state_, 0, no_tokens.data(), no_tokens.size());
    for (std::size_t k = 1; k <= thresholds_.size() && !propagates_; ++k) {
      pending_names_.push_back(names::pending(k));
      pending_.emplace_back(nullptr);
      binding_.BindInput(pending_names_.back().c_str(), nothing_);
    }
    // Outputs of unknown size first: values come back in the order of the first binding.
    if (!pending_names_.empty()) binding_.BindOutput(names::kNewPending, place_);
    keep_logits(1);
    if (!thresholds_.empty()) {
      std::int64_t const count = static_cast<std::int64_t>(thresholds_.size());
      bind_input(names::kThresholds, exit_thresholds_.data(), {count});
      for (std::size_t k = 0; k < thresholds_.size(); ++k) {
        bind_input(names::skip_threshold(k + 1).c_str(), &skip_thresholds_[k], {1});
      }
      binding_.BindOutput(names::kScores, tensor(scores_.data(), {1, count}));
    }
    bind_input(names::kTotalLength, &total_, {});
    std::size_t segment = 0;
    for (std::size_t layer = 0; layer < manifest_.model.kv_shapes.size(); ++layer) {
      if (static_cast<std::int64_t>(layer) == depths_[segment]) ++segment;
      for (char const* kind : {"key", "value"}) {
        caches_.push_back({names::past(layer, kind), names::present(layer, kind), segment,
                           KvBuffer(manifest_.model.kv_shapes[layer])});
      }
    }
  }

  StepResult step(std::int64_t const* given, std::size_t count, std::int64_t after, std::int64_t logits_to_keep,
                  bool full) override {
    std::size_t segments_run = 1;
    try {
      if (after > capacity_) grow(after);
      take_ids(given, count);
      total_ = static_cast<std::int32_t>(after);
      force(after, full || (propagates_ && (count > 1 || after == 1)));
      std::int64_t const keep = std::min(logits_to_keep, after - lengths_.back());  // all the last segment may run over
      if (keep != kept_ || keep > 1) keep_logits(keep);
      if (!pending_names_.empty() && (may_wait_ || !left_nothing_)) {
        binding_.BindOutput(names::kNewPending, place_);  // a filled slot would pin last step's shape
        left_nothing_ = false;
      }
      session_.onnxruntime().Run(run_options_, binding_);
      segments_run += first_above(scores_, skip_thresholds_);
      take_outputs(segments_run, after, static_cast<std::int64_t>(count));
    } catch (Ort::Exception const& error) {
      throw GenerationError("ONNX Runtime failed at token " + std::to_string(after) + ": " + first_line(error));
    }
    StepResult result;
    result.vocabulary = logits_.size();
    result.rows = rows_ ? static_cast<std::size_t>(rows_.GetTensorTypeAndShapeInfo().GetShape()[0]) : 1;
    result.logits = rows_ ? rows_.GetTensorData<float>() : logits_.data();
    result.exit_layer = depths_[first_above(scores_, exit_thresholds_)];
    result.segments_run = static_cast<std::int64_t>(segments_run);
    result.scores = scores_.data();
    return result;
  }

  void rewind(std::int64_t length) override {
    if (propagates_ && length < lengths_[0]) {
      throw GenerationError("a sequence whose K/V are propagated cannot be rewound");
    }
    for (std::size_t k = 0; k < pending_.size(); ++k) {
      if (lengths_[k] <= length || !pending_[k]) continue;
      std::int64_t const left = std::max<std::int64_t>(length - lengths_[k + 1], 0);
      set_pending(k, left > 0 ? first_states(pending_[k], left) : Ort::Value(nullptr));
    }
    // What the buffers hold beyond is written over before it is read.
    for (std::int64_t& own : lengths_) own = std::min(own, length);
  }


  void set_thresholds(std::vector<float> const& asked) override {
    if (asked == thresholds_) return;
    thresholds_ = asked;
    forced_from_ = kNoneBound;  // what is bound is of the old ones
  }

  std::vector<std::int64_t> const& lengths() const override { return lengths_; }
  std::vector<std::int64_t> const& computed() const override { return propagates_ ? ran_ : lengths_; }
  std::int64_t limit() const override { return context_of(manifest_); }
  std::int64_t capacity() const override { return capacity_; }

 private:
  struct Cache {
    std::string past, present;
    std::size_t segment;
    KvBuffer buffer;  // of the sequence's capacity, but where growing failed half-way
  };

  template <typename T>
  Ort::Value tensor(T* data, std::vector<std::int64_t> const& shape) const {
    return view(place_, data, shape);
  }

  template <typename T>
  void bind_input(char const* name, T* data, std::vector<std::int64_t> const& shape) {
    binding_.BindInput(name, tensor(data, shape));
  }

  void take_ids(std::int64_t const* given, std::size_t count) {
    if (count > 1) {
      ids_.assign(given, given + count);
      one_id_bound_ = false;
      bind_input(names::kInputIds, ids_.data(), {1, static_cast<std::int64_t>(count)});
      return;
    }
    one_id_ = given[0];
    if (!one_id_bound_) bind_input(names::kInputIds, &one_id_, {1, 1});
    one_id_bound_ = true;
  }

  // Writes the thresholds of this step, where they are not those of the last.
  //
  // Segments 0 .. k-1 give segment k all it has not seen yet, so what would wait is known before the step; deeper
  // segments have at least as many waiting, so those forced are the deepest.
  void force(std::int64_t after, bool full) {
    std::size_t forced = thresholds_.size();
    while (forced > 0 && !pending_names_.empty() && after - lengths_[forced] > max_pending_) --forced;
    if (thresholds_.empty() || (forced == forced_from_ && full == all_forced_)) return;
    // Written in place: the graph reads this memory.
    for (std::size_t k = 0; k < thresholds_.size(); ++k) {
      exit_thresholds_[k] = full ? static_cast<float>(kOff) : thresholds_[k];
      skip_thresholds_[k] = k < forced ? exit_thresholds_[k] : static_cast<float>(kOff);
    }
    forced_from_ = forced;
    all_forced_ = full;
    may_wait_ = std::any_of(skip_thresholds_.begin(), skip_thresholds_.end(), [](float value) { return value < 1; });
  }

  // One row goes to memory of our own; how many more there will be is known only when the last segment runs.
  void keep_logits(std::int64_t count) {
    if (count != kept_) {
      kept_tokens_.assign(static_cast<std::size_t>(2 * count), 0);
      for (std::int64_t i = 0; i < count; ++i) kept_tokens_[static_cast<std::size_t>(2 * i + 1)] = i - count;
      bind_input(names::kLogitsPositions, kept_tokens_.data(), {count, 2});
    }
    if (count > 1) {
      binding_.BindOutput(names::kLogits, place_);
    } else if (kept_ != 1) {
      binding_.BindOutput(names::kLogits, tensor(logits_.data(), {1, manifest_.model.vocab_size}));
    }
    kept_ = count;
  }

  // What waits after this step is what waits before the next: the memory changes hands, nothing is copied. Segments
  // that ran have nothing left waiting, and of those that did not only the first was given something new.
  void take_outputs(std::size_t segments_run, std::int64_t after, std::int64_t count) {
    bool const left_waiting = !pending_names_.empty() && segments_run < lengths_.size();
    std::vector<Ort::Value> outputs;
    if (left_waiting || kept_ > 1) outputs = binding_.GetOutputValues();
    rows_ = kept_ > 1 ? std::move(outputs[pending_names_.empty() ? 0 : 1]) : Ort::Value(nullptr);
    if (propagates_) {
      std::fill(lengths_.begin(), lengths_.end(), after);
      for (std::size_t k = 0; k < segments_run; ++k) ran_[k] += count;
      return;
    }
    for (std::size_t k = 0; k + 1 < segments_run; ++k) {
      if (pending_[k]) set_pending(k, Ort::Value(nullptr));
    }
    if (left_waiting) set_pending(segments_run - 1, std::move(outputs[0]));
    left_nothing_ = !left_waiting;
    std::fill_n(lengths_.begin(), segments_run, after);
  }

  void set_pending(std::size_t k, Ort::Value value) {
    binding_.BindInput(pending_names_[k].c_str(), value ? value : nothing_);
    pending_[k] = std::move(value);
  }

  // Moves K/V to buffers of at least `needed` tokens, one after the other so that only one exists twice.
  void grow(std::int64_t needed) {
    std::int64_t const larger = grown_capacity(manifest_, capacity_, needed, room_);
    for (Cache& cache : caches_) {
      KvBuffer larger_one = cache.buffer.grown(larger, lengths_[cache.segment]);
      Ort::Value const value = larger_one.tensor(place_);
      binding_.BindInput(cache.past.c_str(), value);
      binding_.BindOutput(cache.present.c_str(), value);
      cache.buffer = std::move(larger_one);
    }
    capacity_ = larger;
  }

  // A copy of the first `count` of the states [1, n, D].
  Ort::Value first_states(Ort::Value const& states, std::int64_t count) const {
    Ort::AllocatorWithDefaultOptions allocator;
    std::array<std::int64_t, 3> const shape{1, count, manifest_.model.hidden_size};
    Ort::Value copy = Ort::Value::CreateTensor<float>(allocator, shape.data(), shape.size());
    auto const bytes = static_cast<std::size_t>(count * manifest_.model.hidden_size) * sizeof(float);
    std::memcpy(copy.GetTensorMutableData<float>(), states.GetTensorData<float>(), bytes);
    return copy;
  }

  GraphSession& session_;
  Manifest const& manifest_;
  Ort::MemoryInfo const place_ = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
  Ort::RunOptions const run_options_;
  Ort::IoBinding binding_;

  std::int64_t const room_, max_pending_;
  bool const propagates_;
  std::vector<std::int64_t> const depths_;

  std::vector<std::int64_t> lengths_;  // tokens in each segment's buffers, shallowest first; never rising
  std::vector<std::int64_t> ran_;      // tokens that each segment has run over, where K/V are propagated
  std::vector<Cache> caches_;
  std::int64_t capacity_ = 0;

  std::vector<std::string> pending_names_;  // empty where nothing ever waits
  std::vector<Ort::Value> pending_;         // what waits before segment 1, 2, ...; null: nothing
  float no_state_ = 0;
  Ort::Value nothing_{nullptr};  // [1, 0, D]

  std::vector<float> thresholds_, exit_thresholds_, skip_thresholds_;  // asked for; bound
  std::size_t forced_from_ = kNoneBound;  // checkpoints from this one on have a forced skip threshold
  bool all_forced_ = false;
  bool may_wait_ = true;       // whether a score could pass what is bound as skip thresholds
  bool left_nothing_ = false;  // whether the output for what waits is bound to one without tokens

  std::vector<std::int64_t> ids_, kept_tokens_;
  std::int64_t one_id_ = 0;
  bool one_id_bound_ = false;
  std::int32_t total_ = 0;
  std::vector<float> scores_, logits_;
  std::int64_t kept_ = 0;     // rows of logits that the binding is set up for
  Ort::Value rows_{nullptr};  // the logits of the last step, where they are not in `logits`
};

}  // namespace

std::unique_ptr<Sequence> GraphSession::start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                              std::int64_t room) {
  return std::make_unique<GraphSequence>(*this, thresholds, max_pending, room);
}

}  // namespace tide
