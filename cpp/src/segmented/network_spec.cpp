#include "segmented/network_spec.h"

#include <algorithm>
#include <map>

#include "bundle/drafter_fields.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

std::map<std::string, std::string> const kHiddenTypes = {{"fp32", "float32"}, {"fp16", "float16"}, {"bf16", "bfloat16"}};

constexpr char const *kPast = "past_key_values.", *kPresent = "present.";

std::map<std::string, std::size_t> const kItemSizes = {
    {"float32", 4}, {"float16", 2}, {"bfloat16", 2}, {"int64", 8}, {"int32", 4}};

std::string shown(Tensor const& tensor) {
  std::string dims;
  for (std::int64_t const size : tensor.shape) {
    dims += dims.empty() ? "" : ", ";
    dims += size == kTokens ? "'tokens'" : size == kSequences ? "'batch'" : size == kKeys ? "'keys'" : std::to_string(size);
  }
  return tensor.dtype + " [" + dims + "]";
}

Tensor embedding_input(NetworksInfo const& info) {
  return {names::kEmbedding, true, kHiddenTypes.at(info.weights), {info.embedding->rows, info.embedding->width}};
}

NetworkSpec segment_spec(Manifest const& manifest, std::size_t k, std::size_t first_layer, std::size_t end_layer) {
  NetworksInfo const& info = *manifest.networks;
  std::string const& dtype = kHiddenTypes.at(info.weights);
  std::int64_t const width = manifest.model.hidden_size - info.cumulative;  // states of the graph hold the score too
  std::vector<std::int64_t> const pending = {kSequences, 1, info.state_rows, width};
  std::vector<std::int64_t> const exits = {kSequences, 1, info.state_rows, info.exit_size};
  bool const last = k == manifest.checkpoints.size();
  std::vector<Tensor> inputs, outputs;
  auto const input = [&](std::string const& name, std::string const& dtype, std::vector<std::int64_t> shape) {
    inputs.push_back({name, true, dtype, std::move(shape)});
  };
  auto const output = [&](std::string const& name, std::string const& dtype, std::vector<std::int64_t> shape) {
    outputs.push_back({name, false, dtype, std::move(shape)});
  };
  if (k == 0) input(names::kInputIds, "int64", {kSequences, kTokens});
  if (k == 0 && info.embedding) inputs.push_back(embedding_input(info));
  if (k > 0) input(names::kPendingStates, dtype, pending);
  input(names::kTokenIndices, "int64", {kTokens});
  if (!info.cuda) input(names::kKeyIndices, "int64", {kKeys});
  input(names::kPastLengths, "int64", {kSequences});
  input(names::kExitStates, dtype, exits);
  output(names::kNewExitStates, dtype, exits);
  if (!last) {
    for (char const* name : {names::kLastTokens, names::kPendingLengths}) input(name, "int64", {kSequences});
    input(names::kThresholds, "float32", {kSequences});
    input(names::kNextPendingStates, dtype, pending);
    output(names::kNewPending, dtype, pending);
    output(names::kRouterScore, "float32", {kSequences});
    output(names::kExitFlag, "int32", {kSequences});
  }
  for (std::size_t const layer : manifest.model.kv_read(first_layer, end_layer - first_layer)) {
    auto const [heads, head_dim] = manifest.model.kv_shapes[layer];
    for (char const* kind : names::kKinds) {
      input(names::past(layer, kind), dtype, {kSequences, heads, info.capacity, head_dim});
      if (manifest.model.layer_of(layer) < first_layer) continue;  // an earlier segment's
      output(names::present(layer, kind), dtype, {kSequences, heads, info.capacity, head_dim});
    }
  }
  inputs.insert(inputs.end(), outputs.begin(), outputs.end());
  return {names::segment(k), std::move(inputs), info.capacity};
}

