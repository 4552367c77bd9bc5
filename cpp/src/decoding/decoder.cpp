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
  using Decoder::Decoder;

  void begin_block(std::vector<std::int64_t> const& ids, std::int64_t) override { request_.ids = ids; }

  std::vector<Token> take(StepResult const& result) override {
    std::vector<Token> tokens(1);  // before anything changes
    Choice choice = sampler_(result, result.rows - 1);
    length_ += static_cast<std::int64_t>(request_.ids.size());
    tokens[0] = {choice.id, result.exit_layer, passes(result), std::move(choice.logprobs)};
    return tokens;
  }
};

}  // namespace

DraftRows const& Decoder::draft_rows() { throw std::logic_error("it asks no drafter"); }

void Decoder::take_draft(DraftResult const&, std::size_t) {}

std::unique_ptr<Decoder> make_decoder(Manifest const& manifest, Request& request, std::size_t number,
                                      std::shared_ptr<Audit> const& audit, DraftsInfo const* drafter,
                                      std::shared_ptr<SharedDrafting> const& shared) {
  Sampler sampler = std::move(request.samplers[number]);
  if (request.drafts) {
    return make_lossless_decoder(manifest.depths(), manifest.model.context_length, std::move(sampler), *request.drafts,
                                 request.stop_token_ids, shared, drafter, request.cache_root, request.prediction);
  }
  if (audit != nullptr && request.auditable()) return make_audited_decoder(std::move(sampler), manifest.depths(), audit);
  return std::make_unique<OneByOne>(std::move(sampler), manifest.depths());
}

}  // namespace tide
