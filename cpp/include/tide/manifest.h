// Declares the fields of a bundle's tide.json that this runtime reads (all fields: tide_export/bundle/manifest.py).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tide {

// The source model.
struct ModelInfo {
  std::string architecture;  // e.g. "LlamaForCausalLM"
  std::string weights_sha256;
  std::int64_t num_layers = 0;
  std::int64_t hidden_size = 0;  // width of the hidden states between segments
  std::int64_t vocab_size = 0;
  std::optional<std::int64_t> context_length;  // tokens; none: no limit
  std::vector<std::int64_t> eos_token_ids;
  struct KvShape {
    std::int64_t heads = 0;
    std::int64_t head_dim = 0;
  };
  // Of every layer's first attention, then of every layer's second, and so on: the K/V it reads; 0 heads: there is none.
  std::vector<KvShape> kv_shapes;
  std::vector<std::int64_t> kv_layers;  // of each of these, the one whose K/V it reads: itself or an earlier one
  // A recurrent state of a layer, one per sequence.
  struct State {
    std::int64_t layer = 0;
    std::int64_t number = 0;          // index among the layer's states
    std::vector<std::int64_t> shape;  // float32
    std::int64_t undo = 0;            // number of tokens that can be undone
  };
  std::vector<State> states;  // by layer and number
  // The linear layers that low-rank adapters may change (`LoadOptions::adapters`).
  struct Lora {
    struct Target {
      std::string name;                  // of the module in the source model
      std::vector<std::int64_t> layers;  // that run it; several where layers run in loops
      std::int64_t inputs = 0;           // columns of its matrix
      std::int64_t outputs = 0;          // rows of it
    };
    std::int64_t rank = 0;  // of an adapter, at most
    std::vector<Target> targets;

    // Numbers of one adapter: for each target in turn 1 if it is changed, else 0; down [inputs, rank]; up [rank, outputs].
    std::int64_t size() const;
  };
  std::optional<Lora> lora;  // none: there is no room for any

  // Number of tokens of one run, and drafts before it, that the recurrent states can undo; without them, any number.
  std::int64_t undo() const;

  // The layer of an attention, as `kv_shapes` numbers them.
  std::size_t layer_of(std::size_t attention) const { return attention % static_cast<std::size_t>(num_layers); }

  // Attentions whose K/V the layers first .. first + count - 1 read, ascending: their own, and those of earlier layers.
  std::vector<std::size_t> kv_read(std::size_t first, std::size_t count) const;
};

// Draft settings of mode `lossless`, as measured by `tide-export draft`, `export` or `tune --mode lossless`.
struct Drafting {
  std::vector<double> thresholds;  // one per checkpoint, in [0, 1]
  std::int64_t max_drafts = 0;     // maximum drafts by early exits per verification
  std::int64_t prompt_lookup = 0;  // maximum tokens of a prompt-lookup draft
  // Costs that replace the measured ones, of a request's drafting alone; empty: measured. In steps of full depth.
  std::vector<double> draft_costs = {};   // of an early exit at each checkpoint
  std::vector<double> verify_costs = {};  // of verifying 1, 2, 4, 8, 16 drafts
  std::optional<double> drafter_cost = {};  // of a drafter's draft; none: 0.1
  std::string costs_source = {};  // of what `Engine::drafting` returns: "given", "measured", "cache" or "assumed"
  std::optional<std::int64_t> max_learned = {};  // maximum drafts of a drafter per verification; none: 8
};

// A drafter, whose network is drafter.onnx.
struct DrafterInfo {
  std::string tokens;                   // ids that it can propose, ascending: "0-3,7"
  std::vector<double> acceptance;       // share of its drafts that are accepted, by confidence
  std::int64_t max_tokens = 0;          // rows of a sequence, after which its K/V start again
  ModelInfo::KvShape kv_shape{};        // of its own keys and values
  std::int64_t num_layers = 1;          // that have such keys and values
  std::int64_t block_size = 0;          // it drafts so many tokens less one in one run; 0: one token
  std::vector<std::int64_t> kv_layers;  // of the model, whose K/V it reads; empty: it has its own
  std::int64_t state_size = 0;          // width of the hidden states that it reads
  std::vector<std::int64_t> layers;     // layers after which it reads hidden states; empty: the final hidden state
};

// The embedding that networks take as an input: a separate file, on the GPU once for all networks.
struct EmbeddingInfo {
  std::int64_t rows = 0;  // tokens
  std::int64_t width = 0;
  bool tied = false;  // whether the head reads it too
};

