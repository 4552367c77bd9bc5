#include "capi/objects.h"

#include <atomic>
#include <stdexcept>

#include "capi/options.h"

namespace tide::capi {
namespace {

constexpr char const* kNoMemory = "not enough memory";

std::atomic<void (*)(char const*)> log_function{nullptr};
thread_local std::string error_text;
thread_local char const* last_error = "";
thread_local std::string callers_error;
thread_local std::optional<tide_status> report;  // of the caller's function that runs now

// Throws what a status says that a caller's function returned.
void throw_as(tide_status status) {
  if (status == TIDE_OK) return;
  if (status == TIDE_CONSTRAINT_ERROR) throw ConstraintError("logits_processor says that no token may follow");
  throw std::runtime_error(callers_sentence(status));
}

std::string text_by(tide_hooks const& hooks, std::vector<std::int64_t> const& ids) {
  std::size_t size = 0;
  begin_report();
  char const* const text = hooks.detokenize(hooks.context, ids.data(), ids.size(), &size);
  throw_as(reported(hooks.reports, TIDE_OK));
  if (text == nullptr) throw std::runtime_error(callers_sentence(TIDE_GENERATION_ERROR));
  return {text, size};
}

}  // namespace

std::function<void(std::string const&)> log() {
  auto const function = log_function.load();
  if (function == nullptr) return {};
  return [](std::string const& sentence) {
    if (auto const now = log_function.load()) now(sentence.c_str());
  };
}

void set_log(void (*function)(char const*)) { log_function = function; }

tide_status fail(tide_status status, char const* text) noexcept {
  try {
    error_text = text;
    last_error = error_text.c_str();
  } catch (...) {
    last_error = kNoMemory;
  }
  return status;
}

std::string callers_sentence(tide_status status) {
  std::string sentence = std::move(callers_error);
  callers_error.clear();
  return sentence.empty() ? "it returned " + std::to_string(static_cast<int>(status)) : sentence;
}

void begin_report() { report.reset(); }

tide_status reported(int reports, tide_status returned) {
  if (reports == 0) return returned;
  if (!report) callers_error = "it ended without a report";
  return report.value_or(TIDE_GENERATION_ERROR);
}

tide_status fail() noexcept {
  try {
    throw;
  } catch (ConfigError const& error) {
    return fail(TIDE_CONFIG_ERROR, error.what());
  } catch (BundleError const& error) {
    return fail(TIDE_BUNDLE_ERROR, error.what());
  } catch (QueueFullError const& error) {
    return fail(TIDE_QUEUE_FULL, error.what());
  } catch (ConstraintError const& error) {
    return fail(TIDE_CONSTRAINT_ERROR, error.what());
  } catch (GenerationError const& error) {
    return fail(TIDE_GENERATION_ERROR, error.what());
  } catch (ProviderError const& error) {
    return fail(TIDE_PROVIDER_ERROR, error.what());
  } catch (std::bad_alloc const&) {
    return fail(TIDE_NO_MEMORY, kNoMemory);
  } catch (std::exception const& error) {
    return fail(TIDE_INTERNAL_ERROR, error.what());
  } catch (...) {
    return fail(TIDE_INTERNAL_ERROR, "an exception of another language");
  }
}

GenerationConfig config_of(Text& text, char const* options, tide_hooks const* hooks) {
  tide_hooks const given = hooks == nullptr ? tide_hooks{} : *hooks;
  GenerationConfig config = generation_config(options, [&]() -> Detokenizer {
    if (given.detokenize == nullptr) return text.tokenizer();
    return [given](std::vector<std::int64_t> const& ids) { return text_by(given, ids); };
  });
  if (given.process_logits != nullptr) {
    config.logits_processor = [given](std::vector<std::int64_t> const& ids, float* logits, std::size_t vocabulary) {
      begin_report();
      tide_status const status = given.process_logits(given.context, ids.data(), ids.size(), logits, vocabulary);
      throw_as(reported(given.reports, status));
    };
  }
  if (given.allows_token != nullptr) {
    config.allows_token = [given](std::vector<std::int64_t> const& ids, std::int64_t token) {
      begin_report();
      int const allowed = given.allows_token(given.context, ids.data(), ids.size(), token);
      throw_as(reported(given.reports, TIDE_OK));
      return allowed != 0;
    };
  }
  return config;
}

Logprobs logprobs_of(std::int64_t token, std::optional<TokenLogprobs> const& made) {
  if (!made) return {};
  Logprobs values{{token, made->logprob}};
  for (auto const& [id, logprob] : made->top) values.push_back({id, logprob});
  return values;
}

tide_token token_of(Token const& token, Logprobs const& logprobs) {
  return {token.id, token.exit_layer, token.layers_run, logprobs.empty() ? nullptr : logprobs.data(), logprobs.size()};
}

}  // namespace tide::capi

char const* tide_last_error() { return tide::capi::last_error; }
void tide_set_error(char const* sentence) { tide::capi::callers_error = sentence; }
void tide_report(tide_status status) { tide::capi::report = status; }