NetworkSpec drafter_spec(Manifest const& manifest) {
  DrafterInfo const& drafter = *manifest.drafter;
  std::string const& dtype = kHiddenTypes.at(manifest.networks->weights);
  std::int64_t const width = drafter.state_size;
  std::int64_t tokens = 0;
  for (auto const& [first, last] : ranges_of(drafter.tokens)) tokens += last - first + 1;
  NetworkSpec spec{names::kDrafter,
                   {{names::kInputIds, true, "int64", {kSequences, kTokens}},
                    {names::kHiddenStates, true, dtype, {kSequences, kTokens, width}},
                    {names::kTokenIndices, true, "int64", {kTokens}},
                    {names::kPastLengths, true, "int64", {kSequences}},
                    {names::kLastTokens, true, "int64", {kSequences}}},
                   drafter.max_tokens};
  if (!manifest.networks->cuda) spec.tensors.push_back({names::kKeyIndices, true, "int64", {kKeys}});
  if (manifest.networks->embedding) spec.tensors.push_back(embedding_input(*manifest.networks));
  std::vector<std::int64_t> const kv = {kSequences, drafter.kv_shape.heads, drafter.max_tokens, drafter.kv_shape.head_dim};
  for (char const* kind : names::kKinds) spec.tensors.push_back({names::past(0, kind), true, dtype, kv});
  spec.tensors.push_back({names::kLogits, false, "float32", {kSequences, 1, tokens}});
  spec.tensors.push_back({names::kNewHiddenStates, false, dtype, {kSequences, 1, width}});
  for (char const* kind : names::kKinds) spec.tensors.push_back({names::present(0, kind), false, dtype, kv});
  return spec;
}

}  // namespace

std::vector<std::int64_t> Tensor::dims(RunSize const& run) const {
  std::vector<std::int64_t> sizes = shape;
  for (std::int64_t& size : sizes) {
    size = size == kTokens ? run.tokens : size == kSequences ? run.batch_size : size == kKeys ? run.keys : size;
  }
  return sizes;
}

std::size_t Tensor::size(RunSize const& run) const {
  std::size_t bytes = kItemSizes.at(dtype);
  for (std::int64_t const dim : dims(run)) bytes *= static_cast<std::size_t>(dim);
  return bytes;
}

std::size_t NetworkSpec::index(std::string const& tensor) const {
  auto const named = [&](Tensor const& other) { return other.name == tensor; };
  return static_cast<std::size_t>(std::find_if(tensors.begin(), tensors.end(), named) - tensors.begin());
}

bool NetworkSpec::is_kv_input(std::size_t number) const { return tensors[number].name.rfind(kPast, 0) == 0; }

std::size_t NetworkSpec::alias(std::size_t number) const {
  Tensor const& tensor = tensors[number];
  if (tensor.is_input) return number;
  if (tensor.name == names::kNewPending) return index(names::kNextPendingStates);
  if (tensor.name == names::kNewExitStates) return index(names::kExitStates);
  if (tensor.name.rfind(kPresent, 0) != 0) return number;
  return index(kPast + tensor.name.substr(std::string(kPresent).size()));
}

void NetworkSpec::check(std::vector<Tensor> const& actual, std::string const& path) const {
  for (bool const inputs : {true, false}) {
    std::string const kind = inputs ? "input " : "output ";
    std::map<std::string, Tensor const*> expected, present;
    for (Tensor const& tensor : tensors) {
      if (tensor.is_input == inputs) expected[tensor.name] = &tensor;
    }
    for (Tensor const& tensor : actual) {
      if (tensor.is_input == inputs) present[tensor.name] = &tensor;
    }
    for (auto const& [name, tensor] : expected) {
      if (present.count(name) == 0) {
        throw BundleError("'" + path + "' has no " + kind + name + ", which its manifest calls for: export it again");
      }
    }
    for (auto const& [name, tensor] : present) {
      if (expected.count(name) == 0) {
        throw BundleError("'" + path + "' has the " + kind + name + ", which its manifest does not know");
      }
    }
    for (auto const& [name, tensor] : expected) {
      Tensor const& other = *present[name];
      if (other.dtype == tensor->dtype && other.shape == tensor->shape) continue;
      throw BundleError("'" + path + "': " + kind + name + " is " + shown(other) + ", but its manifest calls for " +
                        shown(*tensor));
    }
  }
}

