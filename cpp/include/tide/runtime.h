// Runs a bundle of tide_export in a C++ program: `Engine::load`, then `generate` or `stream`. The twin of the Python
// runtime, on ONNX Runtime's CPU or on the bundle's TensorRT engines: the same rule, defaults and errors, and greedy
// the same tokens.
//
// Tokens in, tokens out: text is turned into token ids, and back, by the caller; the bundle holds tokenizer.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tide/errors.h"
#include "tide/manifest.h"
#include "tide/state.h"
#include "tide/stats.h"

namespace tide {

struct LoadOptions {
  std::optional<std::int64_t> threads;  // that one step may use on the CPU; none: one per physical core
  bool verify = true;                   // check the sha256 of every file first (sizes are always checked)
  // What runs the bundle: "cpu" (ONNX Runtime), "tensorrt", "tensorrt-rtx" (its engines, on the GPU); "auto" takes the
  // engines where there are some and they run here, else the CPU. One that is named is had or refused.
  std::string provider = "auto";
  // The library of plugins, for TensorRT engines that hold some; none: that of the environment variable TIDE_PLUGINS.
  // "none" in its place: no library.
  std::optional<std::filesystem::path> plugins;
  // Is told in a sentence what "auto" took of a bundle that holds engines and why not those, and where a plugin library
  // is not the build that engines were made with. None: a line on stderr.
  std::function<void(std::string const&)> log;
};

enum class Mode {
  full,     // the source model, layer for layer
  exit,     // tokens may leave at a checkpoint
  lossless  // tokens that leave are drafts, which the full model verifies before they are handed out
};

// By its name. Throws GenerationError.
Mode mode_of(std::string_view name);

// One for all checkpoints, or one per checkpoint; each in [0, 1].
class Threshold {
 public:
  Threshold(double for_all) : values_{for_all}, for_all_(true) {}
  Threshold(std::vector<double> per_checkpoint) : values_(std::move(per_checkpoint)), for_all_(false) {}

  // One per checkpoint; a single one is repeated.
  std::vector<double> values(std::size_t checkpoints) const {
    return for_all_ ? std::vector<double>(checkpoints, values_[0]) : values_;
  }

 private:
  std::vector<double> values_;
  bool for_all_;
};

// Of the random numbers, 0 or more: one that every sequence starts from, or one for each prompt of a list.
class Seed {
 public:
  Seed(std::int64_t for_all) : values_{for_all}, for_all_(true) {}
  Seed(std::vector<std::int64_t> per_prompt) : values_(std::move(per_prompt)), for_all_(false) {}

  bool for_all() const { return for_all_; }
  std::vector<std::int64_t> const& values() const { return values_; }

 private:
  std::vector<std::int64_t> values_;
  bool for_all_;
};

// What `Engine.generate` in Python takes, by the same names. Options that are none are the bundle's.
struct Request {
  std::int64_t max_new_tokens = 64;  // 1 or more
  Mode mode = Mode::exit;
  std::optional<Threshold> threshold;         // a router score above it exits
  std::optional<std::int64_t> min_layers;     // checkpoints with fewer layers behind them never exit; lossless: 0
  std::optional<std::int64_t> max_pending;    // tokens (lossless: drafts) that may wait before a segment must run
  std::optional<std::int64_t> prompt_lookup;  // lossless mode: tokens drafted at most from earlier text
  double temperature = 0;                     // 0 is greedy; otherwise logits are divided by it
  std::int64_t top_k = 0;                     // keep the k most likely tokens; 0 keeps all
  double top_p = 1;                           // keep the fewest most likely tokens that add up to this or more
  std::optional<Seed> seed;                   // none draws a new one for each sequence
  std::optional<std::vector<std::int64_t>> stop_token_ids;  // none: the model's own; an empty list never stops
  // Of a list of prompts, in [0, 1]: when a smaller share of the sequences than this needs a segment, only those run
  // it; else all that wait before it catch up along. Changes speed, never tokens. None: the bundle's; in lossless mode
  // 0, and with a temperature always 1, because when a sequence is verified decides what it draws.
  std::optional<double> compaction_threshold;
};

// One token that is handed out.
struct Token {
  std::int64_t id;
  std::int64_t exit_layer;  // layers it was made after (a confirmed draft: drafted after), 0 if looked up
  std::int64_t layers_run;  // layer passes it cost; those of rejected drafts count at the token that replaced them
};

enum class FinishReason {
  stop,      // a stop token, which is the last of the tokens
  length,    // max_new_tokens
  context,   // the model's context is full
  cancelled  // the callback of `stream` returned false
};

std::string_view name_of(FinishReason reason);

struct Generation {
  std::vector<std::int64_t> tokens;  // the new ones
  ExitStats stats;
  FinishReason finish_reason = FinishReason::length;
};

// A loaded bundle. Copies share it. Safe to use from several threads: each generation has a State of its own.
class Engine {
 public:
  // Throws BundleError: missing, damaged, of another release, or not a graph or engine that loads. ConfigError:
  // threads below 1. ProviderError: the provider asked for cannot run this bundle here.
  static Engine load(std::filesystem::path const& bundle, LoadOptions const& options = {});

