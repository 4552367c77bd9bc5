// The strict parser of tide.json. Messages are those of tide_export/bundle/manifest.py.
#include "tide/manifest.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "bundle/store.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

using Json = nlohmann::json;

constexpr char const* kSchema = "tide_export.bundle/7";

// All fields of a manifest, including those that this runtime does not read.
std::vector<std::string> const kFields = {"model",      "checkpoints",  "thresholds",
                                          "min_layers", "max_pending",  "kv_cache_strategy",
                                          "weights",    "targets",      "opset",
                                          "inputs",     "outputs",      "calibration",
                                          "versions",   "created",      "compaction_threshold",
                                          "tuning",     "drafting",     "networks",
                                          "engines",    "quantization", "remote_code",
                                          "files"};
std::set<std::string> const kOmitted = {"quantization", "remote_code"};  // may be missing

// One value of the file, with its location for messages.
class Field {
 public:
  Field(Json const& value, std::string source, std::string where)
      : value_(value), source_(std::move(source)), where_(std::move(where)) {}

  bool is_null() const { return value_.is_null(); }

  [[noreturn]] void refuse(std::string const& rule) const {
    throw BundleError(source_ + ": field '" + where_ + "' " + rule);
  }

  std::int64_t whole() const {
    bool const too_large = value_.is_number_unsigned() &&
                           value_.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()};
    if (!value_.is_number_integer() || too_large) wrong("a whole number");
    return value_.get<std::int64_t>();
  }

  double real() const {
    if (!value_.is_number() || !std::isfinite(value_.get<double>())) wrong("a number");
    return value_.get<double>();
  }

  std::string text() const {
    if (!value_.is_string()) wrong("a string");
    return value_.get<std::string>();
  }

  template <typename T>
  std::vector<T> list(std::function<T(Field const&)> const& entry) const {
    if (!value_.is_array()) wrong("a list");
    std::vector<T> values;
    for (std::size_t i = 0; i < value_.size(); ++i) {
      values.push_back(entry(Field(value_[i], source_, where_ + "." + std::to_string(i))));
    }
    return values;
  }

  std::vector<std::int64_t> wholes() const {
    return list<std::int64_t>([](Field const& entry) { return entry.whole(); });
  }

  std::vector<double> reals() const {
    return list<double>([](Field const& entry) { return entry.real(); });
  }

  // This value, checked to be an object with these fields and no others; those in `omitted` may be missing.
  Field const& object(std::vector<std::string> const& fields, std::set<std::string> const& omitted = {}) const {
    if (!value_.is_object()) wrong("an object");
    for (std::string const& name : fields) {
      if (!value_.contains(name) && omitted.count(name) == 0) at(name, nullptr).refuse("is missing");
    }
    for (auto const& [name, entry] : value_.items()) {
      if (std::find(fields.begin(), fields.end(), name) == fields.end()) at(name, entry).refuse("is unknown");
    }
    return *this;
  }

  std::map<std::string, Field> entries() const {
    if (!value_.is_object()) wrong("an object");
    std::map<std::string, Field> fields;
    for (auto const& [name, entry] : value_.items()) fields.emplace(name, at(name, entry));
    return fields;
  }

  Field operator[](std::string const& name) const { return at(name, value_.at(name)); }

 private:
  Field at(std::string const& name, Json const& value) const {
    return Field(value, source_, where_.empty() ? name : where_ + "." + name);
  }

  [[noreturn]] void wrong(std::string const& expected) const {
    // Lists and objects are not printed: they may be nested deeper than the stack.
    std::string const text = value_.is_array()    ? "a list"
                             : value_.is_object() ? "an object"
                                                  : value_.dump(-1, ' ', true);
    refuse("must be " + expected + ", not " + text.substr(0, 60));
  }

  Json const& value_;
  std::string source_, where_;
};

ModelInfo model_of(Field const& field) {
  field.object({"name", "architecture", "weights_sha256", "num_layers", "hidden_size", "vocab_size", "context_length",
                "eos_token_ids", "kv_shapes"});
  ModelInfo model;
  model.name = field["name"].text();
  model.architecture = field["architecture"].text();
  model.weights_sha256 = field["weights_sha256"].text();
  model.num_layers = field["num_layers"].whole();
  model.hidden_size = field["hidden_size"].whole();
  model.vocab_size = field["vocab_size"].whole();
  if (!field["context_length"].is_null()) model.context_length = field["context_length"].whole();
  model.eos_token_ids = field["eos_token_ids"].wholes();
  model.kv_shapes = field["kv_shapes"].list<ModelInfo::KvShape>([](Field const& entry) {
    auto const sizes = entry.wholes();
    if (sizes.size() != 2) entry.refuse("must be a list of 2");
    return ModelInfo::KvShape{sizes[0], sizes[1]};
  });
  return model;
}

std::optional<Drafting> drafting_of(Field const& field) {
  if (field.is_null()) return std::nullopt;
  field.object({"thresholds", "max_drafts", "prompt_lookup", "min_match", "tuning"});
  return Drafting{field["thresholds"].reals(), field["max_drafts"].whole(), field["prompt_lookup"].whole(),
                  field["min_match"].whole()};
}