// The segment networks and the head, which a bundle for TensorRT holds in addition to its graph.
struct NetworksInfo {
  std::string weights;               // precision of their weights, hidden states and K/V: "fp32", "fp16", "bf16"
  std::int64_t capacity = 0;         // tokens of their K/V buffers
  std::int64_t state_rows = 0;       // hidden states of each sequence in their other buffers
  std::int64_t max_tokens = 0;       // maximum tokens of one run; longer prompts are run in chunks
  std::int64_t max_logits = 0;       // maximum tokens of one run of the head
  std::int64_t exit_size = 0;        // width of the hidden states that the head reads
  std::int64_t max_batch_size = 0;   // maximum sequences of one run
  std::int64_t max_slot_tokens = 0;  // maximum tokens of each sequence in a run over several
  std::optional<EmbeddingInfo> embedding;  // none: each network that reads it holds a copy
  bool cuda = false;                       // whether they are for ONNX Runtime's CUDA provider, not for TensorRT
  bool cumulative = false;  // routers give the probability of an exit there of what has not exited before
};

// An optimization profile: minimum and maximum tokens of each sequence in a run, and the maximum of sequences.
struct Profile {
  std::string name;
  std::int64_t min_tokens = 0, max_tokens = 0, batch_size = 0;
};

// The plugin library that plans were built with.
struct PluginsInfo {
  std::string version;  // release of tide_export; plans load only with that release's library
  std::string sha256;   // of the library's file
};

// The TensorRT plans built from those networks.
struct PlansInfo {
  std::string flavour;                            // "tensorrt" or "tensorrt-rtx"
  std::string version;                            // of TensorRT; the plans run on no other
  std::vector<std::string> compute_capabilities;  // of the GPUs they run on, such as "8.9"; empty: the flavour's
  std::string weights_sha256;                     // of the source model, as `ModelInfo::weights_sha256`
  std::vector<Profile> profiles;
  std::optional<PluginsInfo> plugins;  // none: built from the functions' bodies instead
  // By network: bytes that a run over one sequence copies instead of updating them in place.
  std::map<std::string, std::int64_t> copied;
};

// Size and hash of one file of the bundle.
struct FileInfo {
  std::int64_t size = 0;  // bytes
  std::string sha256;     // hex
};

// What has been opened of a bundle: the text of its tide.json, and by name the descriptors of the files that it lists, which
// are duplicated.
struct OpenedFiles {
  std::string manifest;
  std::map<std::string, int> files;
};

// Mode "auto": the fastest mode that changes at most a share of the tokens, measured on one machine by
// `tide-export export` and `tune`.
struct AutoMode {
  std::string mode;                // "full", "exit" or "lossless"
  std::vector<double> thresholds;  // of mode exit, one per checkpoint, in [0, 1]
  std::string provider;            // provider of the measurement; on any other, mode "auto" is full depth
  std::optional<std::int64_t> slots;  // sequences at once for which it was faster too; none: one

  // Whether this applies to so many sequences at once; if not, mode "auto" is full depth.
  bool is_of(std::int64_t sequences) const { return sequences <= slots.value_or(1); }
};

struct Manifest {
  ModelInfo model;
  std::vector<std::int64_t> checkpoints;  // layers before each, ascending, never the last layer
  std::vector<double> thresholds;         // one per checkpoint, in [0, 1]; certified if `tune` was run
  std::int64_t min_layers = 0;            // checkpoints after fewer layers never exit
  std::int64_t max_pending = 0;           // tokens that may be pending before a segment must run
  double compaction_threshold = 1;        // batches: a smaller share of the sequences than this runs a segment alone
  std::string kv_cache = "float32";       // type of the K/V buffers: "float32" or "int8"
  std::optional<Drafting> drafting;
  std::optional<DrafterInfo> drafter;
  std::optional<AutoMode> auto_mode;  // none: not measured; mode "auto" is full depth
  std::optional<NetworksInfo> networks;
  std::optional<PlansInfo> engines;
  std::map<std::string, FileInfo> files;  // by path relative to the bundle, "/" between folders

  // Whether the drafter is a segment network too: not if it reads hidden states within segments.
  bool has_drafter_network() const { return networks && drafter && drafter->layers.empty() && drafter->kv_layers.empty(); }
  bool int8_kv() const { return kv_cache == "int8"; }

  // Shape of a K/V buffer of a layer for this many tokens, [1, kv_heads, tokens, head_dim]; in int8 each row ends with
  // the 4 bytes of its scale.
  std::vector<std::int64_t> kv_shape(std::size_t layer, std::int64_t tokens) const;
  std::int64_t kv_token_bytes() const;  // of the K/V of one token, of all layers

  // Layers before the end of each segment, shallowest first: the checkpoints and the model's depth.
  std::vector<std::int64_t> depths() const;

  // Reads these fields of a tide.json, each of which must be of its type and in range; it ignores others.
  //
  // source: the file's name, for errors.
  //
  // Throws BundleError.
  static Manifest from_json(std::string const& text, std::string const& source);
};

}  // namespace tide
