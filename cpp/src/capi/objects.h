// Defines the objects of the C interface, and converts exceptions to statuses.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tide/batch.h"
#include "tide/scheduler.h"
#include "tide/tide.h"

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

namespace capi {

// The function of tide_set_log; none: there is none, and stderr is meant.
std::function<void(std::string const&)> log();
void set_log(void (*function)(char const*));

// Keeps `text` for tide_last_error, and returns `status`.
tide_status fail(tide_status status, char const* text) noexcept;

// The sentence of tide_set_error in this thread, which is then forgotten; else "it returned" and the status.
std::string callers_sentence(tide_status status);

// Before a call of a function of the caller: it has not reported yet.
void begin_report();

// After it, its status: what it reported, where it `reports`, else what it returned.
tide_status reported(int reports, tide_status returned);

// The status of the exception that is being handled.
tide_status fail() noexcept;

// Returns what `work` returns, or the status of its exception.
template <typename F>
tide_status guarded_status(F const& work) noexcept {
  try {
    return work();
  } catch (...) {
    return fail();
  }
}

template <typename F>
tide_status guarded(F const& work) noexcept {
  return guarded_status([&] {
    work();
    return TIDE_OK;
  });
}

// Sets `*result` to a new object of what `make` returns.
template <typename T, typename F>
tide_status create(T** result, F const& make) noexcept {
  return guarded([&] { *result = new T(make()); });
}

template <typename T>
std::vector<T> vector_of(T const* values, std::size_t count) {
  return {values, values + count};
}

// Writes as much of `text` with a zero byte as has room, and its whole size.
inline void put_text(std::string const& all, char* text, std::size_t room, std::size_t* size) {
  std::copy_n(all.c_str(), std::min(room, all.size() + 1), text);
  *size = all.size();
}

// The configuration of a request; `hooks` may be null.
GenerationConfig config_of(Text& text, char const* options, tide_hooks const* hooks);

// Of a token and of the most likely ones; empty where `made` is none.
Logprobs logprobs_of(std::int64_t token, std::optional<TokenLogprobs> const& made);

// logprobs: those of the token; the result refers to them.
tide_token token_of(Token const& token, Logprobs const& logprobs);

}  // namespace capi
}  // namespace tide

struct tide_engine {
  tide::Engine engine;
  std::shared_ptr<tide::Text> text;
};

struct tide_generation {
  explicit tide_generation(tide::Generation made, bool has_ended = true)
      : generation(std::move(made)), stats(generation.stats.json()), ended(has_ended) {
    for (std::size_t i = 0; i < generation.logprobs.size(); ++i) {
      logprobs.push_back(tide::capi::logprobs_of(generation.tokens[i], generation.logprobs[i]));
    }
    for (tide::PromptToken const& one : generation.prompt_logprobs) {
      prompt_logprobs.push_back(tide::capi::logprobs_of(one.id, one.logprobs));
    }
  }

  tide::Generation generation;
  std::string stats;
  bool ended;
  std::vector<tide::Logprobs> logprobs, prompt_logprobs;
};

struct tide_token_stream {
  tide::TokenStream stream;
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

struct tide_sequence {
  tide::State state;
};

struct tide_batch {
  tide::BatchState batch;
};
