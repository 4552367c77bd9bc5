// The functions of tide.h for schedulers and their requests.
#include "capi/objects.h"
#include "capi/options.h"

using namespace tide::capi;

tide_status tide_scheduler_create(tide_engine const* engine, char const* limits, tide_scheduler** scheduler) {
  return create(scheduler, [&] {
    auto [held, audit] = tide::scheduler_options(limits);
    if (audit) audit->log = log();
    return tide_scheduler{engine->engine.scheduler(held, audit), engine->text};
  });
}

tide_status tide_scheduler_start(tide_scheduler* scheduler) {
  return guarded([&] { scheduler->scheduler.start(); });
}

int tide_scheduler_step(tide_scheduler* scheduler) { return scheduler->scheduler.step() ? 1 : 0; }
void tide_scheduler_close(tide_scheduler* scheduler, int drain) { scheduler->scheduler.close(drain != 0); }
void tide_scheduler_free(tide_scheduler* scheduler) { delete scheduler; }

tide_scheduler_state tide_scheduler_describe(tide_scheduler const* scheduler) {
  tide::Scheduler const& described = scheduler->scheduler;
  return {described.waiting(), described.running(), described.prefix_cache_bytes(), described.kv_tokens(), described.closed() ? 1 : 0,
          described.in_step() ? 1 : 0};
}

tide_status tide_scheduler_audit(tide_scheduler const* scheduler, tide_audit* audit) {
  auto const found = scheduler->scheduler.audit();
  if (!found) return TIDE_ENDED;
  *audit = {found->audited, found->checked, found->different, found->raises, found->upper_bound, found->lower_bound};
  return TIDE_OK;
}

tide_status tide_scheduler_watch(tide_scheduler* scheduler, int descriptor) {
  return guarded([&] { scheduler->scheduler.watch(descriptor); });
}

void tide_scheduler_unwatch(tide_scheduler* scheduler, int descriptor) { scheduler->scheduler.unwatch(descriptor); }

tide_status tide_submit(tide_scheduler* scheduler, std::int64_t const* prompt, std::size_t count, char const* options,
                        tide_hooks const* hooks, double const* timeout, tide_request** request) {
  return create(request, [&] {
    tide::GenerationConfig const config = config_of(*scheduler->text, options, hooks);
    return tide_request{scheduler->scheduler.submit(vector_of(prompt, count), config,
                                                    timeout == nullptr ? std::nullopt : std::optional(*timeout))};
  });
}

tide_status tide_request_next(tide_request* request, tide_token* token) {
  return alone(request, [&] {
    auto const made = request->handle.next();
    if (!made) return TIDE_ENDED;
    request->logprobs = logprobs_of(made->id, made->logprobs);
    *token = token_of(*made, request->logprobs);
    return TIDE_OK;
  });
}

tide_status tide_request_result(tide_request* request, tide_generation** generation) {
  return alone(request, [&] {
    return create(generation, [&] { return tide_generation(request->handle.result()); });
  });
}

void tide_request_wait(tide_request const* request, std::size_t from, double seconds) {
  guarded([&] { request->handle.wait(from, seconds); });
}

std::size_t tide_request_read(tide_request const* request, std::size_t from, std::int64_t* ids, std::size_t room,
                              tide_status* status) {
  std::size_t count = 0;
  *status = guarded([&] {
    count = request->handle.read(from, ids, room);
    if (!request->handle.finished(from + count)) return TIDE_OK;
    if (auto const error = request->handle.error()) std::rethrow_exception(error);
    return TIDE_ENDED;
  });
  return count;
}

std::size_t tide_request_logprobs(tide_request const* request, std::size_t token, tide_logprob* entries, std::size_t room) {
  tide::Logprobs found;
  guarded([&] {
    auto const made = request->handle.token(token);
    if (made) found = logprobs_of(made->id, made->logprobs);
  });
  std::copy_n(found.begin(), std::min(room, found.size()), entries);
  return found.size();
}

std::size_t tide_request_text(tide_request const* request, std::size_t from, char* text, std::size_t room) {
  std::string found;
  guarded([&] { found = request->handle.text(from); });
  std::copy_n(found.begin(), std::min(room, found.size()), text);
  return found.size();
}

tide_status tide_request_so_far(tide_request const* request, tide_generation** generation) {
  return create(generation, [&] {
    bool const ended = request->handle.finish_reason().has_value();  // before the copy, which may then be of its end
    return tide_generation(request->handle.so_far(), ended);
  });
}

char const* tide_request_mode(tide_request const* request) { return name_of(request->handle.mode()).data(); }
std::int64_t tide_request_cached_tokens(tide_request const* request) { return request->handle.cached_tokens(); }
void tide_request_cancel(tide_request* request) { request->handle.cancel(); }
void tide_request_free(tide_request* request) { delete request; }
