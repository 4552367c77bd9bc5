#include "tide/tide.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "capi/options.h"

namespace tide {

// A bundle's tokenizer, opened when it is first needed.
class Text {
 public:
  Text(Engine engine, std::optional<std::filesystem::path> library)
      : engine_(std::move(engine)), library_(std::move(library)) {}

  Tokenizer tokenizer() {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (!tokenizer_) tokenizer_ = engine_.tokenizer(library_);
    return *tokenizer_;
  }

 private:
  Engine const engine_;
  std::optional<std::filesystem::path> const library_;
  std::mutex mutex_;
  std::optional<Tokenizer> tokenizer_;
};

using Logprobs = std::vector<tide_logprob>;

// Of a token and of the most likely ones; empty where `made` is none.
static Logprobs c_logprobs(std::int64_t token, std::optional<TokenLogprobs> const& made) {
  if (!made) return {};
  Logprobs values{{token, made->logprob}};
  for (auto const& [id, logprob] : made->top) values.push_back({id, logprob});
  return values;
}

}  // namespace tide

struct tide_engine {
  tide::Engine engine;
  std::shared_ptr<tide::Text> text;
};

struct tide_generation {
  explicit tide_generation(tide::Generation made) : generation(std::move(made)), stats(generation.stats.json()) {
    for (std::size_t i = 0; i < generation.logprobs.size(); ++i) {
      logprobs.push_back(tide::c_logprobs(generation.tokens[i], generation.logprobs[i]));
    }
  }

  tide::Generation generation;
  std::string stats;
  std::vector<tide::Logprobs> logprobs;
};

struct tide_scheduler {
  tide::Scheduler scheduler;
  std::shared_ptr<tide::Text> text;
};

struct tide_request {
  tide::RequestHandle handle;
  tide::Logprobs logprobs = {};  // of the last token read
};

struct tide_text_stream {
  tide::TextStream stream;
  std::string piece = {};
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

template <typename F>
tide_status guarded(F const& work) noexcept {
  try {
    work();
    return TIDE_OK;
  } catch (...) {
    return fail();
  }
}

// Sets `*result` to a new object of what `make` returns.
template <typename T, typename F>
tide_status create(T** result, F const& make) noexcept {
  return guarded([&] { *result = new T(make()); });
}

std::vector<std::int64_t> ids(std::int64_t const* prompt, std::size_t count) { return {prompt, prompt + count}; }

// logprobs: those of the token; the result refers to them.
tide_token c_token(tide::Token const& token, tide::Logprobs const& logprobs) {
  return {token.id, token.exit_layer, token.layers_run, logprobs.empty() ? nullptr : logprobs.data(), logprobs.size()};
}

tide::GenerationConfig config_of(tide::Text& text, char const* options, tide_logits_processor const* processor) {
  tide::GenerationConfig config = tide::generation_config(options, [&] { return text.tokenizer(); });
  if (processor == nullptr) return config;
  config.logits_processor = [given = *processor](std::vector<std::int64_t> const& ids, float* logits,
                                                 std::size_t vocabulary) {
    if (given.process(given.context, ids.data(), ids.size(), logits, vocabulary) == 0) {
      throw std::runtime_error("it returned 0");
    }
  };
  return config;
}

// Sets what a function of a text stream returns.
template <typename F>
tide_status put_piece(tide_text_stream* stream, char const** piece, std::size_t* size, F const& make) noexcept {
  return guarded([&] {
    stream->piece = make();
    *piece = stream->piece.c_str();
    *size = stream->piece.size();
  });
}

}  // namespace

char const* tide_version() { return TIDE_EXPORT_VERSION; }
char const* tide_last_error() { return last_error; }

tide_status tide_load(char const* bundle, char const* options, tide_engine** engine) {
  return create(engine, [&] {
    auto const [load, tokenizers] = tide::open_options(options);
    tide::Engine const opened = tide::Engine::load(bundle, load);
    return tide_engine{opened, std::make_shared<tide::Text>(opened, tokenizers)};
  });
}

void tide_engine_free(tide_engine* engine) { delete engine; }

std::int64_t tide_max_batch_size(tide_engine const* engine) { return engine->engine.max_batch_size(); }

tide_status tide_generate(tide_engine const* engine, std::int64_t const* prompt, std::size_t count, char const* options,
                          tide_logits_processor const* processor, tide_generation** generation) {
  return create(generation, [&] {
    return engine->engine.generate(ids(prompt, count), config_of(*engine->text, options, processor));
  });
}

