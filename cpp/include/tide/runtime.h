// Runs a bundle of tide_export in a C++ program, on ONNX Runtime (CPU, CUDA) or on the bundle's TensorRT plans:
// `Engine::load`, then `generate` or `stream`. The Python package binds this runtime by the C interface (tide.h).
//
// Takes and returns token ids; `Engine::tokenizer` converts text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
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
#include "tide/tokenizer.h"

namespace tide {

// Options of `Engine::load`.
struct LoadOptions {
  std::optional<std::int64_t> threads;  // threads of one step on the CPU; none: one per physical core
  bool verify = true;                   // check the sha256 of every file first (sizes are always checked)
  // "cpu" (ONNX Runtime), "tensorrt" or "tensorrt-rtx" (the bundle's plans on the GPU), "cuda" (its segment networks in
  // ONNX Runtime on the GPU). "auto": the first of the plans, "cuda" and "cpu" that the bundle holds and that runs here;
  // a named provider never falls back to another. "cpu-networks": the segment networks on the CPU, for checks.
  std::string provider = "auto";
  std::optional<std::int64_t> device;  // number of the GPU, for a named provider that runs on one; none: the first
  // The plugin library for TensorRT plans that hold plugins; none: the environment variable TIDE_PLUGINS. "none": no
  // library.
  std::optional<std::filesystem::path> plugins;
  // ONNX Runtime's library, of which a process opens one; none: the environment variable TIDE_ONNXRUNTIME, else the system's
  // libonnxruntime.
  std::optional<std::filesystem::path> onnxruntime;
  // Folders of low-rank adapters (LoRA) as peft writes them, by the names that requests give
  // (`GenerationConfig::adapter`); of a bundle that was exported with room for them, on provider "cpu".
  std::map<std::string, std::filesystem::path> adapters;
  // A folder with files of the names of the bundle's networks, which replace them, with its weights, for checks (provider
  // "cpu").
  std::optional<std::filesystem::path> graphs;
  std::optional<OpenedFiles> opened;  // the bundle, by a caller that has opened it; none: it is opened at its path
  // Receives a sentence if provider "auto" did not choose the bundle's plans, or if the plugin library is another build
  // than the plans were built with. None: stderr.
  std::function<void(std::string const&)> log;
};

enum class Mode {
  // The mode that `tide-export export` or `tune` measured to be fastest on this provider within the share of tokens that it
  // may change; full if nothing was measured or is faster; exit if threshold or min_layers is set.
  automatic,
  full,     // every token runs every layer
  exit,     // tokens may exit at a checkpoint
  lossless  // tokens that exit are drafts, which the full model verifies before they are returned
};

// Returns the mode with this name; `automatic` is "auto". Throws GenerationError.
Mode mode_of(std::string_view name);
std::string_view name_of(Mode mode);

// Holds one value for all, or one for each.
template <typename T>
class OneOrEach {
 public:
  OneOrEach(T value) : values_{value}, for_all_(true) {}
  OneOrEach(std::vector<T> values) : values_(std::move(values)), for_all_(false) {}

  bool for_all() const { return for_all_; }
  std::vector<T> const& values() const { return values_; }

  // Returns one value for each of `count`; a single value is repeated.
  std::vector<T> values(std::size_t count) const { return for_all_ ? std::vector<T>(count, values_[0]) : values_; }

