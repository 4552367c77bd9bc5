#include "tide/stats.h"

#include <algorithm>
#include <numeric>

#include "formatting.h"

namespace tide {
namespace {

constexpr std::int64_t kNoLayer = 0;  // the exit layer of a draft by prompt lookup or a drafter

double share(double part, std::int64_t whole) { return whole > 0 ? part / static_cast<double>(whole) : 0.0; }

}  // namespace

std::map<std::int64_t, std::int64_t> ExitStats::exits_per_layer() const {
  std::map<std::int64_t, std::int64_t> exits;
  for (std::int64_t const layers : checkpoints) {
    exits[layers] = std::count(exit_layer.begin(), exit_layer.end(), layers);
  }
  return exits;
}

std::int64_t ExitStats::total_exited() const {
  std::int64_t total = 0;
  for (auto const& [layers, count] : exits_per_layer()) total += count;
  return total;
}

std::int64_t ExitStats::remaining_tokens() const {
  return total_tokens() - total_exited() - std::count(exit_layer.begin(), exit_layer.end(), kNoLayer);
}

double ExitStats::exit_rate() const { return share(static_cast<double>(total_exited()), total_tokens()); }

double ExitStats::acceptance_rate() const { return share(static_cast<double>(accepted), drafted); }

double ExitStats::layers_run_per_token() const {
  return share(static_cast<double>(std::accumulate(layers_run.begin(), layers_run.end(), std::int64_t{0})),
               total_tokens());
}

double ExitStats::layers_skipped_per_token() const {
  return total_tokens() > 0 ? static_cast<double>(num_layers) - layers_run_per_token() : 0.0;
}

double ExitStats::tokens_per_second() const {
  return decode_seconds > 0 ? static_cast<double>(total_tokens() - 1) / decode_seconds : 0.0;
}

std::string ExitStats::json() const {
  std::string text;
  auto const put = [&](char const* name, std::string const& value) {
    text += (text.empty() ? "{\"" : ", \"") + std::string(name) + "\": " + value;
  };
  std::string exits;
  for (auto const& [layers, count] : exits_per_layer()) {
    exits += (exits.empty() ? "\"" : ", \"") + std::to_string(layers) + "\": " + std::to_string(count);
  }
  put("total_tokens", std::to_string(total_tokens()));
  put("prompt_tokens", std::to_string(prompt_tokens));
  put("exits_per_layer", "{" + exits + "}");
  put("remaining_tokens", std::to_string(remaining_tokens()));
  put("total_exited", std::to_string(total_exited()));
  put("exit_rate", shown(exit_rate()));
  put("num_layers", std::to_string(num_layers));
  put("layers_run_per_token", shown(layers_run_per_token()));
  put("layers_skipped_per_token", shown(layers_skipped_per_token()));
  put("layer_tokens_run", std::to_string(layer_tokens_run));
  put("layer_tokens_total", std::to_string(layer_tokens_total));
  put("drafted", std::to_string(drafted));
  put("accepted", std::to_string(accepted));
  put("lookup_drafted", std::to_string(lookup_drafted));
  put("lookup_accepted", std::to_string(lookup_accepted));
  put("learned_drafted", std::to_string(learned_drafted));
  put("learned_accepted", std::to_string(learned_accepted));
  put("answers_drafted", std::to_string(answers_drafted));
  put("answers_accepted", std::to_string(answers_accepted));
  put("exit_saved_seconds", shown(exit_saved_seconds));
  put("lookup_saved_seconds", shown(lookup_saved_seconds));
  put("learned_saved_seconds", shown(learned_saved_seconds));
  put("answers_saved_seconds", shown(answers_saved_seconds));
  put("acceptance_rate", shown(acceptance_rate()));
  put("prefill_seconds", shown(prefill_seconds));
  put("decode_seconds", shown(decode_seconds));
  put("tokens_per_second", shown(tokens_per_second()));
  put("exit_layer", "[" + joined(exit_layer, ", ") + "]");
  put("layers_run", "[" + joined(layers_run, ", ") + "]");
  return text + "}";
}

}  // namespace tide
