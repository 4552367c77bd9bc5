// One sequence on the branched graph, which decides by itself which token exits and which segments run. K/V buffers are
// bound as input and output, so that the graph writes new keys in place and a skipped segment costs nothing; they grow
// by doubling. A step binds only what differs from the step before.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "branched/backend.h"
#include "onnxruntime/kv_buffer.h"
#include "packed/sequence.h"
#include "names.h"
#include "request.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::size_t kNoneBound = std::numeric_limits<std::size_t>::max();

// The index of the first checkpoint whose score is above its threshold (NaN is not), else the number of checkpoints.
std::size_t first_above(std::vector<float> const& scores, std::vector<float> const& thresholds) {
  std::size_t number = 0;
  while (number < scores.size() && !(scores[number] > thresholds[number])) ++number;
  return number;
}

class BranchedSequence final : public LoneSequence {
 public:
  // kv: its buffers, if they are another sequence's; else it has its own, with `room`.
  BranchedSequence(BranchedBackend& backend, std::vector<float> const& thresholds, std::int64_t max_pending,
                   std::int64_t room, KvBuffers* kv = nullptr)
      : backend_(backend),
        manifest_(backend.manifest()),
        binding_(backend.session()),
        own_kv_(manifest_, room),
        kv_(kv == nullptr ? own_kv_ : *kv),
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
    no_tokens_ = tensor(&no_state_, {1, 0, manifest_.model.hidden_size});
    for (std::size_t k = 1; k <= thresholds_.size() && !propagates_; ++k) pending_.push_back({names::pending(k)});
    // Outputs of unknown size first: `GetOutputValues` returns them in the order of the first binding.
    if (!pending_.empty()) binding_.BindOutput(names::kNewPending, memory_);
    select_logits(1);
    if (!thresholds_.empty()) {
      std::int64_t const count = static_cast<std::int64_t>(thresholds_.size());
      bind_input(names::kThresholds, exit_thresholds_.data(), {count});
      for (std::size_t k = 0; k < thresholds_.size(); ++k) {
        bind_input(names::skip_threshold(k + 1).c_str(), &skip_thresholds_[k], {1});
      }
      binding_.BindOutput(names::kScores, tensor(scores_.data(), {1, count}));
    }
    bind_input(names::kTotalLength, &total_, {});
  }

  StepResult step(std::int64_t const* ids, std::size_t count, std::int64_t total, std::int64_t logits_to_keep,
                  bool full) override {
    std::size_t segments_run = 1;
    StepResult result;
    try {
      kv_.reserve(total, lengths_);
      bind_sequence();
      bind_ids(ids, count);
      total_ = static_cast<std::int32_t>(total);
      set_step_thresholds(total, full || (propagates_ && (count > 1 || total == 1)));
      std::int64_t const keep = std::min(logits_to_keep, total - lengths_.back());  // tokens of the last segment's run
      if (keep != num_logits_ || keep > 1) select_logits(keep);
      if (!pending_.empty() && (may_skip_ || !no_pending_output_)) {
        binding_.BindOutput(names::kNewPending, memory_);  // bound again, or it keeps the last step's shape
        no_pending_output_ = false;
      }
      backend_.session().Run(run_options_, binding_);
      segments_run += first_above(scores_, skip_thresholds_);
      bool const new_pending = !pending_.empty() && segments_run < lengths_.size();
      std::vector<Ort::Value> outputs;
      if (new_pending || num_logits_ > 1) outputs = binding_.GetOutputValues();
      rows_ = num_logits_ > 1 ? std::move(outputs[pending_.empty() ? 0 : 1]) : Ort::Value(nullptr);
      result.rows = rows_ ? static_cast<std::size_t>(rows_.shape()[0]) : 1;
      result.logits = rows_ ? rows_.data<float>() : logits_.data();
      commit(segments_run, total, static_cast<std::int64_t>(count),
             new_pending ? std::move(outputs[0]) : Ort::Value(nullptr));
    } catch (Ort::Exception const& error) {
      throw GenerationError("ONNX Runtime failed at token " + std::to_string(total) + ": " + first_line(error));
    }
    result.vocabulary = logits_.size();
    result.exit_layer = depths_[first_above(scores_, exit_thresholds_)];
    result.segments_run = static_cast<std::int64_t>(segments_run);
    result.scores = scores_.data();
    return result;
  }

  void rewind(std::int64_t length) override {
    std::vector<std::pair<Pending*, Ort::Value>> replaced;  // and by what
    for (std::size_t k = 0; k < pending_.size(); ++k) {
      if (lengths_[k] <= length || !pending_[k].states) continue;
      std::int64_t const left = std::max<std::int64_t>(length - lengths_[k + 1], 0);
      auto const size = static_cast<std::size_t>(left * manifest_.model.hidden_size);
      float const* const states = pending_[k].states.data<float>();
      replaced.emplace_back(&pending_[k], left > 0 ? copied(states, size) : Ort::Value(nullptr));
    }
    for (auto& [pending, states] : replaced) pending->replace(std::move(states));
    // K/V beyond the new length are overwritten before they are read.
    for (std::int64_t& segment_length : lengths_) segment_length = std::min(segment_length, length);
  }

  void set_thresholds(std::vector<float> const& thresholds) override {
    if (thresholds == thresholds_) return;
    thresholds_ = thresholds;
    forced_from_ = kNoneBound;  // the old thresholds are bound
  }

  std::vector<std::int64_t> const& lengths() const override { return lengths_; }
  std::vector<std::int64_t> const& computed() const override { return propagates_ ? ran_ : lengths_; }
  std::int64_t limit() const override { return context_of(manifest_); }
  std::int64_t capacity() const override { return kv_.capacity(); }

  void resume(std::vector<std::int64_t> const& lengths, std::vector<std::int64_t> const& computed,
              std::vector<std::vector<float>> const& pending) override {
    std::vector<Ort::Value> states;  // before each segment but the first
    for (std::size_t k = 1; k <= pending_.size(); ++k) {
      states.push_back(pending[k].empty() ? Ort::Value(nullptr) : copied(pending[k].data(), pending[k].size()));
    }
    for (std::size_t k = 0; k < pending_.size(); ++k) {
      if (states[k] || pending_[k].states) pending_[k].replace(std::move(states[k]));
    }
    std::copy(lengths.begin(), lengths.end(), lengths_.begin());
    std::copy(computed.begin(), computed.end(), ran_.begin());
  }

  std::vector<std::vector<float>> pending_states() const override {
    std::vector<std::vector<float>> copies(lengths_.size());
    for (std::size_t k = 0; k < pending_.size(); ++k) {
      Ort::Value const& states = pending_[k].states;
      if (!states) continue;
      float const* const first = states.data<float>();
      copies[k + 1].assign(first, first + states.count());
    }
    return copies;
  }

 private:
  // States pending before a segment.
  struct Pending {
    std::string name;
    Ort::Value states{nullptr};  // [1, n, D]; null: none
    bool bound = false;

    void replace(Ort::Value value) {
      states = std::move(value);
      bound = false;
    }
  };

  template <typename T>
  Ort::Value tensor(T* data, std::vector<std::int64_t> const& shape) const {
    return view(memory_, data, shape);
  }

  template <typename T>
  void bind_input(char const* name, T* data, std::vector<std::int64_t> const& shape) {
    binding_.BindInput(name, tensor(data, shape));
  }

  // Binds the buffers and states that were replaced since the last step, or before one that failed.
  void bind_sequence() {
    for (Pending& pending : pending_) {
      if (pending.bound) continue;
      binding_.BindInput(pending.name.c_str(), pending.states ? pending.states : no_tokens_);
      pending.bound = true;
    }
    if (bound_capacity_ == kv_.capacity()) return;
    for (std::size_t const layer : manifest_.model.kv_read(0, manifest_.model.kv_shapes.size())) {
      for (std::size_t kind = 0; kind < std::size(names::kKinds); ++kind) {
        Ort::Value const value = kv_.buffer(layer, kind).tensor(memory_);
        binding_.BindInput(names::past(layer, names::kKinds[kind]).c_str(), value);
        binding_.BindOutput(names::present(layer, names::kKinds[kind]).c_str(), value);
      }
    }
    bound_capacity_ = kv_.capacity();
  }

  void bind_ids(std::int64_t const* ids, std::size_t count) {
    if (count > 1) {
      ids_.assign(ids, ids + count);
      one_id_bound_ = false;
      bind_input(names::kInputIds, ids_.data(), {1, static_cast<std::int64_t>(count)});
      return;
    }
    one_id_ = ids[0];
    if (!one_id_bound_) bind_input(names::kInputIds, &one_id_, {1, 1});
    one_id_bound_ = true;
  }

  // Writes this step's thresholds, if they differ from the last step's. A segment whose pending tokens would exceed
  // `max_pending` is forced to run: their number is known before the step, and it never falls with depth, so that the
  // forced segments are the deepest.
  void set_step_thresholds(std::int64_t total, bool full) {
    std::size_t forced = thresholds_.size();
    while (forced > 0 && !pending_.empty() && total - lengths_[forced] > max_pending_) --forced;
    if (thresholds_.empty() || (forced == forced_from_ && full == all_forced_)) return;
    // In place: this memory is bound.
    for (std::size_t k = 0; k < thresholds_.size(); ++k) {
      exit_thresholds_[k] = full ? static_cast<float>(kNeverExit) : thresholds_[k];
      skip_thresholds_[k] = k < forced ? exit_thresholds_[k] : std::max(exit_thresholds_[k], 1.0f);  // still scored
    }
    forced_from_ = forced;
    all_forced_ = full;
    may_skip_ = std::any_of(skip_thresholds_.begin(), skip_thresholds_.end(), [](float value) { return value < 1; });
  }

  // Requests the logits of the last `count` positions. One row is written to `logits_`; of several, ONNX Runtime
  // allocates the output, because their number is known only when the last segment runs.
  void select_logits(std::int64_t count) {
    std::int64_t const bound = std::exchange(num_logits_, 0);  // in case of an exception
    if (count != bound) {
      logits_positions_.assign(static_cast<std::size_t>(2 * count), 0);
      for (std::int64_t i = 0; i < count; ++i) logits_positions_[static_cast<std::size_t>(2 * i + 1)] = i - count;
      bind_input(names::kLogitsPositions, logits_positions_.data(), {count, 2});
    }
    if (count > 1) {
      binding_.BindOutput(names::kLogits, memory_);
    } else if (bound != 1) {
      binding_.BindOutput(names::kLogits, tensor(logits_.data(), {1, manifest_.model.vocab_size}));
    }
    num_logits_ = count;
  }

  // Updates the sequence at the end of a step, when nothing can fail any more. New pending states become an input of the
  // next step without a copy. Segments that ran have no pending tokens, and of the others only the first has new ones.
  void commit(std::size_t segments_run, std::int64_t total, std::int64_t count, Ort::Value new_pending) noexcept {
    if (propagates_) {
      std::fill(lengths_.begin(), lengths_.end(), total);
      for (std::size_t k = 0; k < segments_run; ++k) ran_[k] += count;
      return;
    }
    for (std::size_t k = 0; k + 1 < segments_run; ++k) {
      if (pending_[k].states) pending_[k].replace(Ort::Value(nullptr));
    }
    no_pending_output_ = !new_pending;
    if (new_pending) pending_[segments_run - 1].replace(std::move(new_pending));
    std::fill_n(lengths_.begin(), segments_run, total);
  }

  // A copy of states [n, D], `size` numbers, as [1, n, D].
  Ort::Value copied(float const* states, std::size_t size) const {
    std::int64_t const width = manifest_.model.hidden_size;
    Ort::Value copy = Ort::Value::floats({1, static_cast<std::int64_t>(size) / width, width});
    std::memcpy(copy.data<float>(), states, size * sizeof(float));
    return copy;
  }

  BranchedBackend& backend_;
  Manifest const& manifest_;
  Ort::MemoryInfo const memory_ = Ort::MemoryInfo::cpu();
  Ort::RunOptions const run_options_;
  Ort::IoBinding binding_;

  KvBuffers own_kv_;
  KvBuffers& kv_;
  std::int64_t bound_capacity_ = 0;  // of the buffers that are bound; 0: none
  std::int64_t const max_pending_;
  bool const propagates_;
  std::vector<std::int64_t> const depths_;

  std::vector<std::int64_t> lengths_;  // tokens in each segment's buffers, shallowest first; never rising
  std::vector<std::int64_t> ran_;      // tokens that each segment has run over, where K/V are propagated

  std::vector<Pending> pending_;  // before segment 1, 2, ...; empty where tokens are never pending
  float no_state_ = 0;
  Ort::Value no_tokens_{nullptr};  // [1, 0, D]

  std::vector<float> thresholds_, exit_thresholds_, skip_thresholds_;  // the caller's; bound
  std::size_t forced_from_ = kNoneBound;  // checkpoints from this one on have a forced skip threshold
  bool all_forced_ = false;
  bool may_skip_ = true;            // whether a score can exceed a bound skip threshold
  bool no_pending_output_ = false;  // whether the last pending output had no tokens

  std::vector<std::int64_t> ids_, logits_positions_;
  std::int64_t one_id_ = 0;
  bool one_id_bound_ = false;
  std::int32_t total_ = 0;
  std::vector<float> scores_, logits_;
  std::int64_t num_logits_ = 0;  // rows of logits that are bound
  Ort::Value rows_{nullptr};     // the last step's logits, where they are not in `logits_`
};

}  // namespace

std::unique_ptr<Sequence> BranchedBackend::start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                              std::int64_t room) {
  bundle().check_weights();
  return std::make_unique<BranchedSequence>(*this, thresholds, max_pending, room);
}

std::unique_ptr<LoneSequence> BranchedBackend::start_lone(ExitRule const& rule, KvBuffers& kv) {
  return std::make_unique<BranchedSequence>(*this, rule.thresholds, rule.max_pending, 0, &kv);
}

}  // namespace tide
