// The strict parser of tide.json. Messages are those of tide_export/bundle/manifest.py.
#include "tide/manifest.h"

#include <algorithm>
#include <functional>
#include <set>

#include "bundle/drafter_fields.h"
#include "bundle/engine_fields.h"
#include "bundle/fields.h"
#include "bundle/mode_fields.h"
#include "bundle/model_fields.h"
#include "bundle/store.h"
#include "formatting.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr char const* kSchema = "tide_export.bundle/11";

// All fields of a manifest. Those that this runtime does not read are checked too.
std::vector<std::string> const kFields = {"model",       "checkpoints",          "thresholds",   "min_layers",
                                          "max_pending", "weights",              "targets",      "opset",
                                          "inputs",      "outputs",              "calibration",  "versions",
                                          "created",     "compaction_threshold", "tuning",       "drafting",
                                          "networks",    "engines",              "quantization", "remote_code",
                                          "kv_cache",    "auto",                 "drafter",      "files"};
std::set<std::string> const kOmitted = {"quantization", "remote_code", "kv_cache", "auto", "drafter"};  // or missing

constexpr char const* kExportAgain =
    "export again (`tide-export export MODEL -o NEW --routers OLD/routers.safetensors` keeps its routers)";

// Removes the field of earlier bundles that says how skipped layers get keys and values; only exact ones are left.
void take_strategy(Json& data, std::string const& source) {
  auto const found = data.object.find("kv_cache_strategy");
  if (found == data.object.end()) return;
  Json const& strategy = found->second;
  if (strategy.is(Json::Kind::text) && strategy.text == "propagate") {
    throw BundleError(source + " is of a bundle that propagates K/V (kv_cache_strategy propagate), which tide_export no "
                      "longer does: exact K/V agree with full depth on 2 to 5 points more tokens and are as fast; " +
                      kExportAgain);
  }
  if (!strategy.is(Json::Kind::text) || strategy.text != "exact") {
    throw BundleError(source + ": field 'kv_cache_strategy' must be exact");
  }
  data.object.erase(found);
}

std::map<std::string, FileInfo> files_of(Field const& field) {
  std::map<std::string, FileInfo> files;
  for (auto const& [name, entry] : field.entries()) {
    entry.object({"size", "sha256"});
    files[name] = FileInfo{entry["size"].whole(), entry["sha256"].text()};
  }
  return files;
}

void check_tensors(Field const& field) {
  field.list<bool>([](Field const& entry) {
    entry.object({"name", "dtype", "shape"});
    entry["name"].text();
    entry["dtype"].text();
    entry["shape"].list<bool>([](Field const& dim) {
      dim.whole_or_text();
      return true;
    });
    return true;
  });
}

// How the graph's matrices were quantized: checked, not used.
struct Quantization {
  std::string method;
  std::int64_t bits = 0, block_size = 0, accuracy_level = 0;
};

std::optional<Quantization> quantization_of(Field const& manifest) {
  if (!manifest.has("quantization") || manifest["quantization"].is_null()) return std::nullopt;
  Field const field = manifest["quantization"];
  field.object({"method", "bits", "block_size", "symmetric", "accuracy_level"});
  Quantization used;
  used.method = field["method"].text();
  used.bits = field["bits"].whole();
  used.block_size = field["block_size"].whole();
  field["symmetric"].boolean();
  used.accuracy_level = field["accuracy_level"].whole();
  return used;
}

// Whether a file's name is a path that stays inside the bundle, without control characters.
bool is_inside(std::string const& name) {
  if (name.empty() || name == "." || name == kManifestFile || name[0] == '/') return false;
  auto const is_plain = [](char c) { return c != '\\' && static_cast<unsigned char>(c) >= ' ' && c != '\x7f'; };
  return ("/" + name + "/").find("/../") == std::string::npos && std::all_of(name.begin(), name.end(), is_plain);
}