 private:
  std::vector<T> values_;
  bool for_all_;
};

using Threshold = OneOrEach<double>;   // exit threshold of all checkpoints, or of each; in [0, 1]
using Seed = OneOrEach<std::int64_t>;  // seed for all prompts, or for each of a list; 0 or more
using LogitBias = std::map<std::int64_t, double>;  // by token id

// Changes the logits [vocabulary] from which the next token is chosen; a token at -infinity is never chosen. ids: the tokens
// of the prompt and those generated, in lossless mode followed by drafts; they may be shorter than in the call before, after
// drafts were rejected. Called in the thread that generates.
using LogitsProcessor =
    std::function<void(std::vector<std::int64_t> const& ids, float* logits, std::size_t vocabulary)>;

// Returns whether a token may follow these ids. Called for n-gram drafts only, to save the time of verifying them.
using AllowsToken = std::function<bool(std::vector<std::int64_t> const& ids, std::int64_t token)>;

// Options of a generation: the rows of tide/options.inc, and what is no value. An option without a value takes the bundle's. A
// seed gives the same tokens in C++, C and Python.
struct GenerationConfig {
#define TIDE_OPTION(type, name, standard, limits, counts, help) type name = standard;
#include "tide/options.inc"
  // Changes the logits before a token is chosen, in all modes: first this, then repetition_penalty, frequency_penalty,
  // presence_penalty and logit_bias.
  LogitsProcessor logits_processor;
  AllowsToken allows_token;          // none: any token may follow
  Detokenizer detokenizer;           // sets `Generation::text`; `stop` needs it
  std::optional<Drafting> drafting;  // of lossless mode; none: the bundle's
};

// Log-probabilities of one position, from the model's unchanged logits.
struct TokenLogprobs {
  double logprob;                                     // of the token
  std::vector<std::pair<std::int64_t, double>> top;  // the most likely tokens, best first, then lowest id
};

// A token of a prompt.
struct PromptToken {
  std::int64_t id;
  TokenLogprobs logprobs;
};

// One generated token.
struct Token {
  std::int64_t id;
  std::int64_t exit_layer;  // layers before its logits (accepted draft: when drafted); 0: by prompt lookup or a drafter
  std::int64_t layers_run;  // layer passes of its step; those of rejected drafts count for the token that replaced them
  std::optional<TokenLogprobs> logprobs = {};  // with GenerationConfig::logprobs
};

enum class FinishReason {
  stop,      // a stop token, which is included, or a stop string
  length,    // max_new_tokens
  context,   // the model's context is full
  cancelled,  // the callback of `stream` returned false, or the scheduler's request was cancelled
  timeout    // the scheduler's request exceeded its time limit
};

std::string_view name_of(FinishReason reason);

struct Generation {
  std::vector<std::int64_t> tokens;  // the new token ids
  ExitStats stats;
  FinishReason finish_reason = FinishReason::length;
  std::optional<std::string> text;  // text of the tokens up to a stop string, with GenerationConfig::detokenizer
  std::vector<TokenLogprobs> logprobs;  // one per token, with GenerationConfig::logprobs
  std::vector<PromptToken> prompt_logprobs;  // all but the first, with GenerationConfig::prompt_logprobs
  // The hidden states that the model's head reads, with GenerationConfig::states. Mode full: of all tokens that were run,
  // [prompt tokens + tokens - 1, width]. Mode exit: of each token at its exit, [tokens, width].
  std::vector<float> states;
};

class BatchState;
class Scheduler;
struct AuditConfig;
struct SchedulerLimits;

// A generation that runs as it is read. One thread at a time may use it.
class TokenStream {
 public:
  TokenStream(TokenStream&&) noexcept;
  TokenStream& operator=(TokenStream&&) noexcept;
  ~TokenStream();

  // Runs one step, which generates some tokens or, in lossless mode, possibly none yet. Returns whether another step may
  // follow. Throws GenerationError: the step or a callback failed; nothing has changed, and the next call tries again.
  bool step();

  // Steps until there is a token that it has not returned; none: the generation has ended.
  std::optional<Token> next();

  std::vector<Token> const& tokens() const;  // generated so far
  bool ended() const;
  Generation so_far() const;  // its finish_reason is valid once it has ended

 private:
  friend class Engine;
  class Impl;
  explicit TokenStream(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
  std::size_t read_ = 0;  // tokens that `next` returned
};

// A loaded bundle. Copies share it. May be used by several threads at once: each generation has its own State. It belongs to
// the process that loaded it: a forked child lacks its threads, so using it there throws GenerationError.
class Engine {
 public:
  // Opens a bundle. Throws BundleError: it is missing, damaged or written by an incompatible release, or a graph or engine
  // does not load. ConfigError: threads not in 1..1024. ProviderError: the provider cannot run this bundle here.
  static Engine load(std::filesystem::path const& bundle, LoadOptions const& options = {});

  // Internal: wraps a bundle that `load` has opened.
  explicit Engine(std::shared_ptr<Backend> backend);

  Manifest const& manifest() const;
  std::string const& manifest_text() const;  // the text of tide.json
  std::string const& provider() const;  // "cpu", "cuda", "tensorrt" or "tensorrt-rtx"

  // Returns how lossless mode drafts with these options, and what steps cost as it is known now; the first call may measure
  // that (docs/guide/same-text-faster.md).
  Drafting drafting(GenerationConfig config = {}) const;

  // Returns mode "auto" on this provider for the prompts of a list or all slots of a scheduler. None: full depth.
  std::optional<AutoMode> auto_mode(std::int64_t sequences = 1) const;

