#include "options.h"

#include <charconv>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <sstream>

char const* const kUsage =
    "usage: tide_generate BUNDLE (--prompt TEXT | --ids 1,2,3 | --ids-file FILE) ... [options]\n"
    "Generates after prompts; prints the new ids, their text for prompts of text, and statistics as JSON.\n"
    "  --prompt TEXT         a prompt; text needs a library that TIDE_TOKENIZERS names (docs/guide/cpp.md)\n"
    "  --ids 1,2,3           a prompt; may be repeated: several prompts are decoded as a batch\n"
    "  --ids-file FILE       a prompt: ids between white space or commas; may be repeated\n"
    "  --max-new-tokens N    64\n"
    "  --mode MODE           auto (the default), full, exit or lossless\n"
    "  --threshold T[,T...]  a score above it exits: one in [0, 1], or one per checkpoint; default: the bundle's\n"
    "  --min-layers N        checkpoints after fewer layers never exit\n"
    "  --max-pending N       pending tokens (in lossless mode drafts) before a segment must run\n"
    "  --prompt-lookup N     lossless mode: tokens of one prompt-lookup draft, at most\n"
    "  --drafter N           lossless mode: drafts of the bundle's drafter before one verification, at most\n"
    "  --compaction-threshold X  batches: if a smaller share than this needs a segment, only those run it\n"
    "  --temperature X  --top-k N  --top-p X  --min-p X\n"
    "  --repetition-penalty X  --presence-penalty X  --frequency-penalty X\n"
    "  --logit-bias ID:X[,ID:X...]  added to the logits of these tokens\n"
    "  --logprobs K          print log-probabilities of each token and of the K most likely\n"
    "  --seed N[,N...]       one for all prompts, or one for each\n"
    "  --stop TEXT           ends the generation where its text has it; may be repeated\n"
    "  --stop-ids 1,2        instead of the model's own; --ignore-eos: none\n"
    "  --threads N           of one step; default: one per physical core\n"
    "  --provider NAME       auto (the default), cpu, cuda, tensorrt or tensorrt-rtx\n"
    "  --plugins LIBRARY     for TensorRT engines that hold plugins\n"
    "  --no-verify           do not check the sha256 of the bundle's files\n";

namespace {

template <typename T>
T number(std::string const& option, std::string const& text, char const* kind) {
  T value{};
  auto const end = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || end.ec != std::errc() || end.ptr != text.data() + text.size()) {
    throw tide::ConfigError(option + " must be " + kind + ", not '" + text + "'");
  }
  return value;
}

template <typename T>
std::vector<T> numbers(std::string const& option, std::string const& text, char const* kind) {
  std::vector<T> values;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t const end = std::min(text.find_first_of(", \t\r\n", at), text.size());
    if (end > at) values.push_back(number<T>(option, text.substr(at, end - at), kind));
    at = end + 1;
  }
  return values;
}

std::int64_t whole(std::string const& option, std::string const& text) {
  return number<std::int64_t>(option, text, "a whole number");
}

double real(std::string const& option, std::string const& text) { return number<double>(option, text, "a number"); }

// Pairs "ID:NUMBER" separated by commas.
std::map<std::int64_t, double> biases(std::string const& option, std::string const& text) {
  std::map<std::int64_t, double> values;
  std::istringstream pairs(text);
  for (std::string pair; std::getline(pairs, pair, ',');) {
    std::size_t const colon = std::min(pair.find(':'), pair.size());
    values[whole(option, pair.substr(0, colon))] = real(option, pair.substr(std::min(colon + 1, pair.size())));
  }
  return values;
}

std::string read(std::string const& file) {
  std::ifstream stream(file);
  std::string const text(std::istreambuf_iterator<char>(stream), {});
  if (!stream.is_open() || stream.bad()) throw tide::ConfigError("--ids-file '" + file + "' cannot be read");
  return text;
}

}  // namespace

std::vector<std::int64_t> whole_numbers(std::string const& option, std::string const& text) {
  return numbers<std::int64_t>(option, text, "whole numbers");
}

