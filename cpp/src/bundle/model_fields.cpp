// Messages are those of tide_export/bundle/model_info.py.
#include "bundle/model_fields.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

namespace tide {

ModelInfo model_of(Field const& field) {
  field.object({"name", "architecture", "weights_sha256", "num_layers", "hidden_size", "vocab_size", "context_length",
                "eos_token_ids", "kv_shapes", "kv_layers", "states", "lora"},
               {"kv_layers", "states", "lora"});
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
    auto const [heads, head_dim] = entry.two_wholes();
    return ModelInfo::KvShape{heads, head_dim};
  });
  if (field.has("kv_layers") && !field["kv_layers"].is_null()) {
    model.kv_layers = field["kv_layers"].wholes();
  } else {
    model.kv_layers.resize(model.kv_shapes.size());
    std::iota(model.kv_layers.begin(), model.kv_layers.end(), 0);
  }
  if (field.has("states") && !field["states"].is_null()) {
    model.states = field["states"].list<ModelInfo::State>([](Field const& entry) {
      entry.object({"layer", "number", "shape", "undo"});
      return ModelInfo::State{entry["layer"].whole(), entry["number"].whole(), entry["shape"].wholes(), entry["undo"].whole()};
    });
  }
  if (field.has("lora") && !field["lora"].is_null()) {
    Field const lora = field["lora"];
    lora.object({"rank", "targets"});
    model.lora = ModelInfo::Lora{lora["rank"].whole(), lora["targets"].list<ModelInfo::Lora::Target>([](Field const& entry) {
      entry.object({"name", "layer", "inputs", "outputs"});
      return ModelInfo::Lora::Target{entry["name"].text(), entry["layer"].whole(), entry["inputs"].whole(),
                                     entry["outputs"].whole()};
    })};
  }
  return model;
}

void check_model(ModelInfo const& model, Require const& require) {
  auto const all = [](auto const& values, auto const& holds) {
    return std::all_of(values.begin(), values.end(), holds);
  };
  require(model.num_layers >= 1, "model.num_layers", "must be 1 or more");
  require(model.hidden_size >= 1, "model.hidden_size", "must be 1 or more");
  require(model.vocab_size >= 1, "model.vocab_size", "must be 1 or more");
  require(model.context_length.value_or(1) >= 1, "model.context_length", "must be 1 or more");
  require(all(model.eos_token_ids, [&](auto id) { return 0 <= id && id < model.vocab_size; }), "model.eos_token_ids",
          "holds a token id outside the vocabulary");
  auto const entries = static_cast<std::int64_t>(model.kv_shapes.size());
  require(entries > 0 && entries % model.num_layers == 0, "model.kv_shapes",
          "must have one entry per layer, or as many for each");
  require(all(model.kv_shapes, [](auto shape) {
            return (shape.heads >= 1 && shape.head_dim >= 1) || (shape.heads == 0 && shape.head_dim == 0);
          }), "model.kv_shapes", "holds a size below 1, and not 0 for both");
  require(model.kv_layers.size() == model.kv_shapes.size(), "model.kv_layers",
          "must have one entry per layer, or as many as kv_shapes");
  for (std::size_t layer = 0; layer < model.kv_layers.size(); ++layer) {
    std::int64_t const source = model.kv_layers[layer];
    bool const earlier = 0 <= source && source <= static_cast<std::int64_t>(layer);
    require(earlier && model.kv_layers[static_cast<std::size_t>(source)] == source, "model.kv_layers",
            "must name the layer itself, or an earlier one with K/V of its own");
  }
  for (std::size_t layer = 0; layer < model.kv_layers.size(); ++layer) {
    auto const source = static_cast<std::size_t>(model.kv_layers[layer]);
    ModelInfo::KvShape const shape = model.kv_shapes[layer], read = model.kv_shapes[source];
    require(shape.heads == read.heads && shape.head_dim == read.head_dim, "model.kv_shapes",
            "must be equal where layers share K/V");
  }
  std::vector<ModelInfo::State> const& states = model.states;
  for (std::size_t i = 1; i < states.size(); ++i) {
    require(std::make_pair(states[i - 1].layer, states[i - 1].number) < std::make_pair(states[i].layer, states[i].number),
            "model.states", "must be distinct and ascending");
  }
  require(all(states, [&](auto const& one) { return 0 <= one.layer && one.layer < model.num_layers; }), "model.states",
          "holds no layer of the model");
  require(all(states, [](auto const& one) { return one.number >= 0; }), "model.states", "holds a number below 0");
  require(all(states, [](auto const& one) { return one.undo >= 1; }), "model.states", "holds an undo below 1");
  require(all(states, [&](auto const& one) {
            return !one.shape.empty() && all(one.shape, [](std::int64_t size) { return size >= 1; });
          }), "model.states", "holds a size below 1, or no shape");
  if (!model.lora) return;
  require(model.lora->rank >= 1, "model.lora.rank", "must be 1 or more");
  require(all(model.lora->targets, [&](auto const& one) { return 0 <= one.layer && one.layer < model.num_layers; }),
          "model.lora.targets", "holds no layer of the model");
  require(all(model.lora->targets, [](auto const& one) { return one.inputs >= 1 && one.outputs >= 1; }),
          "model.lora.targets", "holds a size below 1");
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
