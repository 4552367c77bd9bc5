#include "bundle/drafter_fields.h"

#include <algorithm>

namespace tide {
namespace {

constexpr std::size_t kIntervals = 8, kMaxDigits = 9;

}  // namespace

std::optional<DrafterInfo> drafter_of(Field const& manifest) {
  if (!manifest.has("drafter") || manifest["drafter"].is_null()) return std::nullopt;
  Field const field = manifest["drafter"];
  field.object({"weights_sha256", "tokens", "acceptance", "max_tokens", "kv_shape", "state_size", "layers", "record"},
               {"record"});
  DrafterInfo drafter;
  drafter.weights_sha256 = field["weights_sha256"].text();
  drafter.tokens = field["tokens"].text();
  drafter.acceptance = field["acceptance"].reals();
  drafter.max_tokens = field["max_tokens"].whole();
  auto const [heads, head_dim] = field["kv_shape"].two_wholes();
  drafter.kv_shape = {heads, head_dim};
  drafter.state_size = field["state_size"].whole();
  drafter.layers = field["layers"].wholes();
  if (field.has("record") && !field["record"].is_null()) field["record"].entries();
  return drafter;
}

void check_drafter(DrafterInfo const& drafter, ModelInfo const& model, Require const& require) {
  require(drafter.weights_sha256 == model.weights_sha256, "drafter.weights_sha256",
          "is of another model than the bundle's: run tide-export draft again");
  auto const ranges = ranges_of(drafter.tokens);
  require(!ranges.empty() && ranges.back().second < model.vocab_size, "drafter.tokens",
          "must be ascending ranges of the model's token ids, such as \"0-3,7\"");
  bool const shares = drafter.acceptance.size() == kIntervals &&
                      std::all_of(drafter.acceptance.begin(), drafter.acceptance.end(),
                                  [](double share) { return 0 <= share && share <= 1; });
  require(shares, "drafter.acceptance", "must have " + std::to_string(kIntervals) + " values in [0, 1]");
  require(drafter.max_tokens >= 2, "drafter.max_tokens", "must be 2 or more");
  require(drafter.kv_shape.heads >= 1 && drafter.kv_shape.head_dim >= 1, "drafter.kv_shape", "holds a size below 1");
  require(drafter.state_size >= 1, "drafter.state_size", "must be 1 or more");
  bool ascending = true;
  std::int64_t before = 0;
  for (std::int64_t const layer : drafter.layers) {
    ascending = ascending && before < layer && layer <= model.num_layers;
    before = layer;
  }
  require(ascending, "drafter.layers", "must be ascending and lie in 1.." + std::to_string(model.num_layers));
}

std::vector<std::pair<std::int64_t, std::int64_t>> ranges_of(std::string const& text) {
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  std::size_t at = 0;
  auto const number = [&](std::int64_t& value) {
    std::size_t const begin = at;
    while (at < text.size() && '0' <= text[at] && text[at] <= '9') ++at;
    if (at == begin || at - begin > kMaxDigits) return false;
    value = std::stoll(text.substr(begin, at - begin));
    return true;
  };
  for (;; ++at) {
    std::int64_t first = 0;
    if (!number(first)) return {};
    std::int64_t last = first;
    if (at < text.size() && text[at] == '-') {
      ++at;
      if (!number(last)) return {};
    }
    if (last < first || (!ranges.empty() && first <= ranges.back().second)) return {};
    ranges.emplace_back(first, last);
    if (at == text.size()) return ranges;
    if (text[at] != ',') return {};
  }
}

}  // namespace tide
