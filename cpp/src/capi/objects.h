// Defines the objects of the C interface, and converts exceptions to statuses.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "leaving.h"
#include "tide/batch.h"
#include "tide/errors.h"
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

// Returns the status that `work` returns, TIDE_OK if it returns nothing, or that of its exception.
template <typename F>
tide_status guarded(F const& work) noexcept {
  Inside const inside;
  try {
    if constexpr (std::is_void_v<decltype(work())>) {
      work();
      return TIDE_OK;
    } else {
      return work();
    }
  } catch (...) {
    return fail();
  }
}

// Refuses a call of an object while another one runs.
class OneCall {
 public:
  explicit OneCall(char const* what) : what_(what) {}

  // Throws GenerationError: another thread, or a callback's caller, is in a call of the object.
  auto begin() const {
    if (running_.test_and_set()) {
      throw GenerationError("another thread, or the caller of this callback, uses this " + std::string(what_) +
                            ", which serves one call at a time: give each thread one of its own");
    }
    return std::unique_ptr<std::atomic_flag, Clear>(&running_);
  }

 private:
  struct Clear {
    void operator()(std::atomic_flag* flag) const { flag->clear(); }
  };

  char const* const what_;
  mutable std::atomic_flag running_ = ATOMIC_FLAG_INIT;
};

// As `guarded`, of a call of an object that serves one at a time.
template <typename T, typename F>
tide_status alone(T const* object, F const& work) noexcept {
  return guarded([&] {
    auto const running = object->one.begin();
    return work();
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
  tide::capi::OneCall one{"token stream"};
};

struct tide_scheduler {
  tide::Scheduler scheduler;
  std::shared_ptr<tide::Text> text;
};

struct tide_request {
  tide::RequestHandle handle;
  tide::Logprobs logprobs = {};  // of the last token read
  tide::capi::OneCall one{"request"};
};

struct tide_text_stream {
  tide::TextStream stream;
  std::string piece = {};
  tide::capi::OneCall one{"text stream"};
};

struct tide_sequence {
  tide::State state;
  tide::capi::OneCall one{"sequence"};
};

struct tide_batch {
  tide::BatchState batch;
  tide::capi::OneCall one{"batch"};
};
