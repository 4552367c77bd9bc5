// Runs a bundle of tide_export in a C++ program, on ONNX Runtime (CPU, CUDA) or on the bundle's TensorRT engines:
// `Engine::load`, then `generate` or `stream`. The Python package binds this runtime by the C interface (tide.h).
//
// Takes and returns token ids; `Engine::tokenizer` makes them of text.
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
  // "cpu" (ONNX Runtime), "tensorrt" or "tensorrt-rtx" (the bundle's engines, on the GPU), "cuda" (its segment networks, on
  // ONNX Runtime and the GPU). "auto": the first of the engines, "cuda" and "cpu" that the bundle holds and that runs here. A
  // provider that is named never falls back to another. "cpu-networks": the segment networks on the CPU, a reference for
  // the engines that are built of them.
  std::string provider = "auto";
  std::optional<std::int64_t> device;  // number of the GPU that a named provider runs on; none: the first
  // The plugin library for TensorRT engines that hold plugins; none: that of the environment variable TIDE_PLUGINS.
  // "none": no library.
  std::optional<std::filesystem::path> plugins;
  // The library of ONNX Runtime, of which a process opens one; none: that of the environment variable TIDE_ONNXRUNTIME, else
  // libonnxruntime where the system finds it.
  std::optional<std::filesystem::path> onnxruntime;
  // A file whose graph is run in place of the bundle's, on its weights (provider "cpu"): a check of its arithmetic.
  std::optional<std::filesystem::path> graph;
  // Receives one sentence that says which provider "auto" chose for a bundle that holds engines and why not the
  // engines, or that a plugin library is another build than the engines were built with. None: stderr.
  std::function<void(std::string const&)> log;
};

enum class Mode {
  // What `tide-export export` or `tune` measured to be fastest on this provider, within the share of tokens that it may
  // change: full where nothing was measured or gains, exit where threshold or min_layers is set.
  automatic,
  full,     // every token runs every layer
  exit,     // tokens may exit at a checkpoint
  lossless  // tokens that exit are drafts, which the full model verifies before they are returned
};

// The mode of this name; `automatic` is "auto". Throws GenerationError.
Mode mode_of(std::string_view name);
std::string_view name_of(Mode mode);

// One value for all of something, or one for each.
template <typename T>
class OneOrEach {
 public:
  OneOrEach(T value) : values_{value}, for_all_(true) {}
  OneOrEach(std::vector<T> values) : values_(std::move(values)), for_all_(false) {}

  bool for_all() const { return for_all_; }
  std::vector<T> const& values() const { return values_; }

  // As one for each of `count`; a single value is repeated.
  std::vector<T> values(std::size_t count) const { return for_all_ ? std::vector<T>(count, values_[0]) : values_; }

 private:
  std::vector<T> values_;
  bool for_all_;
};

using Threshold = OneOrEach<double>;   // exit threshold of all checkpoints, or of each; in [0, 1]
using Seed = OneOrEach<std::int64_t>;  // of the random numbers, for all prompts or for each of a list; 0 or more

// Changes the logits [vocabulary] from which the next token of a sequence is chosen: a token at -infinity cannot come.
// ids: the tokens of the prompt and those generated, in lossless mode with the drafts that follow them. It may be called
// again for shorter ids, for drafts were rejected; it is called in the thread that generates.
using LogitsProcessor =
    std::function<void(std::vector<std::int64_t> const& ids, float* logits, std::size_t vocabulary)>;

// Whether a token may follow these ids. It is asked for n-gram drafts alone: no saves the time of verifying them.
using AllowsToken = std::function<bool(std::vector<std::int64_t> const& ids, std::int64_t token)>;

