// What a bundle's tide.json says, as far as this runtime needs it (the whole of it: tide_export/manifest.py).
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
  std::int64_t lookup = 0;         // tokens drafted at most from earlier text
  std::int64_t least_match = 0;    // tokens that must have stood there before
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
  std::map<std::string, FileInfo> files;  // by path relative to the bundle, "/" between folders

  bool propagates() const { return kv_cache_strategy == "propagate"; }

  // Layers up to the end of each segment, shallowest first: the checkpoints and the model's depth.
  std::vector<std::int64_t> depths() const;

  // Parses strictly: every field there, of its type and in range, and no other. Of parts that other stages read
  // (calibration, networks, engines and the like) it only looks whether they are there.
  //
  // `source` is named in errors. Throws BundleError.
  static Manifest from_json(std::string const& text, std::string const& source);
};

}  // namespace tide
