#include "options.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

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

namespace {

using Text = std::string const&;

void set(Text option, Text text, std::int64_t& value) { value = whole(option, text); }
void set(Text option, Text text, double& value) { value = real(option, text); }
void set(Text, Text text, bool& value) { value = text == "yes"; }
void set(Text, Text text, std::string& value) { value = text; }
void set(Text, Text text, tide::Mode& value) { value = tide::mode_of(text); }
void set(Text, Text text, std::vector<std::string>& values) { values.push_back(text); }
void set(Text option, Text text, std::vector<std::int64_t>& values) { values = whole_numbers(option, text); }

void set(Text option, Text text, tide::LogitBias& values) {
  values.clear();
  std::istringstream pairs(text);
  for (std::string pair; std::getline(pairs, pair, ',');) {
    std::size_t const colon = std::min(pair.find(':'), pair.size());
    values[whole(option, pair.substr(0, colon))] = real(option, pair.substr(std::min(colon + 1, pair.size())));
  }
}

template <typename T>
void set(Text option, Text text, std::optional<T>& value) {
  set(option, text, value.emplace());
}

void set(Text option, Text text, std::optional<tide::Threshold>& value) {
  std::vector<double> const values = real_numbers(option, text);
  value = values.size() == 1 ? tide::Threshold(values[0]) : tide::Threshold(values);
}

void set(Text option, Text text, std::optional<tide::Seed>& value) {
  std::vector<std::int64_t> const values = whole_numbers(option, text);
  value = values.size() == 1 ? tide::Seed(values[0]) : tide::Seed(values);
}

// An option with a value.
struct Valued {
  std::string name;
  char const* help;
  std::function<void(Text option, Text text)> set;
};

// All but those of a generation for what this program neither loads nor prints.
std::vector<Valued> all_valued(Options& options) {
  std::vector<Valued> all = {
      {"--prompt", "a text; needs a library that TIDE_TOKENIZERS names (docs/guide/cpp.md)",
       [&](Text, Text text) { options.texts.push_back(text); }},
      {"--ids", "a prompt's ids, 1,2,3; several prompts are decoded as a batch",
       [&](Text name, Text text) { options.prompts.push_back(whole_numbers(name, text)); }},
      {"--ids-file", "a file with a prompt's ids, between white space or commas",
       [&](Text name, Text file) { options.prompts.push_back(whole_numbers(name, read(file))); }},
#define TIDE_OPTION(type, name, standard, limits, counts, help) \
      {"--" #name, help, [&](Text option, Text text) { set(option, text, options.config.name); }},
#include "tide/options.inc"
      {"--provider", "auto (the default), cpu, cuda, tensorrt or tensorrt-rtx",
       [&](Text, Text text) { options.load.provider = text; }},
      {"--device", "number of the GPU", [&](Text name, Text text) { set(name, text, options.load.device); }},
      {"--plugins", "library for TensorRT plans that hold plugins", [&](Text, Text text) { options.load.plugins = text; }},
      {"--threads", "of one step; default: one per physical core",
       [&](Text name, Text text) { set(name, text, options.load.threads); }},
  };
  std::set<std::string> const elsewhere = {"--adapter", "--cache_salt", "--states", "--prompt_logprobs"};
  all.erase(std::remove_if(all.begin(), all.end(), [&](Valued const& one) { return elsewhere.count(one.name) == 1; }), all.end());
  for (Valued& one : all) std::replace(one.name.begin(), one.name.end(), '_', '-');
  return all;
}

}  // namespace

std::string usage() {
  std::string text =
      "usage: tide_generate BUNDLE (--prompt TEXT | --ids 1,2,3 | --ids-file FILE) ... [options]\n"
      "Generates after prompts; prints the new ids, their text for prompts of text, and statistics as JSON.\n"
      "An option has a value: several numbers as 1,2,3, and biases as 17:-2.5,42:1. A text is given once for each.\n";
  Options options;
  for (Valued const& one : all_valued(options)) text += "  " + one.name + ": " + one.help + "\n";
  return text + "Without a value: --ignore-eos (no stop tokens), --no-verify (do not check the sha256 of the bundle's files)\n";
}

Options parse(std::vector<std::string> const& arguments) {
  Options options;
  std::vector<Valued> const valued = all_valued(options);
  std::map<std::string, std::function<void()>> const switches = {
      {"--ignore-eos", [&] { options.config.stop_token_ids = std::vector<std::int64_t>{}; }},
      {"--no-verify", [&] { options.load.verify = false; }},
      {"--help", [&] { options.help = true; }},
  };
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    std::string const& argument = arguments[i];
    auto const option =
        std::find_if(valued.begin(), valued.end(), [&](Valued const& one) { return one.name == argument; });
    if (auto const flag = switches.find(argument); flag != switches.end()) {
      flag->second();
    } else if (option != valued.end()) {
      if (++i == arguments.size()) throw tide::ConfigError(argument + " needs a value");
      option->set(argument, arguments[i]);
    } else if (argument.rfind("--", 0) == 0 || !options.bundle.empty()) {
      throw tide::ConfigError("unknown argument '" + argument + "': see tide_generate --help");
    } else {
      options.bundle = argument;
    }
  }
  return options;
}