  // Of the library alone: what `load` has opened.
  explicit Engine(std::shared_ptr<Session> session);

  Manifest const& manifest() const;

  // The tokens behind a prompt of token ids. Throws GenerationError: the prompt is empty, holds something that is no
  // token id or is longer than the model's context; an option is out of range; or a step failed.
  Generation generate(std::vector<std::int64_t> const& prompt, Request const& request = {}) const;

  // The same, handing each token to `on_token` as it is made. When that returns false, the generation ends there. What
  // it throws comes out of here.
  Generation stream(std::vector<std::int64_t> const& prompt, Request const& request,
                    std::function<bool(Token const&)> const& on_token) const;

  // A generation for each prompt, in their order. They are decoded together, up to `max_batch_size` at a time, whatever
  // their lengths; as one ends the next takes its place. Each gets the tokens it would get alone, with the same
  // options, up to rounding (docs/guide/batches.md), and statistics of its own, of which the seconds are those of the steps it
  // was in. The networks for this are loaded when a list first comes, and again where a longer one needs larger ones.
  // (Bare braces around one token, `generate({5})`, are either kind of prompt and do not compile: name the type.)
  //
  // Throws GenerationError: as for one prompt; also where the bundle holds no networks for batches. BundleError: one of
  // them does not load, or is not what the manifest calls for.
  std::vector<Generation> generate(std::vector<std::vector<std::int64_t>> const& prompts,
                                   Request const& request = {}) const;

  // The same, handing each token to `on_token` as it is made, with the number of its prompt, from 0. When that returns
  // false, the generation of this prompt ends there, and the others go on. What it throws comes out of here and ends
  // all of them.
  std::vector<Generation> stream(std::vector<std::vector<std::int64_t>> const& prompts, Request const& request,
                                 std::function<bool(std::size_t, Token const&)> const& on_token) const;

  // Prompts of a list that are decoded at the same time; 1: a list is refused.
  std::int64_t max_batch_size() const;

  // An empty sequence to `step` by hand. It keeps what it needs of the engine.
  //
  // thresholds: one per checkpoint, as `resolve_thresholds` gives them; kOff turns one off.
  // max_pending: tokens that may wait before a segment must run; none: the bundle's.
  // room: tokens of K/V buffer to have beyond the first step's.
  State start(std::vector<double> const& thresholds, std::optional<std::int64_t> max_pending = std::nullopt,
              std::int64_t room = kRoom) const;

 private:
  std::shared_ptr<Session> session_;
};

// One threshold per checkpoint for `Engine::start`, kOff where none may exit: what a request asks for, else what the
// bundle says. Throws GenerationError.
std::vector<double> resolve_thresholds(Manifest const& manifest, Request const& request);

}  // namespace tide
