#include "paged/adapters.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <string_view>

#include "bundle/json.h"
#include "file_content.h"
#include "formatting.h"
#include "segmented/numbers.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr char const* kAdapterConfig = "adapter_config.json";
constexpr char const* kAdapterWeights = "adapter_model.safetensors";
constexpr char const* kModulePrefix = "base_model.model.";
constexpr std::int64_t kMaxAdapterRank = 1 << 20;  // more than any layer has inputs: numbers of a matrix are countable
constexpr std::size_t kLengthBytes = 8;  // of a safetensors file's header

using Target = ModelInfo::Lora::Target;

// A folder while it is read; `refuse` says which.
class AdapterFolder {
 public:
  AdapterFolder(std::string const& name, std::filesystem::path const& path) : name_(name), path_(path) {
    std::optional<Json> config = Json::parse(content(kAdapterConfig));
    if (!config || !config->is(Json::Kind::object)) refuse(std::string(kAdapterConfig) + " is not a JSON object");
    config_ = std::move(*config);
    weights_ = content(kAdapterWeights);
    std::uint64_t length = 0;
    for (std::size_t i = 0; i < std::min(kLengthBytes, weights_.size()); ++i) {
      length |= std::uint64_t{static_cast<unsigned char>(weights_[i])} << 8 * i;
    }
    bool const fits = weights_.size() >= kLengthBytes && length <= weights_.size() - kLengthBytes;
    std::optional<Json> header;
    if (fits) header = Json::parse(std::string_view(weights_).substr(kLengthBytes, length));
    if (!header || !header->is(Json::Kind::object)) refuse(std::string(kAdapterWeights) + " is no safetensors file");
    header_ = std::move(*header);
    data_ = kLengthBytes + length;
    header_.object.erase("__metadata__");
  }

  [[noreturn]] void refuse(std::string const& why) const {
    throw ConfigError("adapter '" + name_ + "' in " + quoted(path_) + " cannot be used: " + why);
  }

  // What no linear layer's two matrices hold.
  void check_kind() const {
    if (text("peft_type") != "LORA") refuse("its peft_type is not LORA");
    for (char const* const flag : {"use_dora", "use_qalora", "lora_bias"}) {
      if (flagged(flag)) refuse(std::string("it has ") + flag + ", which the bundle's layers do not compute");
    }
    if (std::string const bias = text("bias"); !bias.empty() && bias != "none") refuse("it changes biases");
    char const* const lists[] = {"modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters"};
    for (char const* const list : lists) {
      Json const* const found = field(list);
      if (found != nullptr && !found->is(Json::Kind::null) && !(found->list.empty() && found->object.empty())) {
        refuse(std::string("it has ") + list + ", which are more than changes of linear layers");
      }
    }
    std::string const begun = text("init_lora_weights");
    for (char const* const changing : {"pissa", "olora", "corda", "loftq"}) {
      if (begun.rfind(changing, 0) != 0) continue;
      refuse("init_lora_weights " + begun + " changes the model itself: convert it to plain LoRA");
    }
  }

  // Names of the modules that have matrices here.
  std::vector<std::string> modules() const {
    std::vector<std::string> names;
    for (auto const& [key, tensor] : header_.object) {
      bool found = false;
      for (std::string_view const suffix : {".lora_A.weight", ".lora_B.weight"}) {
        std::string_view const prefix = kModulePrefix;
        bool const begins = key.size() > prefix.size() + suffix.size() && key.compare(0, prefix.size(), prefix) == 0;
        if (!begins || key.compare(key.size() - suffix.size(), suffix.size(), suffix) != 0) continue;
        names.push_back(key.substr(prefix.size(), key.size() - prefix.size() - suffix.size()));
        found = true;
      }
      if (!found) refuse("it has " + shown_name(key) + ", which is no matrix of a linear layer");
    }
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    return names;
  }

  // Writes a module's matrices to `row`: down [inputs, rank], up [rank, outputs] times their scale; what the adapter's rank
  // leaves of them stays zero.
  void read(Target const& target, std::int64_t room, float* row) const {
    std::int64_t rank = 0;
    std::vector<float> const down = matrix(target, "lora_A", rank, target.inputs, true);
    if (rank > room) {
      refuse("it has rank " + std::to_string(rank) + " and the bundle room for " + std::to_string(room) +
             ": export it with --lora-rank " + std::to_string(rank));
    }
    std::vector<float> const up = matrix(target, "lora_B", rank, target.outputs, false);
    auto const scale = static_cast<float>(scale_of(target.name, rank));
    for (std::int64_t k = 0; k < target.inputs; ++k) {
      for (std::int64_t r = 0; r < rank; ++r) row[k * room + r] = down[static_cast<std::size_t>(r * target.inputs + k)];
    }
    row += target.inputs * room;
    for (std::int64_t r = 0; r < rank; ++r) {
      for (std::int64_t n = 0; n < target.outputs; ++n) {
        row[r * target.outputs + n] = scale * up[static_cast<std::size_t>(n * rank + r)];
      }
    }
  }

 private:
  std::string content(char const* name) const {
    std::optional<std::string> content = file_content(path_ / name);
    if (!content || content->empty()) refuse(std::string(name) + " is missing or cannot be read");
    return std::move(*content);
  }

  Json const* field(std::string const& name) const {
    auto const found = config_.object.find(name);
    return found == config_.object.end() ? nullptr : &found->second;
  }
  std::string text(std::string const& name) const {
    Json const* const found = field(name);
    return found != nullptr && found->is(Json::Kind::text) ? found->text : "";
  }
  bool flagged(std::string const& name) const {
    Json const* const found = field(name);
    return found != nullptr && found->is(Json::Kind::boolean) && found->boolean;
  }

