#include "bundle/model_fields.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

namespace tide {
namespace {

template <typename Values, typename Holds>
bool all(Values const& values, Holds const& holds) {
  return std::all_of(values.begin(), values.end(), holds);
}

void read_kv(Field const& field, ModelInfo& model) {
  Field const kv_shapes = field["kv_shapes"];
  model.kv_shapes = kv_shapes.list<ModelInfo::KvShape>([](Field const& entry) {
    auto const [heads, head_dim] = entry.two_wholes();
    return ModelInfo::KvShape{heads, head_dim};
  });
  auto const count = static_cast<std::int64_t>(model.kv_shapes.size());
  kv_shapes.require(count > 0 && count % model.num_layers == 0, "must have one entry per layer, or as many for each");
  bool const sized = all(model.kv_shapes, [](auto shape) {
    return (shape.heads >= 1 && shape.head_dim >= 1) || (shape.heads == 0 && shape.head_dim == 0);
  });
  kv_shapes.require(sized, "holds a size below 1, and not 0 for both");
  model.kv_layers.resize(model.kv_shapes.size());
  std::iota(model.kv_layers.begin(), model.kv_layers.end(), 0);
  auto const shared = field.find("kv_layers");
  if (!shared) return;
  std::vector<std::int64_t> const layers = shared->wholes(0);
  shared->require(layers.size() == model.kv_shapes.size(), "must have one entry per layer, or as many as kv_shapes");
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    auto const source = static_cast<std::size_t>(layers[layer]);
    bool const earlier = source <= layer && layers[source] == layers[layer];
    shared->require(earlier, "must name the layer itself, or an earlier one with K/V of its own");
    ModelInfo::KvShape const shape = model.kv_shapes[layer], read = model.kv_shapes[source];
    kv_shapes.require(shape.heads == read.heads && shape.head_dim == read.head_dim,
                      "must be equal where layers share K/V");
  }
  model.kv_layers = layers;
}

std::vector<ModelInfo::State> states_of(Field const& field) {
  auto const states = field.list<ModelInfo::State>([](Field const& entry) {
    return ModelInfo::State{entry["layer"].whole(0), entry["number"].whole(0), entry["shape"].wholes(1),
                            entry["undo"].whole(1)};
  });
  for (std::size_t i = 1; i < states.size(); ++i) {
    ModelInfo::State const &before = states[i - 1], &state = states[i];
    field.require(std::make_pair(before.layer, before.number) < std::make_pair(state.layer, state.number),
                  "must be distinct and ascending");
  }
  return states;
}

ModelInfo::Lora lora_of(Field const& field) {
  return {field["rank"].whole(1), field["targets"].list<ModelInfo::Lora::Target>([](Field const& entry) {
            return ModelInfo::Lora::Target{entry["name"].text(), entry["layers"].wholes(0),
                                           entry["inputs"].whole(1), entry["outputs"].whole(1)};
          })};
}

}  // namespace

ModelInfo model_of(Field const& field) {
  ModelInfo model;
  model.architecture = field["architecture"].text();
  model.weights_sha256 = field["weights_sha256"].text();
  model.num_layers = field["num_layers"].whole(1);
  model.hidden_size = field["hidden_size"].whole(1);
  model.vocab_size = field["vocab_size"].whole(1);
  if (auto const length = field.find("context_length")) model.context_length = length->whole(1);
  Field const ends = field["eos_token_ids"];
  model.eos_token_ids = ends.wholes(0);
  ends.require(all(model.eos_token_ids, [&](std::int64_t id) { return id < model.vocab_size; }),
               "holds a token id outside the vocabulary");
  read_kv(field, model);
  if (auto const states = field.find("states")) model.states = states_of(*states);
  if (auto const lora = field.find("lora")) model.lora = lora_of(*lora);
  return model;
}

std::int64_t ModelInfo::Lora::size() const {
  std::int64_t numbers = 0;
  for (Target const& target : targets) numbers += 1 + rank * (target.inputs + target.outputs);
  return numbers;
}

std::int64_t ModelInfo::undo() const {
  std::int64_t undo = std::numeric_limits<std::int64_t>::max();
  for (State const& state : states) undo = std::min(undo, state.undo);
  return undo;
}

std::vector<std::size_t> ModelInfo::kv_read(std::size_t first, std::size_t count) const {
  std::set<std::size_t> read;
  for (std::size_t attention = 0; attention < kv_shapes.size(); ++attention) {
    std::size_t const layer = layer_of(attention);
    bool const among = first <= layer && layer < first + count;
    if (among && kv_shapes[attention].heads > 0) read.insert(static_cast<std::size_t>(kv_layers[attention]));
  }
  return {read.begin(), read.end()};
}

}  // namespace tide