// Options of a generation, with the names and defaults of Python's `GenerationConfig`. An option without a value takes
// the bundle's.
struct GenerationConfig {
  std::int64_t max_new_tokens = 64;  // 1 or more
  Mode mode = Mode::automatic;
  std::optional<Threshold> threshold;         // a token exits where the router's score exceeds it
  std::optional<std::int64_t> min_layers;     // checkpoints after fewer layers never exit; default in lossless mode: 0
  std::optional<std::int64_t> max_pending;    // pending tokens (lossless: drafts) before a segment must run
  std::optional<std::int64_t> prompt_lookup;  // lossless mode: tokens of one prompt-lookup draft, at most
  double temperature = 0;                     // 0: greedy; else logits are divided by it
  std::int64_t top_k = 0;                     // keep the k most likely tokens; 0: all
  double top_p = 1;                           // keep the fewest most likely tokens whose probabilities sum to this
  double min_p = 0;  // drop tokens less likely than this share of the most likely one's probability; 0: none
  // What changes the logits before a token is chosen, greedily or sampled, in this order. `lossless` gives the tokens of
  // `full` with these too.
  LogitsProcessor logits_processor;
  AllowsToken allows_token;  // none: any may
  double repetition_penalty = 1;  // of tokens in the prompt or generated: divides positive logits, multiplies others
  double frequency_penalty = 0;   // subtracted from a token's logit for each time that it was generated
  double presence_penalty = 0;    // subtracted if it was generated at all
  std::map<std::int64_t, double> logit_bias;  // added, by token id
  // Returns the log-probabilities, by the model's own logits, of each token and of this many most likely; none: no.
  std::optional<std::int64_t> logprobs;
  // The same of the prompt's tokens (`Generation::prompt_logprobs`), which all run through every layer, in every mode; none: no.
  std::optional<std::int64_t> prompt_logprobs;
  // Of the random numbers; none: a random one for each sequence. The same seed gives the same tokens in C++, C and Python.
  std::optional<Seed> seed;
  std::optional<std::vector<std::int64_t>> stop_token_ids;  // none: the model's; an empty list: never stop
  // Strings that end the generation where they come up in its text, also across tokens; for them `detokenizer` is needed.
  std::vector<std::string> stop;
  Detokenizer detokenizer;  // makes `Generation::text`
  std::optional<Drafting> drafting;  // of lossless mode; none: the bundle's
  // Lossless mode: drafts of the bundle's drafter before one verification, at most; 0: none. None: the bundle's.
  std::optional<std::int64_t> drafter;
  // Gives `Generation::states`; modes full and, for lists and schedulers, exit.
  bool states = false;
  // Lists of prompts, in [0, 1]: if a smaller share of the sequences needs a segment, only those run it; else all with
  // pending tokens run it too. Changes speed, never tokens. Default in lossless mode: 0.
  std::optional<double> compaction_threshold;
};

// Log-probabilities at the position of one token, by the model's logits before anything changes them.
struct TokenLogprobs {
  double logprob;                                     // of the token
  std::vector<std::pair<std::int64_t, double>> top;  // the most likely tokens, best first; of equal ones the lowest id
};

// A token of a prompt.
struct PromptToken {
  std::int64_t id;
  TokenLogprobs logprobs;
};

// One generated token.
struct Token {
  std::int64_t id;
  std::int64_t exit_layer;  // layers its logits went through (accepted draft: when drafted); 0: a draft by prompt lookup or a drafter
  std::int64_t layers_run;  // layer passes it cost; those of rejected drafts count for the token that replaced them
  std::optional<TokenLogprobs> logprobs = {};  // where GenerationConfig::logprobs asks for them
};

enum class FinishReason {
  stop,      // a stop token, which is included, or a stop string
  length,    // max_new_tokens
  context,   // the model's context is full
  cancelled,  // the callback of `stream` returned false, or the request of a scheduler was cancelled
  timeout    // the request of a scheduler took longer than it may
};

std::string_view name_of(FinishReason reason);

struct Generation {
  std::vector<std::int64_t> tokens;  // the generated ones
  ExitStats stats;
  FinishReason finish_reason = FinishReason::length;
  std::optional<std::string> text;  // of the tokens, up to a stop string, where GenerationConfig::detokenizer makes it
  std::vector<TokenLogprobs> logprobs;  // one per token where GenerationConfig::logprobs asks for them
  std::vector<PromptToken> prompt_logprobs;  // all but the first, where GenerationConfig::prompt_logprobs asks for them
  // What the model's head reads, where GenerationConfig::states asks for it. Mode full: of all tokens that were run,
  // [prompt's tokens + tokens - 1, width]. Mode exit: for each token, at its exit, [tokens, width].
  std::vector<float> states;
};

class BatchState;
class Scheduler;
struct AuditConfig;
struct SchedulerLimits;

// A generation that is made as it is read. One thread at a time may use it.
class TokenStream {
 public:
  TokenStream(TokenStream&&) noexcept;
  TokenStream& operator=(TokenStream&&) noexcept;
  ~TokenStream();

  // Runs one step, which makes some tokens or, where lossless mode drafts, none yet. Returns whether another step may
  // follow. Throws GenerationError: the step failed, or a callback; nothing has changed, and the next call tries again.
  bool step();

  // Steps until there is a token that it has not returned; none: the generation has ended.
  std::optional<Token> next();

  std::vector<Token> const& tokens() const;  // made so far
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
// the process that loaded it: in a child that is forked, where its threads are missing, a use of it throws GenerationError.
class Engine {
 public:
  // Opens a bundle. Throws BundleError: it is missing, damaged or of another release, or a graph or engine does not
  // load. ConfigError: threads not in 1..1024. ProviderError: the provider cannot run this bundle here.
  static Engine load(std::filesystem::path const& bundle, LoadOptions const& options = {});

  // Internal: takes a bundle that `load` has opened.
  explicit Engine(std::shared_ptr<Backend> backend);

  Manifest const& manifest() const;
  std::string const& manifest_text() const;  // tide.json, as it was read
  std::string const& provider() const;  // "cpu", "cuda", "tensorrt" or "tensorrt-rtx"

  // How lossless mode drafts: as the bundle was tuned, else by default.
  Drafting drafting() const;

