#include "decoding/decoder.h"

#include <stdexcept>

#include "decoding/audited.h"
#include "decoding/lossless.h"
#include "request.h"

namespace tide {
namespace {

// Yields a token per step.
class OneByOne final : public Decoder {
 public:
  OneByOne(Sampler sampler, std::vector<std::int64_t> depths)
      : sampler_(std::move(sampler)), depths_(std::move(depths)) {}

  void begin(std::vector<std::int64_t> const& ids, std::int64_t) override {
    if (length_ == 0) sampler_.begin(ids);
    request_.ids = ids;
  }

  std::vector<Token> take(StepResult const& result) override {
    std::int64_t const passes = depths_[static_cast<std::size_t>(result.segments_run - 1)];
    std::vector<Token> tokens(1);  // before anything changes
    Choice choice = sampler_(result, result.rows - 1);
    length_ += static_cast<std::int64_t>(request_.ids.size());
    tokens[0] = {choice.id, result.exit_layer, passes, std::move(choice.logprobs)};
    return tokens;
  }

 private:
  Sampler sampler_;
  std::vector<std::int64_t> const depths_;
};

}  // namespace

DraftRows const& Decoder::draft_rows() { throw std::logic_error("it asks no drafter"); }

void Decoder::take_draft(DraftResult const&, std::size_t) {}

std::unique_ptr<Decoder> make_decoder(Manifest const& manifest, Request& request, std::size_t number,
                                      std::shared_ptr<Audit> const& audit, DraftsInfo const* drafter,
                                      std::shared_ptr<Balances> const& balances) {
  Sampler sampler = std::move(request.samplers[number]);
  std::size_t const candidates = sampler.candidates();
  std::unique_ptr<Decoder> decoder;
  if (request.drafts) {
    decoder = make_lossless_decoder(manifest.depths(), manifest.model.context_length, std::move(sampler), *request.drafts,
                                    request.stop_token_ids, drafter, balances);
  } else if (audit != nullptr && request.auditable()) {
    decoder = make_audited_decoder(std::move(sampler), manifest.depths(), audit);
  } else {
    decoder = std::make_unique<OneByOne>(std::move(sampler), manifest.depths());
  }
  decoder->candidates = candidates;
  decoder->keeps_states = request.states && request.mode == Mode::full;
  decoder->keeps_exit_states = request.states && request.mode == Mode::exit;
  return decoder;
}

}  // namespace tide
