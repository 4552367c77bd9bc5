// What a bundle's tide.json says, as far as this runtime needs it (the whole of it: tide_export/bundle/manifest.py).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tide {

// The source model.
struct ModelInfo {
  std::string name;          // what the user called it: a hub id or a folder
  std::string architecture;  // e.g. "LlamaForCausalLM"
  std::string weights_sha256;
  std::int64_t num_layers = 0;
  std::int64_t hidden_size = 0;
  std::int64_t vocab_size = 0;
  std::optional<std::int64_t> context_length;  // tokens; none: the model has no limit of its own
  std::vector<std::int64_t> eos_token_ids;
  struct KvShape {
    std::int64_t heads = 0;
    std::int64_t head_dim = 0;
  };
  std::vector<KvShape> kv_shapes;  // one per layer
};

// How `lossless` mode drafts, where `tide-export tune --mode lossless` found it.
struct Drafting {
  std::vector<double> thresholds;  // one per checkpoint, in [0, 1]
  std::int64_t max_drafts = 0;     // drafts by early exits that may wait for one verification
  std::int64_t prompt_lookup = 0;  // tokens drafted at most from earlier text
  std::int64_t min_match = 0;    // tokens that must have stood there before
};

// The networks of one segment each, and of the head, that the bundle holds beside its graph.
struct NetworksInfo {
  std::string weights;            // precision of their weights, states and K/V: "fp32", "fp16", "bf16"
  std::int64_t capacity = 0;      // tokens their K/V buffers hold
  std::int64_t max_tokens = 0;   // tokens one run may take; longer prompts are run in parts
  std::int64_t max_logits = 0;   // tokens one run of the head may take
  std::int64_t exit_size = 0;     // width of the states the head takes
  std::int64_t max_batch_size = 0;     // sequences one run may take; 1: one alone
  std::int64_t max_slot_tokens = 0;    // tokens of each sequence in a run over several
};

// An optimization profile: fewest, most usual and most tokens of each sequence in a run, and most sequences.
struct Profile {
  std::string name;
  std::int64_t min_tokens = 0, opt_tokens = 0, max_tokens = 0, batch_size = 0;
};

// The plugin library that engines were built with, and which of them hold its plugins.
struct PluginsInfo {
  std::string version;               // release of tide_export; engines are loaded with that release's library alone
  std::string sha256;                // of the library's file
  std::vector<std::string> engines;  // their names: segment_00, ...
};

// The engines that were built from those networks.
struct EnginesInfo {
  std::string flavour;                            // "tensorrt" or "tensorrt-rtx"
  std::string version;                            // of that library; engines run on no other
  std::vector<std::string> compute_capabilities;  // of the GPUs they run on, such as "8.9"; empty: 8.0 and later
  std::string weights_sha256;                     // of the source model, as `ModelInfo::weights_sha256`
  std::vector<Profile> profiles;
  double seconds = 0;                  // that building took
  std::optional<PluginsInfo> plugins;  // none: the networks' functions were built instead
};

// Of one file of the bundle.
struct FileInfo {
  std::int64_t size = 0;  // bytes
  std::string sha256;     // hex
};

struct Manifest {
  ModelInfo model;
  std::vector<std::int64_t> checkpoints;  // layers run at each, ascending, never the last layer
  std::vector<double> thresholds;         // one per checkpoint, in [0, 1]; certified ones where `tune` was run
  std::int64_t min_layers = 0;            // checkpoints with fewer layers behind them never exit
  std::int64_t max_pending = 0;
  double compaction_threshold = 1;  // of lists of prompts: fewer than this share of them go deep alone
  std::string kv_cache_strategy;  // "exact" or "propagate": what becomes of the K/V of skipped layers
  std::string weights;            // precision of the graph's weights: "fp32", "int8", "int4"
  std::optional<Drafting> drafting;
  std::optional<NetworksInfo> networks;
  std::optional<EnginesInfo> engines;
  std::map<std::string, FileInfo> files;  // by path relative to the bundle, "/" between folders

  bool propagates() const { return kv_cache_strategy == "propagate"; }

  // Layers up to the end of each segment, shallowest first: the checkpoints and the model's depth.
  std::vector<std::int64_t> depths() const;

  // Parses strictly: every field there, of its type and in range, and no other. Of parts that other stages read
  // (calibration, quantization and the like) it only looks whether they are there.
  //
  // `source` is named in errors. Throws BundleError.
  static Manifest from_json(std::string const& text, std::string const& source);
};

}  // namespace tide