std::vector<double> real_numbers(std::string const& option, std::string const& text) {
  return numbers<double>(option, text, "numbers");
}

Options parse(std::vector<std::string> const& arguments) {
  Options options;
  tide::GenerationConfig& config = options.config;
  using Text = std::string const&;
  std::map<std::string, std::function<void(Text, Text)>> const valued = {
      {"--ids", [&](Text name, Text text) { options.prompts.push_back(whole_numbers(name, text)); }},
      {"--ids-file", [&](Text name, Text file) { options.prompts.push_back(whole_numbers(name, read(file))); }},
      {"--prompt", [&](Text, Text text) { options.texts.push_back(text); }},
      {"--stop", [&](Text, Text text) { config.stop.push_back(text); }},
      {"--max-new-tokens", [&](Text name, Text text) { config.max_new_tokens = whole(name, text); }},
      {"--mode", [&](Text, Text text) { config.mode = tide::mode_of(text); }},
      {"--threshold",
       [&](Text name, Text text) {
         std::vector<double> const values = real_numbers(name, text);
         config.threshold = values.size() == 1 ? tide::Threshold(values[0]) : tide::Threshold(values);
       }},
      {"--min-layers", [&](Text name, Text text) { config.min_layers = whole(name, text); }},
      {"--max-pending", [&](Text name, Text text) { config.max_pending = whole(name, text); }},
      {"--drafter", [&](Text name, Text text) { config.drafter = whole(name, text); }},
      {"--prompt-lookup", [&](Text name, Text text) { config.prompt_lookup = whole(name, text); }},
      {"--compaction-threshold", [&](Text name, Text text) { config.compaction_threshold = real(name, text); }},
      {"--temperature", [&](Text name, Text text) { config.temperature = real(name, text); }},
      {"--top-k", [&](Text name, Text text) { config.top_k = whole(name, text); }},
      {"--top-p", [&](Text name, Text text) { config.top_p = real(name, text); }},
      {"--min-p", [&](Text name, Text text) { config.min_p = real(name, text); }},
      {"--repetition-penalty", [&](Text name, Text text) { config.repetition_penalty = real(name, text); }},
      {"--presence-penalty", [&](Text name, Text text) { config.presence_penalty = real(name, text); }},
      {"--frequency-penalty", [&](Text name, Text text) { config.frequency_penalty = real(name, text); }},
      {"--logit-bias", [&](Text name, Text text) { config.logit_bias = biases(name, text); }},
      {"--logprobs", [&](Text name, Text text) { config.logprobs = whole(name, text); }},
      {"--seed",
       [&](Text name, Text text) {
         std::vector<std::int64_t> const values = whole_numbers(name, text);
         config.seed = values.size() == 1 ? tide::Seed(values[0]) : tide::Seed(values);
       }},
      {"--stop-ids", [&](Text name, Text text) { config.stop_token_ids = whole_numbers(name, text); }},
      {"--provider", [&](Text, Text text) { options.load.provider = text; }},
      {"--device", [&](Text name, Text text) { options.load.device = whole(name, text); }},
      {"--plugins", [&](Text, Text text) { options.load.plugins = text; }},
      {"--threads", [&](Text name, Text text) { options.load.threads = whole(name, text); }},
  };
  std::map<std::string, std::function<void()>> const switches = {
      {"--ignore-eos", [&] { config.stop_token_ids = std::vector<std::int64_t>{}; }},
      {"--no-verify", [&] { options.load.verify = false; }},
      {"--help", [&] { options.help = true; }},
  };
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    std::string const& argument = arguments[i];
    if (auto const flag = switches.find(argument); flag != switches.end()) {
      flag->second();
    } else if (auto const option = valued.find(argument); option != valued.end()) {
      if (++i == arguments.size()) throw tide::ConfigError(argument + " needs a value");
      option->second(argument, arguments[i]);
    } else if (argument.rfind("--", 0) == 0 || !options.bundle.empty()) {
      throw tide::ConfigError("unknown argument '" + argument + "': see tide_generate --help");
    } else {
      options.bundle = argument;
    }
  }
  return options;
}
