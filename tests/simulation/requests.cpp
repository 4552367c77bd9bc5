#include "requests.h"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "table.h"

namespace simulation {
namespace {

std::string letters(std::vector<std::int64_t> const& ids) {
  std::string text;
  for (std::int64_t const id : ids) text += static_cast<char>('a' + id);
  return text;
}

// A grammar of a kind: which tokens may follow depends on the text alone.
bool allowed(std::vector<std::int64_t> const& ids, std::int64_t token) {
  return table::mix(ids.size() % 7, static_cast<std::uint64_t>(ids.back() * 100 + token)) % 3 != 0;
}

void require(bool condition, std::string const& what) {
  if (!condition) throw std::logic_error(what);
}

bool same(tide::TokenLogprobs const& one, tide::TokenLogprobs const& other) {
  return one.logprob == other.logprob && one.top == other.top;
}

}  // namespace

Request draw(Random& random, bool recurrent) {
  Request request;
  // Prompts of few beginnings, so that they share pages, and with an end of their own, or none.
  std::int64_t const family = random.below(4), shared = random.below(70), own = random.of({0, 0, 1, 3, 16, 25});
  for (std::int64_t i = 0; i < shared; ++i) {
    request.prompt.push_back(static_cast<std::int64_t>(table::mix(static_cast<std::uint64_t>(family), static_cast<std::uint64_t>(i)) % table::kVocabulary));
  }
  for (std::int64_t i = 0; i < own; ++i) request.prompt.push_back(random.below(table::kVocabulary));
  if (request.prompt.empty()) request.prompt.push_back(random.below(table::kVocabulary));
  tide::GenerationConfig& config = request.config;
  config.max_new_tokens = random.of({1, 2, 5, 12, 30, 120});
  config.mode = random.of({tide::Mode::full, tide::Mode::exit, tide::Mode::exit, tide::Mode::lossless, tide::Mode::lossless});
  config.seed = random.below(1000);
  if (config.mode != tide::Mode::full && random.one_in(2)) config.threshold = random.of({0.0, 0.3, 0.7, 0.95, 1.0});
  if (config.mode == tide::Mode::exit) config.max_pending = random.of({0, 1, 4, 20});
  if (config.mode == tide::Mode::exit && recurrent) config.max_pending = random.of({0, 1, 4});
  if (config.mode == tide::Mode::lossless && random.one_in(2)) config.prompt_lookup = random.of({0, 2, 8});
  if (config.mode == tide::Mode::lossless && random.one_in(2)) config.drafter = random.of({0, 1, 4});
  if (random.one_in(2)) config.temperature = random.of({0.5, 0.8, 1.5});
  bool const samples = config.temperature > 0;
  if (samples && random.one_in(4)) config.top_k = 3;
  if (samples && random.one_in(4)) config.top_p = 0.8;
  if (samples && random.one_in(6)) config.min_p = 0.1;
  if (random.one_in(6)) config.repetition_penalty = 1.3;
  if (random.one_in(8)) config.frequency_penalty = 0.5;
  if (random.one_in(8)) config.presence_penalty = 0.5;
  if (random.one_in(8)) config.logit_bias = {{3, 2.0}, {5, -100.0}};
  if (random.one_in(5)) config.logprobs = random.below(4);
  if (random.one_in(8)) config.prompt_logprobs = random.below(3);
  if (random.one_in(3)) config.stop_token_ids = std::vector<std::int64_t>{random.below(table::kVocabulary)};
  if (random.one_in(3)) config.detokenizer = letters;
  if (config.detokenizer && random.one_in(2)) config.stop = {"ab", "qd", "ddd"};
  if (random.one_in(3)) config.adapter = random.of({"one", "two"});
  if (random.one_in(4)) config.cache_salt = random.of({"salt", "pepper"});
  if (config.mode != tide::Mode::lossless && random.one_in(6)) config.states = true;
  if (random.one_in(15)) request.hook_throws_at = static_cast<std::int64_t>(request.prompt.size()) + random.below(20);
  if (request.hook_throws_at >= 0 || random.one_in(5)) {
    std::int64_t const throws_at = request.hook_throws_at;
    config.logits_processor = [throws_at](std::vector<std::int64_t> const& ids, float* logits, std::size_t vocabulary) {
      if (static_cast<std::int64_t>(ids.size()) == throws_at) throw std::runtime_error(kHookThrew);
      for (std::size_t token = 0; token < vocabulary; ++token) {
        if (!allowed(ids, static_cast<std::int64_t>(token))) logits[token] = -std::numeric_limits<float>::infinity();
      }
    };
    if (random.one_in(2)) config.allows_token = allowed;
  }
  if (random.one_in(6)) request.timeout = random.of({0.0, 0.05, 1.0, 50.0});
  return request;
}

void compare(Request const& request, tide::Generation const& got, tide::Generation const& alone, bool whole) {
  std::size_t const count = got.tokens.size();
  require(count <= alone.tokens.size() && std::equal(got.tokens.begin(), got.tokens.end(), alone.tokens.begin()),
          "a token differs from the request alone");
  for (std::size_t i = 0; i < got.logprobs.size(); ++i) {
    require(i < alone.logprobs.size() && same(got.logprobs[i], alone.logprobs[i]), "a log-probability differs");
  }
  if (!whole) return;
  require(count == alone.tokens.size(), "a request ended before it does alone");
  require(got.finish_reason == alone.finish_reason, "a request ended for another reason than alone");
  require(got.text == alone.text, "a text differs from the request alone");
  require(got.logprobs.size() == alone.logprobs.size(), "log-probabilities are missing");
  require(got.states == alone.states, "hidden states differ from the request alone");
  require(got.prompt_logprobs.size() == alone.prompt_logprobs.size(), "log-probabilities of the prompt are missing");
  for (std::size_t i = 0; i < got.prompt_logprobs.size(); ++i) {
    require(got.prompt_logprobs[i].id == alone.prompt_logprobs[i].id &&
                same(got.prompt_logprobs[i].logprobs, alone.prompt_logprobs[i].logprobs),
            "a log-probability of the prompt differs");
  }
  if (request.config.mode == tide::Mode::lossless) return;
  require(got.stats.exit_layer == alone.stats.exit_layer, "tokens exit elsewhere than alone");
}

void check_rule(Request const& request, tide::Manifest const& manifest, tide::Generation const& alone) {
  tide::GenerationConfig const& config = request.config;
  bool const plain = config.temperature == 0 && config.repetition_penalty == 1 && config.frequency_penalty == 0 &&
                     config.presence_penalty == 0 && config.logit_bias.empty() && !config.logits_processor && !config.adapter;
  if (!plain) return;
  std::vector<double> thresholds(manifest.checkpoints.size(), 2);
  if (config.mode == tide::Mode::exit) thresholds = tide::resolve_thresholds(manifest, config);
  std::vector<std::int64_t> ids = request.prompt;
  for (std::int64_t const token : alone.tokens) {
    std::vector<std::int64_t> const hidden = table::hidden_states(ids, !manifest.model.states.empty(), 0);
    std::size_t exit = 0;
    while (exit < thresholds.size() && !(table::score(hidden[exit]) > static_cast<float>(thresholds[exit]))) ++exit;
    std::int64_t best = 0;
    for (std::int64_t id = 1; id < table::kVocabulary; ++id) {
      if (table::logit(hidden[exit], id) > table::logit(hidden[exit], best)) best = id;
    }
    require(token == best, "a token is not the rule's");
    ids.push_back(token);
  }
}

}  // namespace simulation