std::optional<NetworksInfo> networks_of(Field const& field) {
  if (field.is_null()) return std::nullopt;
  field.object({"weights", "capacity", "max_tokens", "max_logits", "exit_size", "max_batch_size", "max_slot_tokens"});
  return NetworksInfo{field["weights"].text(),           field["capacity"].whole(),  field["max_tokens"].whole(),
                      field["max_logits"].whole(),       field["exit_size"].whole(), field["max_batch_size"].whole(),
                      field["max_slot_tokens"].whole()};
}

std::vector<std::string> texts_of(Field const& field) {
  return field.list<std::string>([](Field const& entry) { return entry.text(); });
}

std::optional<PluginsInfo> plugins_of(Field const& field) {
  if (field.is_null()) return std::nullopt;
  field.object({"version", "sha256", "engines"});
  return PluginsInfo{field["version"].text(), field["sha256"].text(), texts_of(field["engines"])};
}

std::optional<EnginesInfo> engines_of(Field const& field) {
  if (field.is_null()) return std::nullopt;
  field.object({"flavour", "version", "compute_capabilities", "weights_sha256", "profiles", "seconds", "plugins"});
  EnginesInfo engines;
  engines.flavour = field["flavour"].text();
  engines.version = field["version"].text();
  engines.compute_capabilities = texts_of(field["compute_capabilities"]);
  engines.weights_sha256 = field["weights_sha256"].text();
  engines.profiles = field["profiles"].list<Profile>([](Field const& entry) {
    entry.object({"name", "min_tokens", "opt_tokens", "max_tokens", "batch_size"});
    return Profile{entry["name"].text(), entry["min_tokens"].whole(), entry["opt_tokens"].whole(),
                   entry["max_tokens"].whole(), entry["batch_size"].whole()};
  });
  engines.seconds = field["seconds"].real();
  engines.plugins = plugins_of(field["plugins"]);
  return engines;
}

std::map<std::string, FileInfo> files_of(Field const& field) {
  std::map<std::string, FileInfo> files;
  for (auto const& [name, entry] : field.entries()) {
    entry.object({"size", "sha256"});
    files[name] = FileInfo{entry["size"].whole(), entry["sha256"].text()};
  }
  return files;
}

// Whether a file name of the manifest is a relative path that stays inside the bundle.
bool is_inside(std::string const& name) {
  if (name.empty() || name == "." || name == kManifestFile || name[0] == '/') return false;
  return ("/" + name + "/").find("/../") == std::string::npos &&
         name.find_first_of(std::string("\\\0", 2)) == std::string::npos;
}

using Require = std::function<void(bool condition, std::string const& name, std::string const& rule)>;

