// Generates for one prompt, or for a list of prompts as a batch. An engine holds what all sequences share; everything
// that belongs to one generation is on its caller's stack, so that any number of threads may generate at once.
#include <algorithm>

#include "bundle/verification.h"
#include "generation_error.h"
#include "request.h"
#include "scheduling/audit.h"
#include "scheduling/list_limits.h"
#include "scheduling/step_loop.h"
#include "sequence.h"
#include "text/tokenizer.h"
#include "tide/batch.h"
#include "tide/runtime.h"

namespace tide {
namespace {

constexpr std::size_t kMaxPrompts = std::size_t{1} << 24;

constexpr std::int64_t kMostSlots = 1024;

// As many as that, or as a backend takes.
std::size_t checked_slots(std::int64_t slots) {
  if (whole_number("slots", slots, 1) <= kMostSlots) return static_cast<std::size_t>(slots);
  throw GenerationError("slots must be a whole number from 1 to " + std::to_string(kMostSlots) + ", not " +
                        std::to_string(slots));
}

}  // namespace

std::string_view name_of(FinishReason reason) {
  constexpr std::string_view names[] = {"stop", "length", "context", "cancelled", "timeout"};
  return names[static_cast<std::size_t>(reason)];
}

Engine::Engine(std::shared_ptr<Backend> backend) {
  Process const process = backend->process();
  auto* const owner = new std::shared_ptr<Backend>(std::move(backend));
  backend_ = std::shared_ptr<Backend>(owner->get(), [owner, process](Backend*) { process(owner); });
}

Engine Engine::load(std::filesystem::path const& bundle, LoadOptions const& options) {
  Bundle opened = open_bundle(bundle, false, options.opened);
  if (!options.verify) return Engine(open_backend(std::move(opened), options));
  Verification verification(opened);
  std::shared_ptr<Backend> backend;
  try {
    backend = open_backend(std::move(opened), options);
  } catch (std::exception const&) {
    verification.wait();  // a file that is corrupt is the reason to name
    throw;
  }
  verification.wait();
  return Engine(std::move(backend));
}

Manifest const& Engine::manifest() const { return backend_->manifest(); }
std::string const& Engine::manifest_text() const { return backend_->bundle().manifest_text; }
std::string const& Engine::provider() const { return backend_->provider(); }

Drafting Engine::drafting(GenerationConfig config) const {
  config.mode = Mode::lossless;
  Drafting drafting = drafting_of(manifest(), config);
  DraftLimits limits = *draft_limits(*backend_, config);
  drafting.max_drafts = limits.max_drafts;
  drafting.prompt_lookup = limits.prompt_lookup;
  drafting.max_learned = manifest().drafter ? limits.drafter : 0;
  drafting.draft_costs = std::move(limits.costs.exits);
  drafting.verify_costs = std::move(limits.costs.verify);
  drafting.drafter_cost = limits.costs.drafter;
  drafting.costs_source = limits.costs_source;
  return drafting;
}

std::optional<AutoMode> Engine::auto_mode(std::int64_t sequences) const {
  auto const& measured = manifest().auto_mode;
  bool const holds = measured && measured->provider == backend_->provider() &&
                     measured->is_of(std::min(sequences, max_batch_size()));
  return holds ? measured : std::nullopt;
}

GenerationConfig Engine::resolved(GenerationConfig const& config, std::int64_t sequences) const {
  return without_auto(backend_->bundle(), config, auto_mode(sequences), true);
}

std::int64_t Engine::max_batch_size() const {
  return static_cast<std::int64_t>(backend_->max_batch_size());
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
  auto const request =
      std::make_shared<Request>(*backend_, resolved(config, list_slots(prompts.size())), prompts.size());
  if (prompts.empty()) return {};
  backend_->process().check();
  std::size_t tokens = 0;
  for (auto const& prompt : prompts) tokens += prompt.size();
  SchedulerLimits const limits = list_limits(prompts.size(), tokens);
  auto batch = backend_->start_batch(request->compaction_threshold, static_cast<std::size_t>(limits.slots));
  StepLoop loop(backend_, std::move(batch), limits, nullptr);
  loop.end_together();
  std::vector<std::shared_ptr<Job>> jobs;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    std::function<bool(Token const&)> callback;
    if (on_token) callback = [&on_token, i](Token const& token) { return on_token(i, token); };
    jobs.push_back(std::make_shared<Job>(manifest(), prompts[i], request, i, std::nullopt, std::move(callback)));
    loop.add(jobs.back());
  }
  for (bool more = true; more;) {
    more = loop.step();
    if (loop.failure()) std::rethrow_exception(loop.failure());
  }
  std::vector<Generation> generations;
  for (auto const& job : jobs) generations.push_back(job->finished());
  return generations;
}

Scheduler Engine::scheduler(SchedulerLimits const& limits) const { return scheduler(limits, std::nullopt); }

Scheduler Engine::scheduler(SchedulerLimits const& limits, std::optional<AuditConfig> const& audit) const {
  backend_->process().check();
  std::shared_ptr<Audit> opened = open_audit(backend_->bundle(), audit);
  std::size_t const slots = checked_slots(limits.slots);
  whole_number("prompt_tokens", limits.prompt_tokens, 1);
  if (limits.waiting) whole_number("waiting", *limits.waiting, 1);
  if (limits.kv_tokens) whole_number("kv_tokens", *limits.kv_tokens, 1);
  whole_number("prefix_cache_bytes", limits.prefix_cache_bytes, 0);
  whole_number("answer_bytes", limits.answer_bytes, 0);
  double const share = limits.compaction_threshold.value_or(manifest().compaction_threshold);
  number_within("compaction_threshold", share, 0, 1);
  auto batch = backend_->start_batch(share, slots);
  std::shared_ptr<StepLoop> loop(new StepLoop(backend_, std::move(batch), limits, opened), backend_->process());
  return Scheduler(*this, limits.slots, std::move(loop), std::move(opened));
}

GenerationConfig Engine::checked(GenerationConfig const& config, std::optional<std::size_t> prompts) const {
  if (prompts.value_or(0) > kMaxPrompts) {
    throw GenerationError("a list has at most " + std::to_string(kMaxPrompts) + " prompts, not " + std::to_string(*prompts));
  }
  std::optional<AutoMode> const measured = auto_mode(list_slots(prompts.value_or(1)));
  GenerationConfig resolved = without_auto(backend_->bundle(), config, measured, prompts.has_value());
  Request const request(*backend_, resolved, prompts);
  if (prompts) resolved.compaction_threshold = request.compaction_threshold;
  return resolved;
}

BatchState Engine::start_batch(double compaction_threshold, std::int64_t slots) const {
  backend_->process().check();
  return BatchState(backend_, compaction_threshold, checked_slots(slots));
}

Tokenizer Engine::tokenizer(std::optional<std::filesystem::path> const& library) const {
  return open_tokenizer(backend_->bundle(), library);
}

State Engine::start(std::vector<double> const& thresholds, std::optional<std::int64_t> max_pending,
                    std::optional<std::string> const& adapter) const {
  backend_->process().check();
  check_thresholds(manifest(), thresholds);
  std::int64_t const limit = pending_limit(manifest(), max_pending);
  std::int64_t const row = adapter_of(*backend_, adapter);
  return or_generation_error("cannot start a sequence", [&] {
    return State(backend_, thresholds, limit, row);
  });
}

}  // namespace tide