  // What mode "auto" is on this provider for so many sequences at once: the prompts of a list, or the slots of a
  // scheduler, however many are taken. None: nothing else was measured to pay, so that it is full depth.
  std::optional<AutoMode> auto_mode(std::int64_t sequences = 1) const;

  // `config` with the mode and thresholds that mode `automatic` stands for, where it has that mode; `sequences` as in
  // `auto_mode`. Throws GenerationError: prompt_lookup is set for it.
  GenerationConfig resolved(GenerationConfig const& config, std::int64_t sequences = 1) const;

  // Generates the tokens that follow a prompt of token ids. Throws GenerationError: the prompt is empty, holds an id
  // outside the vocabulary or is longer than the model's context; an option is out of range; or a step failed.
  Generation generate(std::vector<std::int64_t> const& prompt, GenerationConfig const& config = {}) const;

  // As `generate`, and calls `on_token` with each token as it is made. The generation ends when `on_token` returns
  // false. Exceptions of `on_token` are passed on.
  Generation stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config,
                    std::function<bool(Token const&)> const& on_token) const;

  // Checks a request and returns its tokens as they are made; the model runs as they are read. The stream may outlive the
  // engine. Throws as `generate`.
  TokenStream open_stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config = {}) const;

  // Generates for each prompt, in their order. Up to `max_batch_size` sequences of any lengths are decoded at a time;
  // when one ends, the next prompt takes its slot. Each gets the tokens that it would get alone with the same options,
  // up to rounding (docs/guide/batches.md), and its own statistics, whose seconds are those of the steps it was in. The
  // networks for batches are loaded on the first call, and again when a longer list needs larger ones.
  // (Bare braces around one token, `generate({5})`, fit both kinds of prompt and do not compile: name the type.)
  //
  // Throws GenerationError: as for one prompt, or the bundle holds no networks for batches. BundleError: such a network
  // does not load or does not match the manifest.
  std::vector<Generation> generate(std::vector<std::vector<std::int64_t>> const& prompts,
                                   GenerationConfig const& config = {}) const;

  // As `generate`, and calls `on_token` with the number of the prompt, from 0, and each of its tokens. When it returns
  // false, that prompt's generation ends and the others continue. Exceptions of `on_token` are passed on and end all.
  std::vector<Generation> stream(std::vector<std::vector<std::int64_t>> const& prompts, GenerationConfig const& config,
                                 std::function<bool(std::size_t, Token const&)> const& on_token) const;

  // A scheduler of its own for requests that come and go: include tide/scheduler.h. audit: of mode exit; none: none.
  //
  // Throws GenerationError: a limit is out of range, the bundle holds no networks for batches, or there is no memory.
  // BundleError: as for a list.
  Scheduler scheduler(SchedulerLimits const& limits) const;
  Scheduler scheduler(SchedulerLimits const& limits, std::optional<AuditConfig> const& audit) const;

  // Prompts of a list that are decoded at the same time; 1: lists are refused.
  std::int64_t max_batch_size() const;

  // Opens the bundle's tokenizer.json.
  //
  // library: one with the C binding of Hugging Face's tokenizers, as github.com/mlc-ai/tokenizers-cpp makes it; none:
  // that of the environment variable TIDE_TOKENIZERS, else libtokenizers_c.so where the system finds it. It stays open.
  //
  // Throws BundleError: the bundle holds no tokenizer.json. ProviderError: there is no such library.
  Tokenizer tokenizer(std::optional<std::filesystem::path> const& library = std::nullopt) const;

  // Throws what `generate` of a list of so many prompts would throw about its options; none: of one prompt. Returns the
  // options with the mode that mode `automatic` is, and with the compaction threshold of a list.
  GenerationConfig checked(GenerationConfig const& config, std::optional<std::size_t> prompts) const;

  // Seconds of one draft of the bundle's drafter for each of some sequences that have so many rows, the median of several
  // runs; NaN: there is no drafter that this provider runs.
  double seconds_of_draft(std::size_t rows, std::size_t sequences) const;

  // Starts an empty batch to step by hand: include tide/batch.h. Throws GenerationError and BundleError as for a list.
  BatchState start_batch(double compaction_threshold, std::int64_t slots) const;

  // Starts an empty sequence to `step` by hand. The state may outlive the engine.
  //
  // thresholds: one per checkpoint, as returned by `resolve_thresholds`; kNeverExit turns a checkpoint off.
  // max_pending: pending tokens before a segment must run; none: the bundle's.
  State start(std::vector<double> const& thresholds, std::optional<std::int64_t> max_pending = std::nullopt) const;

 private:
  friend class Scheduler;
  friend class BatchState;
  TokenStream open_stream(std::vector<std::int64_t> const& prompt, GenerationConfig const& config,
                          std::function<bool(Token const&)> on_token) const;

  std::shared_ptr<Backend> backend_;
};

// The thresholds for `Engine::start`, one per checkpoint, kNeverExit where none may exit: the configuration's, else the
// bundle's. Throws GenerationError.
std::vector<double> resolve_thresholds(Manifest const& manifest, GenerationConfig const& config);

}  // namespace tide