  static std::string shown_name(std::string const& name) { return json_text(name.substr(0, 120)); }

  // alpha over the rank, or over its root.
  double scale_of(std::string const& module, std::int64_t rank) const {
    Json const* alpha = field("lora_alpha");
    if (Json const* const pattern = field("alpha_pattern"); pattern != nullptr) {
      Json const* first = nullptr;  // of those that match, as they are written: PEFT takes it
      for (auto const& [key, value] : pattern->object) {
        constexpr std::string_view special = "^$*+?()[]{}|\\";
        if (key.find_first_of(special) != std::string::npos) refuse("alpha_pattern has an expression, " + shown_name(key));
        std::string const whole = "." + module, part = "." + key;
        bool const longer = whole.size() >= part.size();
        bool const matches = longer && whole.compare(whole.size() - part.size(), part.size(), part) == 0;
        if (matches && (first == nullptr || value.begin < first->begin)) first = &value;
      }
      if (first != nullptr) alpha = first;
    }
    bool const whole = alpha != nullptr && alpha->is(Json::Kind::whole);
    if (!whole && (alpha == nullptr || !alpha->is(Json::Kind::real))) refuse("its lora_alpha is no number");
    double const over = static_cast<double>(rank);
    return (whole ? static_cast<double>(alpha->whole) : alpha->real) / (flagged("use_rslora") ? std::sqrt(over) : over);
  }

  // A matrix [rank, width], or transposed one [width, rank]. rank 0: any, which it becomes.
  std::vector<float> matrix(Target const& target, char const* part, std::int64_t& rank, std::int64_t width,
                            bool rows) const {
    std::string const key = kModulePrefix + target.name + "." + part + ".weight";
    auto const found = header_.object.find(key);
    if (found == header_.object.end()) refuse("it has no " + key);
    auto const entry = [&](char const* name) -> Json const& {
      auto const value = found->second.object.find(name);
      if (value == found->second.object.end()) refuse(std::string(kAdapterWeights) + " is damaged at " + key);
      return value->second;
    };
    std::vector<std::int64_t> shape, offsets;
    for (Json const& size : entry("shape").list) shape.push_back(size.whole);
    for (Json const& offset : entry("data_offsets").list) offsets.push_back(offset.whole);
    if (rank == 0 && shape.size() == 2) rank = shape[rows ? 0 : 1];
    if (shape != (rows ? std::vector{rank, width} : std::vector{width, rank}) || rank < 1 || rank > kMaxAdapterRank) {
      refuse(key + " has shape [" + joined(shape, ", ") + "], which is of another model: " + target.name + " has " +
             std::to_string(target.inputs) + " inputs and " + std::to_string(target.outputs) + " outputs");
    }
    std::string const dtype = entry("dtype").text;
    std::string const known = dtype == "F32"    ? "float32"
                              : dtype == "F16"  ? "float16"
                              : dtype == "BF16" ? "bfloat16"
                                                : "";
    if (known.empty()) refuse(key + " has type " + dtype + ", none of F32, F16 and BF16");
    auto const count = static_cast<std::size_t>(rank * width);
    std::size_t const bytes = count * (dtype == "F32" ? 4 : 2), size = weights_.size() - data_;
    bool const inside = offsets.size() == 2 && offsets[0] >= 0 && static_cast<std::size_t>(offsets[0]) <= size &&
                        bytes <= size - static_cast<std::size_t>(offsets[0]);
    if (!inside) refuse(std::string(kAdapterWeights) + " is damaged at " + key);
    std::vector<float> numbers(count);
    widen(known, reinterpret_cast<std::byte const*>(weights_.data()) + data_ + offsets[0], count, numbers.data());
    return numbers;
  }

  std::string const name_;
  std::filesystem::path const path_;
  Json config_, header_;
  std::string weights_;
  std::size_t data_ = 0;  // where the tensors begin
};

}  // namespace

Adapters::Adapters(Bundle const& bundle, AdapterFolders const& folders) {
  auto const& lora = bundle.manifest.model.lora;
  if (!lora) return;
  size_ = lora->size();
  std::size_t const rows = 1 + folders.size();
  numbers_.reset(static_cast<float*>(std::calloc(rows * static_cast<std::size_t>(size_), sizeof(float))));
  if (!numbers_) throw std::bad_alloc();
  for (auto const& [name, path] : folders) {
    if (name.empty()) throw ConfigError("an adapter has the empty name: name it");
    AdapterFolder const folder(name, path);
    folder.check_kind();
    std::vector<std::string> const modules = folder.modules();
    for (std::string const& module : modules) {
      auto const is_it = [&](Target const& target) { return target.name == module; };
      if (std::any_of(lora->targets.begin(), lora->targets.end(), is_it)) continue;
      folder.refuse("it changes " + module + ", for which the bundle has no room: it has for the linear layers of " +
                    "decoder layers of " + bundle.manifest.model.architecture);
    }
    names_.push_back(name);
    float* row = numbers_.get() + names_.size() * static_cast<std::size_t>(size_);
    for (Target const& target : lora->targets) {
      if (std::binary_search(modules.begin(), modules.end(), target.name)) {
        *row = 1;
        folder.read(target, lora->rank, row + 1);
      }
      row += 1 + lora->rank * (target.inputs + target.outputs);
    }
  }
}

std::int64_t Adapters::row(std::string const& name) const {
  auto const found = std::find(names_.begin(), names_.end(), name);
  return found == names_.end() ? 0 : found - names_.begin() + 1;
}

Ort::Value Adapters::tensor() const {
  return view(Ort::MemoryInfo::cpu(), numbers_.get(), {static_cast<std::int64_t>(names_.size()) + 1, size_});
}

}  // namespace tide
