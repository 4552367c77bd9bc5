#include "bundle/plan_fields.h"

#include <algorithm>
#include <set>

#include "bundle/store.h"
#include "names.h"

namespace tide {
namespace {

// What is on the GPU is as long as its file: networks read no further.
EmbeddingInfo embedding_of(Field const& field, std::string const& weights, std::map<std::string, FileInfo> const& files) {
  EmbeddingInfo const embedding{field["rows"].whole(1), field["width"].whole(1), field["tied"].boolean()};
  auto const file = files.find(kEmbeddingFile);
  std::int64_t const size = file == files.end() ? 0 : file->second.size;
  std::int64_t const item = weights == "fp32" ? 4 : 2, numbers = size / item, width = embedding.width;
  field.require(size % item == 0 && numbers % width == 0 && numbers / width == embedding.rows,
                std::string("must have the shape of the file ") + kEmbeddingFile);
  return embedding;
}

}  // namespace

std::optional<NetworksInfo> networks_of(Field const& manifest, std::map<std::string, FileInfo> const& files) {
  auto const found = manifest.find("networks");
  if (!found) return std::nullopt;
  Field const& field = *found;
  auto const size = [&](char const* name) { return field[name].whole(1); };
  NetworksInfo info{field["weights"].text(), size("capacity"),  size("state_rows"),     size("max_tokens"),
                    size("max_logits"),      size("exit_size"), size("max_batch_size"), size("max_slot_tokens"),
                    std::nullopt};
  if (auto const targets = manifest.find("targets")) {
    std::vector<std::string> const names = targets->texts();
    info.cuda = std::find(names.begin(), names.end(), "cuda") != names.end();
  }
  bool const known = std::set<std::string>{"fp32", "fp16", "bf16"}.count(info.weights) == 1;
  field["weights"].require(known, "must be one of fp32, fp16, bf16");
  field["max_tokens"].require(info.max_tokens <= info.capacity, "must be at most capacity");
  field["state_rows"].require(info.max_tokens <= info.state_rows - names::kFinalRow,
                              "must be " + std::to_string(names::kFinalRow) + " more than max_tokens or larger");
  field["max_logits"].require(info.max_logits <= info.max_tokens, "must be at most max_tokens");
  field["max_slot_tokens"].require(info.max_slot_tokens <= info.max_tokens / info.max_batch_size,
                                   "must fit max_batch_size times into max_tokens");
  if (auto const cumulative = field.find("cumulative")) info.cumulative = cumulative->boolean();
  if (auto const embedding = field.find("embedding")) info.embedding = embedding_of(*embedding, info.weights, files);
  return info;
}

std::optional<PlansInfo> plans_of(Field const& manifest) {
  auto const found = manifest.find("engines");
  if (!found) return std::nullopt;
  Field const& field = *found;
  PlansInfo plans;
  plans.flavour = field["flavour"].text();
  bool const known = plans.flavour == "tensorrt" || plans.flavour == "tensorrt-rtx";
  field["flavour"].require(known, "must be one of tensorrt, tensorrt-rtx");
  plans.version = field["version"].text();
  plans.compute_capabilities = field["compute_capabilities"].texts();
  plans.weights_sha256 = field["weights_sha256"].text();
  plans.profiles = field["profiles"].list<Profile>([](Field const& entry) {
    return Profile{entry["name"].text(), entry["min_tokens"].whole(1), entry["max_tokens"].whole(1),
                   entry["batch_size"].whole(1)};
  });
  if (auto const plugins = field.find("plugins")) {
    plans.plugins = PluginsInfo{(*plugins)["version"].text(), (*plugins)["sha256"].text()};
  }
  if (auto const copied = field.find("copied")) {
    for (auto const& [name, bytes] : copied->entries()) plans.copied[name] = bytes.whole();
  }
  return plans;
}

}  // namespace tide
