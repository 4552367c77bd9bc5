#include "bundle/engine_fields.h"

namespace tide {
namespace {

std::optional<PluginsInfo> plugins_of(Field const& field) {
  if (field.is_null()) return std::nullopt;
  field.object({"version", "sha256", "engines"});
  return PluginsInfo{field["version"].text(), field["sha256"].text(), field["engines"].texts()};
}

std::optional<std::map<std::string, BuiltEngine>> built_of(Field const& field) {
  if (field.is_null()) return std::nullopt;
  std::map<std::string, BuiltEngine> built;
  for (auto const& [name, entry] : field.entries()) {
    entry.object({"weights_bytes", "activation_bytes", "layers", "attention_layers", "fused_attention_layers"});
    built[name] = {entry["weights_bytes"].whole(), entry["activation_bytes"].whole(), entry["layers"].whole(),
                   entry["attention_layers"].whole(), entry["fused_attention_layers"].whole()};
  }
  return built;
}

std::optional<EmbeddingInfo> embedding_of(Field const& networks) {
  if (!networks.has("embedding") || networks["embedding"].is_null()) return std::nullopt;
  Field const field = networks["embedding"];
  field.object({"rows", "width", "tied"});
  return EmbeddingInfo{field["rows"].whole(), field["width"].whole(), field["tied"].boolean()};
}

}  // namespace

std::optional<NetworksInfo> networks_of(Field const& field) {
  if (field.is_null()) return std::nullopt;
  field.object({"weights", "capacity", "state_rows", "max_tokens", "max_logits", "exit_size", "max_batch_size",
                "max_slot_tokens", "matrices", "embedding"},
               {"matrices", "embedding"});
  std::optional<std::string> matrices;
  if (field.has("matrices") && !field["matrices"].is_null()) matrices = field["matrices"].text();
  return NetworksInfo{field["weights"].text(),         field["capacity"].whole(),        field["state_rows"].whole(),
                      field["max_tokens"].whole(),     field["max_logits"].whole(),      field["exit_size"].whole(),
                      field["max_batch_size"].whole(), field["max_slot_tokens"].whole(), matrices,
                      embedding_of(field)};
}

std::optional<EnginesInfo> engines_of(Field const& field) {
  if (field.is_null()) return std::nullopt;
  field.object(
      {"flavour", "version", "compute_capabilities", "weights_sha256", "profiles", "seconds", "plugins", "built", "copied"},
      {"built", "copied"});
  EnginesInfo engines;
  engines.flavour = field["flavour"].text();
  engines.version = field["version"].text();
  engines.compute_capabilities = field["compute_capabilities"].texts();
  engines.weights_sha256 = field["weights_sha256"].text();
  engines.profiles = field["profiles"].list<Profile>([](Field const& entry) {
    entry.object({"name", "min_tokens", "opt_tokens", "max_tokens", "batch_size"});
    return Profile{entry["name"].text(), entry["min_tokens"].whole(), entry["opt_tokens"].whole(),
                   entry["max_tokens"].whole(), entry["batch_size"].whole()};
  });
  engines.seconds = field["seconds"].real();
  engines.plugins = plugins_of(field["plugins"]);
  if (field.has("built")) engines.built = built_of(field["built"]);
  if (field.has("copied") && !field["copied"].is_null()) {
    for (auto const& [name, bytes] : field["copied"].entries()) engines.copied[name] = bytes.whole();
  }
  return engines;
}

}  // namespace tide