void check_networks(Manifest const& manifest, Require const& require) {
  std::vector<std::string> parts;
  for (std::size_t k = 0; k <= manifest.checkpoints.size(); ++k) parts.push_back(names::segment(k));
  parts.insert(parts.end(), {names::kHead, names::kBest, names::kCandidates});
  if (auto const& networks = manifest.networks) {
    require(std::set<std::string>{"fp32", "fp16", "bf16"}.count(networks->weights) == 1, "networks.weights",
            "must be one of fp32, fp16, bf16");
    require(!networks->matrices || std::set<std::string>{"int4", "fp8"}.count(*networks->matrices) == 1,
            "networks.matrices", "must be one of int4, fp8");
    std::pair<char const*, std::int64_t> const sizes[] = {
        {"capacity", networks->capacity},             {"max_tokens", networks->max_tokens},
        {"max_logits", networks->max_logits},         {"exit_size", networks->exit_size},
        {"max_batch_size", networks->max_batch_size}, {"max_slot_tokens", networks->max_slot_tokens}};
    for (auto const& [name, size] : sizes) require(size >= 1, std::string("networks.") + name, "must be 1 or more");
    require(networks->max_tokens <= networks->capacity, "networks.max_tokens", "must be at most capacity");
    bool const has_rows = networks->state_rows > 0 && networks->max_tokens <= networks->state_rows - names::kFinalRow;
    require(has_rows, "networks.state_rows",
            "must be " + std::to_string(names::kFinalRow) + " more than max_tokens or larger");
    for (std::size_t const i : {std::size_t{2}, std::size_t{5}}) {
      require(sizes[i].second <= networks->max_tokens, std::string("networks.") + sizes[i].first,
              "must be at most max_tokens");
    }
    bool const fits = networks->max_slot_tokens <= networks->max_tokens / networks->max_batch_size;
    require(networks->max_batch_size == 1 || fits, "networks.max_slot_tokens",
            "must fit max_batch_size times into max_tokens");
    if (auto const& embedding = networks->embedding) {
      auto const file = manifest.files.find(kEmbeddingFile);
      std::int64_t const size = file == manifest.files.end() ? 0 : file->second.size;
      std::int64_t const item = networks->weights == "fp32" ? 4 : 2, numbers = size / item, width = embedding->width;
      bool const stored = 1 <= width && width <= numbers && size % item == 0 && numbers % width == 0 &&
                          numbers / width == embedding->rows;
      require(stored, "networks.embedding", std::string("must have the shape of the file ") + kEmbeddingFile);
    }
    std::vector<std::string> all = parts;
    if (manifest.has_drafter_network()) all.push_back(names::kDrafter);
    for (std::string const& part : all) {
      std::string const file = network_file(part);
      require(manifest.files.count(file) == 1, "files", "does not list " + file);
    }
  }
  if (auto const& engines = manifest.engines) {
    require(manifest.networks.has_value(), "engines", "needs the field 'networks'");
    require(engines->flavour == "tensorrt" || engines->flavour == "tensorrt-rtx", "engines.flavour",
            "must be one of tensorrt, tensorrt-rtx");
    require(!engines->profiles.empty(), "engines.profiles", "must not be empty");
    std::int64_t batch_size = 0;
    for (Profile const& profile : engines->profiles) {
      bool const ordered = 1 <= profile.min_tokens && profile.min_tokens <= profile.opt_tokens &&
                           profile.opt_tokens <= profile.max_tokens;
      require(ordered, "engines.profiles", "must have min_tokens <= opt_tokens <= max_tokens, all 1 or more");
      batch_size = std::max(batch_size, profile.batch_size);
    }
    require(batch_size == manifest.networks->max_batch_size, "engines.profiles",
            "must have the batch size networks.max_batch_size");
    auto const is_part = [&](std::string const& name) {
      return std::find(parts.begin(), parts.end(), name) != parts.end();
    };
    if (auto const& plugins = engines->plugins) {
      require(!plugins->engines.empty() && std::all_of(plugins->engines.begin(), plugins->engines.end(), is_part),
              "engines.plugins.engines", "must be some of the engines");
    }
    if (auto const& built = engines->built) {
      bool const drafts = built->count(names::kDrafter) == 1 && manifest.files.count(engine_file(names::kDrafter)) == 1;
      bool const all = built->size() == parts.size() + (drafts ? 1 : 0) &&
                       std::all_of(built->begin(), built->end(), [&](auto const& one) {
                         return is_part(one.first) || (drafts && one.first == names::kDrafter);
                       });
      require(all, "engines.built", "must have one entry per engine");
      for (auto const& [name, one] : *built) {
        std::string const where = "engines.built." + name;
        std::int64_t const fused = one.fused_attention_layers;
        require(std::min({one.weights_bytes, one.activation_bytes, one.layers, fused}) >= 0, where,
                "holds a negative value");
        require(fused <= one.attention_layers, where + ".fused_attention_layers", "must be at most attention_layers");
      }
    }
    for (auto const& [name, copied] : engines->copied) {
      bool const is_engine = is_part(name) || (name == names::kDrafter && manifest.files.count(engine_file(name)) == 1);
      require(is_engine && copied >= 1, "engines.copied." + shown_name(name), "must be an engine's bytes, 1 or more");
    }
    for (std::string const& part : parts) {
      std::string const file = engine_file(part);
      require(manifest.files.count(file) == 1, "files", "does not list " + file);
    }
  }
}

