#include "tide/tide.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "capi/options.h"

struct tide_engine {
  tide::Engine engine;
};

struct tide_generation {
  explicit tide_generation(tide::Generation made) : generation(std::move(made)), stats(generation.stats.json()) {}

  tide::Generation generation;
  std::string stats;
};

struct tide_scheduler {
  tide::Scheduler scheduler;
};

struct tide_request {
  tide::RequestHandle handle;
};

namespace {

constexpr char const* kNoMemory = "not enough memory";

thread_local std::string error_text;
thread_local char const* last_error = "";

tide_status fail(tide_status status, char const* text) noexcept {
  try {
    error_text = text;
    last_error = error_text.c_str();
  } catch (...) {
    last_error = kNoMemory;
  }
  return status;
}

// The status of what is being handled.
tide_status fail() noexcept {
  try {
    throw;
  } catch (tide::ConfigError const& error) {
    return fail(TIDE_CONFIG_ERROR, error.what());
  } catch (tide::BundleError const& error) {
    return fail(TIDE_BUNDLE_ERROR, error.what());
  } catch (tide::QueueFullError const& error) {
    return fail(TIDE_QUEUE_FULL, error.what());
  } catch (tide::GenerationError const& error) {
    return fail(TIDE_GENERATION_ERROR, error.what());
  } catch (tide::ProviderError const& error) {
    return fail(TIDE_PROVIDER_ERROR, error.what());
  } catch (std::bad_alloc const&) {
    return fail(TIDE_NO_MEMORY, kNoMemory);
  } catch (std::exception const& error) {
    return fail(TIDE_INTERNAL_ERROR, error.what());
  } catch (...) {
    return fail(TIDE_INTERNAL_ERROR, "an exception of another language");
  }
}

// Sets `*result` to a new object of what `make` returns.
template <typename T, typename F>
tide_status create(T** result, F const& make) noexcept {
  try {
    *result = new T{make()};
    return TIDE_OK;
  } catch (...) {
    return fail();
  }
}

std::vector<std::int64_t> ids(std::int64_t const* prompt, std::size_t count) { return {prompt, prompt + count}; }

tide_token c_token(tide::Token const& token) { return {token.id, token.exit_layer, token.layers_run}; }

}  // namespace

char const* tide_version() { return TIDE_EXPORT_VERSION; }
char const* tide_last_error() { return last_error; }

tide_status tide_load(char const* bundle, char const* options, tide_engine** engine) {
  return create(engine, [&] { return tide::Engine::load(bundle, tide::load_options(options)); });
}

void tide_engine_free(tide_engine* engine) { delete engine; }

std::int64_t tide_max_batch_size(tide_engine const* engine) { return engine->engine.max_batch_size(); }

tide_status tide_generate(tide_engine const* engine, std::int64_t const* prompt, std::size_t count, char const* options,
                          tide_generation** generation) {
  return create(generation, [&] {
    return engine->engine.generate(ids(prompt, count), tide::generation_config(options));
  });
}

tide_status tide_stream(tide_engine const* engine, std::int64_t const* prompt, std::size_t count, char const* options,
                        tide_on_token on_token, void* context, tide_generation** generation) {
  return create(generation, [&] {
    return engine->engine.stream(ids(prompt, count), tide::generation_config(options), [&](tide::Token const& made) {
      tide_token const token = c_token(made);
      return on_token(context, &token) != 0;
    });
  });
}

std::int64_t const* tide_generation_tokens(tide_generation const* generation, std::size_t* count) {
  *count = generation->generation.tokens.size();
  return generation->generation.tokens.data();
}

char const* tide_generation_finish_reason(tide_generation const* generation) {
  return name_of(generation->generation.finish_reason).data();  // of a literal
}

char const* tide_generation_stats(tide_generation const* generation) { return generation->stats.c_str(); }

void tide_generation_free(tide_generation* generation) { delete generation; }

tide_status tide_scheduler_create(tide_engine const* engine, char const* limits, tide_scheduler** scheduler) {
  return create(scheduler, [&] { return engine->engine.scheduler(tide::scheduler_limits(limits)); });
}

tide_status tide_scheduler_start(tide_scheduler* scheduler) {
  try {
    scheduler->scheduler.start();
    return TIDE_OK;
  } catch (...) {
    return fail();
  }
}

int tide_scheduler_step(tide_scheduler* scheduler) { return scheduler->scheduler.step() ? 1 : 0; }
void tide_scheduler_close(tide_scheduler* scheduler, int drain) { scheduler->scheduler.close(drain != 0); }
void tide_scheduler_free(tide_scheduler* scheduler) { delete scheduler; }

tide_status tide_submit(tide_scheduler* scheduler, std::int64_t const* prompt, std::size_t count, char const* options,
                        double const* timeout, tide_request** request) {
  return create(request, [&] {
    return scheduler->scheduler.submit(ids(prompt, count), tide::generation_config(options),
                                       timeout == nullptr ? std::nullopt : std::optional<double>(*timeout));
  });
}

tide_status tide_request_next(tide_request* request, tide_token* token) {
  try {
    auto const made = request->handle.next();
    if (!made) return TIDE_ENDED;
    *token = c_token(*made);
    return TIDE_OK;
  } catch (...) {
    return fail();
  }
}

tide_status tide_request_result(tide_request* request, tide_generation** generation) {
  return create(generation, [&] { return request->handle.result(); });
}

void tide_request_cancel(tide_request* request) { request->handle.cancel(); }
void tide_request_free(tide_request* request) { delete request; }
