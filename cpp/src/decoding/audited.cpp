#include "decoding/audited.h"

#include <optional>
#include <utility>

#include "scheduling/audit.h"

namespace tide {
namespace {

// The part of a step's result that a token is chosen from, kept while another step runs.
struct KeptRow {
  KeptRow(StepResult const& result, std::int64_t run) : exit_layer(result.exit_layer), passes(run) {
    if (result.candidates != nullptr) {
      candidates = result.candidates[result.rows - 1];
    } else {
      logits.assign(result.last(), result.last() + result.vocabulary);
    }
  }

  StepResult result() const {
    StepResult kept;
    kept.rows = 1;
    kept.vocabulary = logits.size();
    kept.logits = logits.empty() ? nullptr : logits.data();
    kept.candidates = logits.empty() ? &candidates : nullptr;
    return kept;
  }

  std::int64_t exit_layer, passes;
  std::vector<float> logits;
  Candidates candidates;
};

class AuditedDecoder final : public Decoder {
 public:
  AuditedDecoder(Sampler sampler, std::vector<std::int64_t> depths, std::shared_ptr<Audit> audit)
      : Decoder(std::move(sampler), std::move(depths)), audit_(std::move(audit)), raises_(audit_->raises()) {}

  void begin_block(std::vector<std::int64_t> const& ids, std::int64_t) override {
    request_ = {ids, 1, false};
    chosen_ = audit_->chooses();
    early_.reset();
  }

  std::vector<Token> take(StepResult const& result) override {
    auto const ran = static_cast<std::int64_t>(request_.ids.size());
    if (early_) return compare(result);
    if (chosen_ && result.exit_layer < depths_.back()) {
      early_.emplace(result, passes(result));
      length_ += ran - 1;  // the last position is run again
      request_ = {{request_.ids.back()}, 1, true};
      return {};
    }
    Choice choice = sampler_(result, result.rows - 1);
    length_ += ran;
    if (chosen_) audit_->record(false, false, raises_);
    return {{choice.id, result.exit_layer, passes(result), std::move(choice.logprobs)}};
  }

 private:
  // The token of the early exit, which is compared with that of full depth.
  std::vector<Token> compare(StepResult const& full) {
    std::size_t const before = sampler_.length();
    std::int64_t const expected = sampler_(full, full.rows - 1).id;
    sampler_.rewind(before);
    Choice choice = sampler_(early_->result(), 0);
    ++length_;
    audit_->record(true, choice.id != expected, raises_);
    return {{choice.id, early_->exit_layer, early_->passes + passes(full), std::move(choice.logprobs)}};
  }

  std::shared_ptr<Audit> const audit_;
  std::int64_t const raises_;      // when the sequence began
  bool chosen_ = false;            // whether the token of the block is audited
  std::optional<KeptRow> early_;  // of its early exit, while it runs at full depth
};

}  // namespace

std::unique_ptr<Decoder> make_audited_decoder(Sampler sampler, std::vector<std::int64_t> depths,
                                              std::shared_ptr<Audit> audit) {
  return std::make_unique<AuditedDecoder>(std::move(sampler), std::move(depths), std::move(audit));
}

}  // namespace tide