void check_quantization(std::string const& weights, std::optional<Quantization> const& used, Require const& require) {
  std::int64_t const bits = weights == "int8" ? 8 : weights == "int4" ? 4 : 0;
  require(used.has_value() == (bits > 0), "quantization", "must be there for weights int8 and int4 alone");
  if (!used) return;
  require(std::set<std::string>{"rtn", "gptq", "checkpoint"}.count(used->method) == 1, "quantization.method",
          "is none of rtn, gptq, checkpoint");
  require(used->bits == bits, "quantization.bits", "must be " + std::to_string(bits) + " for weights " + weights);
  require(std::set<std::int64_t>{16, 32, 64, 128, 256}.count(used->block_size) == 1, "quantization.block_size",
          "is none of 16, 32, 64, 128, 256");
  require(0 <= used->accuracy_level && used->accuracy_level < 5, "quantization.accuracy_level", "must lie in 0..4");
}

// Checks ranges and the consistency of fields with each other.
void check(Manifest const& manifest, std::vector<std::string> const& targets, std::optional<Quantization> const& used,
           std::string const& source) {
  Require const require = [&](bool condition, std::string const& name, std::string const& rule) {
    if (!condition) throw BundleError(source + ": field '" + name + "' " + rule);
  };
  auto const all = [](auto const& values, auto const& holds) {
    return std::all_of(values.begin(), values.end(), holds);
  };
  auto const is_share = [](double value) { return 0 <= value && value <= 1; };
  ModelInfo const& model = manifest.model;
  std::vector<std::int64_t> const& points = manifest.checkpoints;
  check_model(model, require);
  require(!manifest.networks || model.states.empty(), "model.states", "are for target onnxruntime alone");
  require(!manifest.networks || !model.lora, "model.lora", "is for target onnxruntime alone");
  for (std::size_t i = 1; i < points.size(); ++i) {
    require(points[i - 1] < points[i], "checkpoints", "must be distinct and ascending");
  }
  require(all(points, [&](auto layers) { return 1 <= layers && layers < model.num_layers; }), "checkpoints",
          "must lie in 1.." + std::to_string(model.num_layers - 1));
  require(manifest.thresholds.size() == points.size(), "thresholds", "must have one value per checkpoint");
  require(all(manifest.thresholds, is_share), "thresholds", "must lie in [0, 1]");
  check_modes(manifest, require);
  require(manifest.min_layers >= 0, "min_layers", "must be 0 or more");
  require(manifest.max_pending >= 0, "max_pending", "must be 0 or more");
  require(manifest.kv_cache == "float32" || manifest.int8_kv(), "kv_cache", "must be one of float32, int8");
  require(!manifest.int8_kv() || !manifest.networks, "kv_cache", "int8 is for target onnxruntime alone");
  require(is_share(manifest.compaction_threshold), "compaction_threshold", "must lie in [0, 1]");
  require(std::set<std::string>{"fp32", "bf16", "fp16", "int8", "int4"}.count(manifest.weights) == 1, "weights",
          "must be one of fp32, bf16, fp16, int8, int4");
  auto const is_target = [](std::string const& target) {
    return target == "onnxruntime" || target == "tensorrt" || target == "tensorrt-rtx";
  };
  require(!targets.empty() && all(targets, is_target), "targets", "must be some of onnxruntime, tensorrt, tensorrt-rtx");
  require(manifest.files.count(kGraphFile) == 1, "files", std::string("does not list ") + kGraphFile);
  require(manifest.drafter.has_value() == (manifest.files.count(kDrafterFile) == 1), "drafter",
          std::string("must be there with the file ") + kDrafterFile + ", and not without it");
  if (manifest.drafter) check_drafter(*manifest.drafter, model, require);
  check_networks(manifest, require);
  check_quantization(manifest.weights, used, require);
  for (auto const& [name, info] : manifest.files) {
    std::string const where = "files." + shown_name(name);
    require(is_inside(name), where, "is not a path inside the bundle");
    require(info.size >= 0, where + ".size", "must be 0 or more");
    bool const is_hash =
        info.sha256.size() == 64 && info.sha256.find_first_not_of("0123456789abcdef") == std::string::npos;
    require(is_hash, where + ".sha256", "must be 64 lower-case hex digits");
  }
}

}  // namespace

