// Generates for one prompt, or for a list of prompts as a batch. An engine holds what all sequences share; everything
// that belongs to one generation is on its caller's stack, so that any number of threads may generate at once.
#include <algorithm>
#include <chrono>

#include "decoding/continuous_batching.h"
#include "decoding/decoder.h"
#include "decoding/generation.h"
#include "generation_error.h"
#include "packed/networks.h"
#include "request.h"
#include "sequence.h"
#include "tide/runtime.h"

namespace tide {

std::string_view name_of(FinishReason reason) {
  constexpr std::string_view names[] = {"stop", "length", "context", "cancelled"};
  return names[static_cast<std::size_t>(reason)];
}

Engine::Engine(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}

Engine Engine::load(std::filesystem::path const& bundle, LoadOptions const& options) {
  return Engine(open_backend(open_bundle(bundle, options.verify), options));
}

Manifest const& Engine::manifest() const { return backend_->manifest(); }

std::optional<AutoMode> Engine::auto_mode() const {
  auto const& measured = manifest().auto_mode;
  return measured && measured->provider == backend_->provider() ? measured : std::nullopt;
}

GenerationConfig Engine::resolved(GenerationConfig const& config) const {
  return without_auto(backend_->bundle(), config, auto_mode(), true);
}

std::int64_t Engine::max_batch_size() const {
  BatchNetworks const* const networks = backend_->batch_networks();
  return networks == nullptr ? 1 : static_cast<std::int64_t>(networks->max_batch_size());
}

Generation Engine::generate(std::vector<std::int64_t> const& prompt, GenerationConfig const& config) const {
  return stream(prompt, config, nullptr);
}

Generation Engine::stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config,
                          std::function<bool(Token const&)> const& on_token) const {
  check_prompt(manifest(), prompt, "the prompt");
  GenerationConfig const resolved = without_auto(backend_->bundle(), config, auto_mode(), false);
  Request request(backend_->bundle(), resolved, std::nullopt);
  State state = start(request.thresholds, request.max_pending);
  std::unique_ptr<Decoder> const decoder = make_decoder(manifest(), request, 0);
  Progress progress(manifest(), prompt, request);
  while (!progress.ended()) {
    auto const started = std::chrono::steady_clock::now();
    progress.begin(*decoder);
    std::vector<Token> const block = run_block(*decoder, state);
    std::chrono::duration<double> const seconds = std::chrono::steady_clock::now() - started;
    progress.take(block, *decoder, state.computed(), seconds.count(), on_token);
  }
  return progress.finished();
}

std::vector<Generation> Engine::generate(std::vector<std::vector<std::int64_t>> const& prompts,
                                         GenerationConfig const& config) const {
  return stream(prompts, config, nullptr);
}

std::vector<Generation> Engine::stream(std::vector<std::vector<std::int64_t>> const& prompts,
                                       GenerationConfig const& config,
                                       std::function<bool(std::size_t, Token const&)> const& on_token) const {
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    check_prompt(manifest(), prompts[i], "prompt " + std::to_string(i + 1));
  }
  BatchNetworks* const networks = backend_->batch_networks();
  if (networks == nullptr) {
    throw GenerationError("this runtime decodes one prompt at a time on the engines of bundle '" +
                          backend_->bundle().path.string() + "': give one prompt at a time, or use provider 'cpu'");
  }
  Request request(backend_->bundle(), resolved(config), prompts.size());
  std::unique_ptr<PackedBatch> const batch = empty_batch(networks->sessions(prompts.size()), manifest(), request);
  std::vector<Progress> progress;
  progress.reserve(prompts.size());
  std::vector<std::unique_ptr<Decoder>> decoders;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    progress.emplace_back(manifest(), prompts[i], request);
    decoders.push_back(make_decoder(manifest(), request, i));
  }
  generate_batch(*batch, progress, decoders, on_token);
  std::vector<Generation> generations;
  for (Progress& one : progress) generations.push_back(one.finished());
  return generations;
}

State Engine::start(std::vector<double> const& thresholds, std::optional<std::int64_t> max_pending,
                    std::int64_t room) const {
  check_thresholds(manifest(), thresholds);
  room = std::min(whole_number("room", room, 0), kNoLimit);
  std::int64_t const limit = pending_limit(manifest(), max_pending);
  return or_generation_error("cannot start a sequence",
                             [&] { return State(backend_, thresholds, limit, room); });
}

}  // namespace tide