tide_status tide_stream(tide_engine const* engine, std::int64_t const* prompt, std::size_t count, char const* options,
                        tide_logits_processor const* processor, tide_on_token on_token, void* context,
                        tide_generation** generation) {
  return create(generation, [&] {
    tide::GenerationConfig const config = config_of(*engine->text, options, processor);
    return engine->engine.stream(ids(prompt, count), config, [&](tide::Token const& made) {
      tide::Logprobs const logprobs = tide::c_logprobs(made.id, made.logprobs);
      tide_token const token = c_token(made, logprobs);
      return on_token(context, &token) != 0;
    });
  });
}

tide_status tide_encode(tide_engine const* engine, char const* text, int special_tokens, std::int64_t* ids,
                        std::size_t room, std::size_t* count) {
  return guarded([&] {
    auto const all = engine->text->tokenizer().encode(text, special_tokens != 0);
    std::copy_n(all.begin(), std::min(room, all.size()), ids);
    *count = all.size();
  });
}

tide_status tide_decode(tide_engine const* engine, std::int64_t const* tokens, std::size_t count, int special_tokens,
                        char* text, std::size_t room, std::size_t* size) {
  return guarded([&] {
    std::string const all = engine->text->tokenizer().decode(ids(tokens, count), special_tokens != 0);
    std::copy_n(all.c_str(), std::min(room, all.size() + 1), text);
    *size = all.size();
  });
}

tide_status tide_text_stream_create(tide_engine const* engine, std::int64_t const* prompt, std::size_t count,
                                    tide_text_stream** stream) {
  return create(stream, [&] {
    return tide_text_stream{tide::TextStream(engine->text->tokenizer(), ids(prompt, count))};
  });
}

tide_status tide_text_stream_push(tide_text_stream* stream, std::int64_t token, char const** piece, std::size_t* size) {
  return put_piece(stream, piece, size, [&] { return stream->stream.push(token); });
}

tide_status tide_text_stream_finish(tide_text_stream* stream, char const** piece, std::size_t* size) {
  return put_piece(stream, piece, size, [&] { return stream->stream.finish(); });
}

void tide_text_stream_free(tide_text_stream* stream) { delete stream; }

std::int64_t const* tide_generation_tokens(tide_generation const* generation, std::size_t* count) {
  *count = generation->generation.tokens.size();
  return generation->generation.tokens.data();
}

char const* tide_generation_finish_reason(tide_generation const* generation) {
  return name_of(generation->generation.finish_reason).data();  // of a literal
}

char const* tide_generation_stats(tide_generation const* generation) { return generation->stats.c_str(); }

char const* tide_generation_text(tide_generation const* generation, std::size_t* size) {
  auto const& text = generation->generation.text;
  *size = text ? text->size() : 0;
  return text ? text->c_str() : nullptr;
}

tide_logprob const* tide_generation_logprobs(tide_generation const* generation, std::size_t token, std::size_t* count) {
  bool const there = token < generation->logprobs.size();
  *count = there ? generation->logprobs[token].size() : 0;
  return there ? generation->logprobs[token].data() : nullptr;
}

void tide_generation_free(tide_generation* generation) { delete generation; }

tide_status tide_scheduler_create(tide_engine const* engine, char const* limits, tide_scheduler** scheduler) {
  return create(scheduler, [&] {
    return tide_scheduler{engine->engine.scheduler(tide::scheduler_limits(limits)), engine->text};
  });
}

tide_status tide_scheduler_start(tide_scheduler* scheduler) {
  return guarded([&] { scheduler->scheduler.start(); });
}

int tide_scheduler_step(tide_scheduler* scheduler) { return scheduler->scheduler.step() ? 1 : 0; }
void tide_scheduler_close(tide_scheduler* scheduler, int drain) { scheduler->scheduler.close(drain != 0); }
void tide_scheduler_free(tide_scheduler* scheduler) { delete scheduler; }

tide_status tide_submit(tide_scheduler* scheduler, std::int64_t const* prompt, std::size_t count, char const* options,
                        tide_logits_processor const* processor, double const* timeout, tide_request** request) {
  return create(request, [&] {
    tide::GenerationConfig const config = config_of(*scheduler->text, options, processor);
    return tide_request{scheduler->scheduler.submit(ids(prompt, count), config,
                                                    timeout == nullptr ? std::nullopt : std::optional(*timeout))};
  });
}

tide_status tide_request_next(tide_request* request, tide_token* token) {
  try {
    auto const made = request->handle.next();
    if (!made) return TIDE_ENDED;
    request->logprobs = tide::c_logprobs(made->id, made->logprobs);
    *token = c_token(*made, request->logprobs);
    return TIDE_OK;
  } catch (...) {
    return fail();
  }
}

tide_status tide_request_result(tide_request* request, tide_generation** generation) {
  return create(generation, [&] { return request->handle.result(); });
}

std::int64_t tide_request_cached_tokens(tide_request const* request) { return request->handle.cached_tokens(); }
void tide_request_cancel(tide_request* request) { request->handle.cancel(); }
void tide_request_free(tide_request* request) { delete request; }
