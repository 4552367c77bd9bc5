#include "tide/manifest.h"

#include <algorithm>

#include "bundle/drafter_fields.h"
#include "bundle/plan_fields.h"
#include "bundle/fields.h"
#include "bundle/mode_fields.h"
#include "bundle/model_fields.h"
#include "bundle/store.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr char const* kSchema = "tide_export.bundle/11";

// Whether a file's name is a path that stays inside the bundle, without control characters.
bool is_inside(std::string const& name) {
  if (name.empty() || name == "." || name == kManifestFile || name[0] == '/') return false;
  auto const is_plain = [](char c) { return c != '\\' && static_cast<unsigned char>(c) >= ' ' && c != '\x7f'; };
  return ("/" + name + "/").find("/../") == std::string::npos && std::all_of(name.begin(), name.end(), is_plain);
}

std::map<std::string, FileInfo> files_of(Field const& field) {
  std::map<std::string, FileInfo> files;
  for (auto const& [name, entry] : field.entries()) {
    entry.require(is_inside(name), "is not a path inside the bundle");
    files[name] = FileInfo{entry["size"].whole(0), entry["sha256"].text()};
  }
  return files;
}

std::vector<std::int64_t> checkpoints_of(Field const& field, std::int64_t num_layers) {
  std::vector<std::int64_t> points = field.wholes();
  std::int64_t before = 0;
  for (std::int64_t const layers : points) {
    field.require(before < layers && layers < num_layers,
                  "must be distinct and ascending, and lie in 1.." + std::to_string(num_layers - 1));
    before = layers;
  }
  return points;
}

}  // namespace

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
  std::optional<Json> const data = Json::parse(text);
  if (!data) throw BundleError(source + " is not valid JSON: export the bundle again or copy it anew");
  auto const named = data->object.find("schema");
  if (named == data->object.end() || !named->second.is(Json::Kind::text)) {
    throw BundleError(source + " is not the manifest of a bundle: it has no field 'schema'");
  }
  if (std::string const& schema = named->second.text; schema != kSchema) {
    throw BundleError(source + " has schema '" + shown_name(schema) + "' but this release reads '" + kSchema +
                      "': export again (`tide-export export MODEL -o NEW --routers OLD/routers.safetensors` keeps its "
                      "routers), or use the tide_export release that wrote it");
  }
  Field const field(*data, source, "");
  Manifest manifest;
  manifest.model = model_of(field["model"]);
  manifest.checkpoints = checkpoints_of(field["checkpoints"], manifest.model.num_layers);
  std::size_t const points = manifest.checkpoints.size();
  manifest.thresholds = shares_of(field["thresholds"], points);
  manifest.min_layers = field["min_layers"].whole(0);
  manifest.max_pending = field["max_pending"].whole(0);
  manifest.compaction_threshold = field["compaction_threshold"].real();
  bool const is_share = 0 <= manifest.compaction_threshold && manifest.compaction_threshold <= 1;
  field["compaction_threshold"].require(is_share, "must lie in [0, 1]");
  if (auto const type = field.find("kv_cache")) {
    manifest.kv_cache = type->text();
    type->require(manifest.kv_cache == "float32" || manifest.int8_kv(), "must be one of float32, int8");
  }
  manifest.drafting = drafting_of(field, points);
  manifest.auto_mode = auto_mode_of(field, points);
  manifest.files = files_of(field["files"]);
  manifest.drafter = drafter_of(field, manifest.model);
  bool const listed = !manifest.drafter || manifest.files.count(kDrafterFile) == 1;
  field["files"].require(listed, std::string("does not list ") + kDrafterFile);
  manifest.networks = networks_of(field, manifest.files);
  manifest.engines = plans_of(field);
  if (manifest.engines) field["engines"].require(manifest.networks.has_value(), "needs the field 'networks'");
  return manifest;
}

}  // namespace tide
