// Generates the tokens of one prompt as they are read.
#include "request.h"
#include "scheduling/list_limits.h"
#include "scheduling/step_loop.h"
#include "sequence.h"
#include "tide/runtime.h"

namespace tide {

// A loop with one job.
class TokenStream::Impl {
 public:
  Impl(std::shared_ptr<Backend> const& backend, std::vector<std::int64_t> const& prompt, std::shared_ptr<Request> request,
       std::function<bool(Token const&)> on_token)
      : job_(new Job(backend->manifest(), prompt, std::move(request), 0, std::nullopt, std::move(on_token)),
             backend->process()),
        loop_(new StepLoop(backend, job_, list_limits(1, prompt.size())), backend->process()) {}

  bool step() {
    if (!ended()) loop_->step_stream();
    return !ended();
  }

  bool ended() const { return job_->ended(); }
  Generation so_far() const { return job_->generation(); }
  std::vector<Token> const& tokens() const { return job_->tokens(); }

 private:
  std::shared_ptr<Job> const job_;
  std::shared_ptr<StepLoop> const loop_;
};

TokenStream::TokenStream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TokenStream::TokenStream(TokenStream&&) noexcept = default;
TokenStream& TokenStream::operator=(TokenStream&&) noexcept = default;
TokenStream::~TokenStream() = default;

bool TokenStream::step() { return impl_->step(); }

std::optional<Token> TokenStream::next() {
  while (read_ == tokens().size() && !ended()) step();
  if (read_ == tokens().size()) return std::nullopt;
  return tokens()[read_++];
}

std::vector<Token> const& TokenStream::tokens() const { return impl_->tokens(); }
bool TokenStream::ended() const { return impl_->ended(); }
Generation TokenStream::so_far() const { return impl_->so_far(); }

TokenStream Engine::open_stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config,
                                std::function<bool(Token const&)> on_token) const {
  check_prompt(manifest(), prompt, "the prompt");
  backend_->process().check();
  auto request = std::make_shared<Request>(*backend_, without_auto(backend_->bundle(), config, auto_mode(), false),
                                           std::nullopt);
  return TokenStream(std::make_unique<TokenStream::Impl>(backend_, prompt, std::move(request), std::move(on_token)));
}

TokenStream Engine::open_stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config) const {
  return open_stream(prompt, config, nullptr);
}

Generation Engine::generate(std::vector<std::int64_t> const& prompt, GenerationConfig const& config) const {
  return stream(prompt, config, nullptr);
}

Generation Engine::stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config,
                          std::function<bool(Token const&)> const& on_token) const {
  TokenStream stream = open_stream(prompt, config, on_token);
  while (stream.step()) {
  }
  return stream.so_far();
}

}  // namespace tide
