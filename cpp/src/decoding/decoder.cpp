#include "decoding/decoder.h"

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
    length_ += static_cast<std::int64_t>(request_.ids.size());
    std::int64_t const passes = depths_[static_cast<std::size_t>(result.segments_run - 1)];
    Choice choice = sampler_(result, result.rows - 1);
    return {{choice.id, result.exit_layer, passes, std::move(choice.logprobs)}};
  }

 private:
  Sampler sampler_;
  std::vector<std::int64_t> const depths_;
};

}  // namespace

std::unique_ptr<Decoder> make_decoder(Manifest const& manifest, Request& request, std::size_t number) {
  Sampler sampler = std::move(request.samplers[number]);
  std::size_t const candidates = sampler.candidates();
  std::unique_ptr<Decoder> decoder;
  if (request.drafts) {
    decoder = make_lossless_decoder(manifest, std::move(sampler), *request.drafts, request.stop_token_ids);
  } else {
    decoder = std::make_unique<OneByOne>(std::move(sampler), manifest.depths());
  }
  decoder->candidates = candidates;
  return decoder;
}

std::vector<Token> run_block(Decoder& decoder, State& state) {
  std::vector<Token> tokens;
  while (tokens.empty()) {
    StepRequest const& step = decoder.request();
    tokens = decoder.take(state.step(step.ids, step.logits_to_keep, step.full));
  }
  if (state.length() > decoder.length()) state.rewind(decoder.length());
  return tokens;
}

}  // namespace tide
