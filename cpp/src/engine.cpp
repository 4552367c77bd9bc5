// The runtime's front door. An engine holds what all sequences share; all that belongs to one generation lives on its
// caller's stack, so any number of threads may generate at once.
#include <algorithm>
#include <chrono>

#include "decoding/continuous_batching.h"
#include "packed/networks.h"
#include "decoding/decoder.h"
#include "decoding/generation.h"
#include "request.h"
#include "decoding/sampling.h"
#include "backend.h"
#include "formatting.h"
#include "tide/runtime.h"

namespace tide {
namespace {

// A request that was checked, with the bundle's own values where it says nothing.
struct Checked {
  // `prompts` have been checked; none: it is one by itself, not a list.
  Checked(Bundle const& bundle, Request const& request, std::optional<std::size_t> prompts)
      : most(whole_number("max_new_tokens", request.max_new_tokens, 1)),
        thresholds(resolve_thresholds(bundle.manifest, request)),
        drafts(draft_limits(bundle, request)),
        // A decoder that drafts says itself when to verify.
        waiting(drafts ? kNoLimit : waiting_limit(bundle.manifest, request.max_pending)) {
    auto const seeds = prompts ? seeds_of(request, *prompts) : std::vector{seed_of(request)};
    for (std::optional<std::int64_t> const seed : seeds) samplers.emplace_back(request, seed);
    check_sampling(request);
    check_exits(bundle, request, prompts.has_value());
    stops = stops_of(bundle.manifest, request);
  }

  std::int64_t most;
  std::vector<double> thresholds;
  std::optional<DraftLimits> drafts;
  std::int64_t waiting;
  std::vector<Sampler> samplers;
  std::set<std::int64_t> stops;
};

}  // namespace

std::string_view name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::context:
      return "context";
    case FinishReason::cancelled:
      break;
  }
  return "cancelled";
}

Engine::Engine(std::shared_ptr<Session> session) : session_(std::move(session)) {}

Engine Engine::load(std::filesystem::path const& bundle, LoadOptions const& options) {
  return Engine(open_session(open_bundle(bundle, options.verify), options));
}

Manifest const& Engine::manifest() const { return session_->manifest(); }

std::int64_t Engine::max_batch_size() const {
  BatchNetworks const* const networks = session_->batch_networks();
  return networks == nullptr ? 1 : static_cast<std::int64_t>(networks->max_batch_size());
}

Generation Engine::generate(std::vector<std::int64_t> const& prompt, Request const& request) const {
  return stream(prompt, request, nullptr);
}

Generation Engine::stream(std::vector<std::int64_t> const& prompt, Request const& request,
                          std::function<bool(Token const&)> const& on_token) const {
  check_prompt(manifest(), prompt, "the prompt");
  Checked checked(session_->bundle(), request, std::nullopt);
  State state = start(checked.thresholds, checked.waiting);
  std::unique_ptr<Decoder> const decoder =
      make_decoder(manifest(), std::move(checked.samplers[0]), checked.drafts, checked.stops);
  Progress progress(manifest(), prompt, checked.most, checked.stops);
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
                                         Request const& request) const {
  return stream(prompts, request, nullptr);
}

std::vector<Generation> Engine::stream(std::vector<std::vector<std::int64_t>> const& prompts, Request const& request,
                                       std::function<bool(std::size_t, Token const&)> const& on_token) const {
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    check_prompt(manifest(), prompts[i], "prompt " + std::to_string(i + 1));
  }
  BatchNetworks* const networks = session_->batch_networks();
  if (networks == nullptr) {
    throw GenerationError("this runtime decodes one prompt at a time on the engines of bundle '" +
                          session_->bundle().path.string() + "': give one prompt at a time, or use provider 'cpu'");
  }
  Checked checked(session_->bundle(), request, prompts.size());
  double const share = share_of(manifest(), request);
  std::unique_ptr<Batch> const batch = empty_batch(networks->sessions(prompts.size()), manifest(),
                                                   checked.thresholds, checked.waiting, share);
  std::vector<Progress> progress;
  progress.reserve(prompts.size());
  std::vector<std::unique_ptr<Decoder>> decoders;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    progress.emplace_back(manifest(), prompts[i], checked.most, checked.stops);
    decoders.push_back(make_decoder(manifest(), std::move(checked.samplers[i]), checked.drafts, checked.stops));
  }
  generate_batch(*batch, progress, decoders, on_token);
  std::vector<Generation> made;
  for (Progress& one : progress) made.push_back(one.finished());
  return made;
}

State Engine::start(std::vector<double> const& thresholds, std::optional<std::int64_t> max_pending,
                    std::int64_t room) const {
  check_thresholds(manifest(), thresholds);
  std::int64_t const spare = std::min(whole_number("room", room, 0), kNoLimit);
  std::int64_t const waiting = waiting_limit(manifest(), max_pending);
  try {
    return State(session_, thresholds, waiting, spare);
  } catch (TideError const&) {
    throw;
  } catch (std::exception const& error) {  // ONNX Runtime's, or no memory
    throw GenerationError("cannot start a sequence: " + first_line(error));
  }
}

}  // namespace tide