std::vector<NetworkSpec> network_specs(Manifest const& manifest) {
  std::vector<NetworkSpec> specs;
  std::size_t layer = 0;
  for (std::int64_t const depth : manifest.depths()) {
    auto const end = static_cast<std::size_t>(depth);
    specs.push_back(segment_spec(manifest, specs.size(), layer, end));
    layer = end;
  }
  NetworkSpec head{names::kHead, {specs[0][names::kExitStates], {names::kRows, true, "int64", {kTokens}}}};
  auto const& embedding = manifest.networks->embedding;
  if (embedding && embedding->tied) head.tensors.push_back(embedding_input(*manifest.networks));
  head.tensors.push_back({names::kLogits, false, "float32", {kTokens, manifest.model.vocab_size}});
  specs.push_back(std::move(head));
  Tensor const logits{names::kLogits, true, "float32", {kTokens, manifest.model.vocab_size}};
  specs.push_back({names::kBest,
                   {logits,
                    {names::kBestTokens, false, "int32", {kTokens}},
                    {names::kBestLogits, false, "float32", {kTokens}}}});
  std::int64_t const most = std::min(names::kMaxCandidates, manifest.model.vocab_size);
  specs.push_back({names::kCandidates,
                   {logits,
                    {names::kCandidateLogits, false, "float32", {kTokens, most}},
                    {names::kCandidateTokens, false, "int64", {kTokens, most}}}});
  return specs;
}

std::vector<NetworkSpec> network_specs(Manifest const& manifest, bool drafter) {
  std::vector<NetworkSpec> specs = network_specs(manifest);
  if (drafter && manifest.has_drafter_network()) specs.push_back(drafter_spec(manifest));
  return specs;
}

bool is_of(NetworkSpec const& spec, NetworksOf part) {
  return (spec.name == names::kDrafter) == (part == NetworksOf::drafter);
}

std::vector<Profile> profiles_of(NetworkSpec const& spec, PlansInfo const& plans, NetworksInfo const& info) {
  bool const after = spec.name == names::kHead || spec.name == names::kBest || spec.name == names::kCandidates;
  if (!after) return plans.profiles;
  std::vector<Profile> fitting;
  for (Profile const& profile : plans.profiles) {
    if (profile.batch_size > 1 || profile.max_tokens > info.max_logits) continue;
    fitting.push_back(profile);
    fitting.back().batch_size = info.max_batch_size;
  }
  return fitting;
}

std::size_t pick_profile(std::vector<Profile> const& profiles, std::int64_t tokens, std::int64_t batch_size) {
  std::int64_t max_tokens = 0, max_batch_size = 0;
  for (std::size_t number = 0; number < profiles.size(); ++number) {
    Profile const& profile = profiles[number];
    max_batch_size = std::max(max_batch_size, profile.batch_size);
    if (batch_size > profile.batch_size) continue;
    if (profile.min_tokens <= tokens && tokens <= profile.max_tokens) return number;
    max_tokens = std::max(max_tokens, profile.max_tokens);
  }
  std::string const sequences = std::to_string(batch_size) + " sequences";
  if (max_tokens == 0) {
    throw GenerationError("a run over " + sequences + " exceeds the plan's profiles, which take " +
                          std::to_string(max_batch_size) + " at most");
  }
  throw GenerationError("a run over " + std::to_string(tokens) + " tokens" +
                        (batch_size > 1 ? " of each of " + sequences : "") +
                        " exceeds the plan's profiles, which take " + std::to_string(max_tokens) + " at most");
}

}  // namespace tide