void check_manifest_size(std::int64_t size, std::string const& source) {
  constexpr std::int64_t kMaxBytes = 1 << 24;  // those of large models have about 1 MB
  if (size <= kMaxBytes) return;
  throw BundleError(source + " is too large: a manifest has at most " + std::to_string(kMaxBytes) + " bytes");
}

std::vector<std::int64_t> Manifest::depths() const {
  std::vector<std::int64_t> depths = checkpoints;
  depths.push_back(model.num_layers);
  return depths;
}

std::vector<std::int64_t> Manifest::kv_shape(std::size_t layer, std::int64_t tokens) const {
  constexpr std::int64_t kScaleBytes = 4;
  auto const [heads, head_dim] = model.kv_shapes[layer];
  return {1, heads, tokens, head_dim + (int8_kv() ? kScaleBytes : 0)};
}

std::int64_t Manifest::kv_token_bytes() const {
  std::int64_t numbers = 0;
  for (std::size_t const layer : model.kv_read(0, model.kv_shapes.size())) {
    std::vector<std::int64_t> const shape = kv_shape(layer, 1);
    numbers += 2 * shape[1] * shape[3];
  }
  return numbers * (int8_kv() ? 1 : 4);
}

Manifest Manifest::from_json(std::string const& text, std::string const& source) {
  check_manifest_size(static_cast<std::int64_t>(text.size()), source);
  std::optional<Json> parsed = Json::parse(text);
  if (!parsed) throw BundleError(source + " is not valid JSON: export the bundle again or copy it anew");
  Json& data = *parsed;
  auto const named = data.object.find("schema");
  if (named == data.object.end() || !named->second.is(Json::Kind::text)) {
    throw BundleError(source + " is not the manifest of a bundle: it has no field 'schema'");
  }
  if (std::string const& schema = named->second.text; schema != kSchema) {
    throw BundleError(source + " has schema '" + shown_name(schema) + "' but this release reads '" + kSchema +
                      "': " + kExportAgain + ", or use the tide_export release that wrote it");
  }
  data.object.erase(named);
  take_strategy(data, source);
  Field const field(data, source, "");
  field.object(kFields, kOmitted);
  Manifest manifest;  // its fields in the order of kFields, as Python reads them
  manifest.model = model_of(field["model"]);
  manifest.checkpoints = field["checkpoints"].wholes();
  manifest.thresholds = field["thresholds"].reals();
  manifest.min_layers = field["min_layers"].whole();
  manifest.max_pending = field["max_pending"].whole();
  manifest.weights = field["weights"].text();
  std::vector<std::string> const targets = field["targets"].texts();
  field["opset"].whole();
  check_tensors(field["inputs"]);
  check_tensors(field["outputs"]);
  if (!field["calibration"].is_null()) field["calibration"].entries();
  for (auto const& [name, version] : field["versions"].entries()) version.text();
  field["created"].text();
  manifest.compaction_threshold = field["compaction_threshold"].real();
  if (!field["tuning"].is_null()) field["tuning"].entries();
  manifest.drafting = drafting_of(field["drafting"]);
  manifest.networks = networks_of(field["networks"]);
  manifest.engines = engines_of(field["engines"]);
  std::optional<Quantization> const used = quantization_of(field);
  if (field.has("remote_code") && !field["remote_code"].is_null()) field["remote_code"].boolean();
  if (field.has("kv_cache") && !field["kv_cache"].is_null()) manifest.kv_cache = field["kv_cache"].text();
  manifest.auto_mode = auto_mode_of(field);
  manifest.drafter = drafter_of(field);
  manifest.files = files_of(field["files"]);
  check(manifest, targets, used, source);
  return manifest;
}

}  // namespace tide