  // Replaces mode `automatic` of `config` by the mode and thresholds that it is; `sequences` as in `auto_mode`. Throws
  // GenerationError: mode is `automatic` and prompt_lookup is set.
  GenerationConfig resolved(GenerationConfig const& config, std::int64_t sequences = 1) const;

  // Generates the tokens that follow a prompt of token ids. Throws GenerationError: the prompt is empty, holds an id
  // outside the vocabulary or is longer than the model's context; an option is out of range; or a step failed.
  Generation generate(std::vector<std::int64_t> const& prompt, GenerationConfig const& config = {}) const;

  // Generates, and calls `on_token` with each token as it is generated. The generation ends when `on_token` returns false.
  // Exceptions of `on_token` are passed on.
  Generation stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config,
                    std::function<bool(Token const&)> const& on_token) const;

  // Checks a request and returns a stream of its tokens; the model runs as they are read. The stream may outlive the engine.
  // Throws as `generate`.
  TokenStream open_stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config = {}) const;

  // Generates for each prompt of a list, and returns the generations in its order. Up to `max_batch_size` sequences of any
  // lengths are decoded at a time; when one ends, the next prompt takes its slot. Each gets the tokens that it would get
  // alone with the same options, up to rounding (docs/guide/several-prompts.md), and its own statistics, whose seconds
  // are those of its steps.
  // (Bare braces around one token, `generate({5})`, fit both kinds of prompt and do not compile: name the type.)
  //
  // Throws GenerationError: as for one prompt.
  std::vector<Generation> generate(std::vector<std::vector<std::int64_t>> const& prompts,
                                   GenerationConfig const& config = {}) const;

  // Generates, and calls `on_token` with the number of the prompt, from 0, and each of its tokens. When it returns false,
  // that prompt's generation ends and the others continue. Exceptions of `on_token` are passed on and end all.
  std::vector<Generation> stream(std::vector<std::vector<std::int64_t>> const& prompts, GenerationConfig const& config,
                                 std::function<bool(std::size_t, Token const&)> const& on_token) const;

  // Creates a scheduler for requests that arrive over time (include tide/scheduler.h). audit: of mode exit; none: no audit.
  //
  // Throws GenerationError: a limit is out of range, or memory ran out.
  Scheduler scheduler(SchedulerLimits const& limits) const;
  Scheduler scheduler(SchedulerLimits const& limits, std::optional<AuditConfig> const& audit) const;

  // Maximum prompts of a list that are decoded at the same time.
  std::int64_t max_batch_size() const;

  // Opens the bundle's tokenizer.json.
  //
  // library: one with the C binding of Hugging Face's tokenizers, as github.com/mlc-ai/tokenizers-cpp builds it; none: the
  // environment variable TIDE_TOKENIZERS, else the system's libtokenizers_c.so. It stays open.
  //
  // Throws BundleError: the bundle holds no tokenizer.json. ProviderError: the library is missing.
  Tokenizer tokenizer(std::optional<std::filesystem::path> const& library = std::nullopt) const;

  // Checks options as `generate` does, for a list of `prompts` (none: one prompt), and fills in the mode that `automatic`
  // is, and the compaction threshold of a list.
  GenerationConfig checked(GenerationConfig const& config, std::optional<std::size_t> prompts) const;

  // Creates an empty batch to step by hand (include tide/batch.h). Throws GenerationError: memory ran out.
  BatchState start_batch(double compaction_threshold, std::int64_t slots) const;

  // Creates an empty sequence to `step` by hand. The state may outlive the engine.
  //
  // thresholds: one per checkpoint, as returned by `resolve_thresholds`; kNeverExit turns a checkpoint off.
  // max_pending: pending tokens before a segment must run; none: the bundle's.
  State start(std::vector<double> const& thresholds, std::optional<std::int64_t> max_pending = std::nullopt,
              std::optional<std::string> const& adapter = std::nullopt) const;

 private:
  friend class Scheduler;
  friend class BatchState;
  TokenStream open_stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config,
                          std::function<bool(Token const&)> on_token) const;

  std::shared_ptr<Backend> backend_;
};

// Returns the thresholds for `Engine::start`, one per checkpoint, kNeverExit where no token may exit: the configuration's,
// else the bundle's. Throws GenerationError.
std::vector<double> resolve_thresholds(Manifest const& manifest, GenerationConfig const& config);

}  // namespace tide