void check_networks(Manifest const& manifest, Require const& require) {
  std::vector<std::string> parts = {names::kHead};
  for (std::size_t k = 0; k <= manifest.checkpoints.size(); ++k) parts.push_back(names::segment(k));
  if (auto const& networks = manifest.networks) {
    require(std::set<std::string>{"fp32", "fp16", "bf16"}.count(networks->weights) == 1, "networks.weights",
            "must be one of fp32, fp16, bf16");
    std::pair<char const*, std::int64_t> const sizes[] = {
        {"capacity", networks->capacity},             {"max_tokens", networks->max_tokens},
        {"max_logits", networks->max_logits},         {"exit_size", networks->exit_size},
        {"max_batch_size", networks->max_batch_size}, {"max_slot_tokens", networks->max_slot_tokens}};
    for (auto const& [name, size] : sizes) require(size >= 1, std::string("networks.") + name, "must be 1 or more");
    bool const fits = networks->max_slot_tokens <= networks->max_tokens / networks->max_batch_size;
    require(networks->max_batch_size == 1 || fits, "networks.max_slot_tokens",
            "must fit max_batch_size times into max_tokens");
    for (std::string const& part : parts) {
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
    if (auto const& plugins = engines->plugins) {
      auto const is_part = [&](std::string const& name) {
        return std::find(parts.begin(), parts.end(), name) != parts.end();
      };
      require(!plugins->engines.empty() && std::all_of(plugins->engines.begin(), plugins->engines.end(), is_part),
              "engines.plugins.engines", "must be some of the engines");
    }
    for (std::string const& part : parts) {
      std::string const file = engine_file(part);
      require(manifest.files.count(file) == 1, "files", "does not list " + file);
    }
  }
}

// Checks ranges and the consistency of fields with each other.
void check(Manifest const& manifest, std::string const& source) {
  Require const require = [&](bool condition, std::string const& name, std::string const& rule) {
    if (!condition) throw BundleError(source + ": field '" + name + "' " + rule);
  };
  auto const all = [](auto const& values, auto const& holds) {
    return std::all_of(values.begin(), values.end(), holds);
  };
  auto const is_share = [](double value) { return 0 <= value && value <= 1; };
  ModelInfo const& model = manifest.model;
  std::vector<std::int64_t> const& points = manifest.checkpoints;
  require(model.num_layers >= 1, "model.num_layers", "must be 1 or more");
  require(model.hidden_size >= 1, "model.hidden_size", "must be 1 or more");
  require(model.vocab_size >= 1, "model.vocab_size", "must be 1 or more");
  require(model.context_length.value_or(1) >= 1, "model.context_length", "must be 1 or more");
  require(all(model.eos_token_ids, [](auto id) { return id >= 0; }), "model.eos_token_ids",
          "holds a negative token id");
  require(static_cast<std::int64_t>(model.kv_shapes.size()) == model.num_layers, "model.kv_shapes",
          "must have one entry per layer");
  require(all(model.kv_shapes, [](auto shape) { return shape.heads >= 1 && shape.head_dim >= 1; }), "model.kv_shapes",
          "holds a size below 1");
  for (std::size_t i = 1; i < points.size(); ++i) {
    require(points[i - 1] < points[i], "checkpoints", "must be distinct and ascending");
  }
  require(all(points, [&](auto layers) { return 1 <= layers && layers < model.num_layers; }), "checkpoints",
          "must lie in 1.." + std::to_string(model.num_layers - 1));
  require(manifest.thresholds.size() == points.size(), "thresholds", "must have one value per checkpoint");
  require(all(manifest.thresholds, is_share), "thresholds", "must lie in [0, 1]");
  if (manifest.drafting) {
    Drafting const& drafting = *manifest.drafting;
    require(drafting.thresholds.size() == points.size(), "drafting.thresholds", "must have one value per checkpoint");
    require(all(drafting.thresholds, is_share), "drafting.thresholds", "must lie in [0, 1]");
    require(drafting.max_drafts >= 0, "drafting.max_drafts", "must be 0 or more");
    require(drafting.prompt_lookup >= 0, "drafting.prompt_lookup", "must be 0 or more");
    require(drafting.min_match >= 1, "drafting.min_match", "must be 1 or more");
  }
  require(manifest.min_layers >= 0, "min_layers", "must be 0 or more");
  require(manifest.max_pending >= 0, "max_pending", "must be 0 or more");
  require(is_share(manifest.compaction_threshold), "compaction_threshold", "must lie in [0, 1]");
  require(manifest.kv_cache_strategy == "exact" || manifest.propagates(), "kv_cache_strategy",
          "must be one of exact, propagate");
  require(std::set<std::string>{"fp32", "int8", "int4"}.count(manifest.weights) == 1, "weights",
          "must be one of fp32, int8, int4");
  require(manifest.files.count(kGraphFile) == 1, "files", std::string("does not list ") + kGraphFile);
  check_networks(manifest, require);
  for (auto const& [name, info] : manifest.files) {
    require(is_inside(name), "files." + name, "is not a path inside the bundle");
    require(info.size >= 0, "files." + name + ".size", "must be 0 or more");
    bool const is_hash =
        info.sha256.size() == 64 && info.sha256.find_first_not_of("0123456789abcdef") == std::string::npos;
    require(is_hash, "files." + name + ".sha256", "must be 64 lower-case hex digits");
  }
}

}  // namespace

std::vector<std::int64_t> Manifest::depths() const {
  std::vector<std::int64_t> depths = checkpoints;
  depths.push_back(model.num_layers);
  return depths;
}

Manifest Manifest::from_json(std::string const& text, std::string const& source) {
  Json data;
  try {
    data = Json::parse(text);
  } catch (Json::parse_error const& error) {  // whose own text may hold bytes of the file
    throw BundleError(source + " is not valid JSON: mistake at byte " + std::to_string(error.byte));
  } catch (Json::exception const&) {
    throw BundleError(source + " is not valid JSON: it holds a number out of range");
  }
  if (!data.is_object() || !data.contains("schema") || !data["schema"].is_string()) {
    throw BundleError(source + " is not the manifest of a bundle: it has no field 'schema'");
  }
  if (auto const schema = data["schema"].get<std::string>(); schema != kSchema) {
    throw BundleError(source + " has schema '" + schema + "' but this release reads '" + kSchema +
                      "': use the tide_export release that wrote it, or export again");
  }
  data.erase("schema");
  Field const field(data, source, "");
  field.object(kFields, kOmitted);
  Manifest manifest;
  manifest.model = model_of(field["model"]);
  manifest.checkpoints = field["checkpoints"].wholes();
  manifest.thresholds = field["thresholds"].reals();
  manifest.min_layers = field["min_layers"].whole();
  manifest.max_pending = field["max_pending"].whole();
  manifest.compaction_threshold = field["compaction_threshold"].real();
  manifest.kv_cache_strategy = field["kv_cache_strategy"].text();
  manifest.weights = field["weights"].text();
  manifest.drafting = drafting_of(field["drafting"]);
  manifest.networks = networks_of(field["networks"]);
  manifest.engines = engines_of(field["engines"]);
  manifest.files = files_of(field["files"]);
  check(manifest, source);
  return manifest;
}

}  // namespace tide
