#include "bundle/drafter_fields.h"

#include <algorithm>

#include "bundle/mode_fields.h"

namespace tide {
namespace {

constexpr std::size_t kIntervals = 8, kMaxDigits = 9;

}  // namespace

std::optional<DrafterInfo> drafter_of(Field const& manifest, ModelInfo const& model) {
  auto const found = manifest.find("drafter");
  if (!found) return std::nullopt;
  Field const& field = *found;
  DrafterInfo drafter;
  drafter.tokens = field["tokens"].text();
  auto const ranges = ranges_of(drafter.tokens);
  field["tokens"].require(!ranges.empty() && ranges.back().second < model.vocab_size,
                          "must be ascending ranges of the model's token ids, such as \"0-3,7\"");
  drafter.acceptance = shares_of(field["acceptance"], kIntervals);
  drafter.max_tokens = field["max_tokens"].whole(2);
  if (auto const shared = field.find("kv_layers")) {
    drafter.kv_layers = shared->wholes(0);
    std::vector<std::size_t> const own = model.kv_read(0, model.kv_shapes.size());
    bool const known = std::includes(own.begin(), own.end(), drafter.kv_layers.begin(), drafter.kv_layers.end());
    shared->require(known && !drafter.kv_layers.empty(), "must be ascending layers with keys and values of their own");
  } else {
    auto const [heads, head_dim] = field["kv_shape"].two_wholes();
    field["kv_shape"].require(heads >= 1 && head_dim >= 1, "holds a size below 1");
    drafter.kv_shape = {heads, head_dim};
    if (auto const layers = field.find("num_layers")) {
      drafter.num_layers = layers->whole(1);
      layers->require(drafter.num_layers <= model.num_layers, "must be at most the model's");
    }
    if (auto const block = field.find("block_size")) {
      drafter.block_size = block->whole(2);
      block->require(drafter.block_size <= drafter.max_tokens / 2, "must be at most half of max_tokens");
    }
  }
  drafter.state_size = field["state_size"].whole(1);
  drafter.layers = field["layers"].wholes();
  return drafter;
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
