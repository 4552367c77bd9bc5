#include "tide_exit/plugin.h"

namespace tide {

using namespace nvinfer1;

namespace {

// Inputs; the shortlist's two, the lens's three and the norm's may follow.
enum Input { kStates, kLastTokens, kThresholds, kExitStates, kDown, kUp, kBias, kOptional };

enum Output { kNewExitStates, kScore, kExits };

TideNormArgs norm_of(Attributes const& attributes) {
  TideNormArgs norm{};
  std::string const& kind = attributes.text("norm");
  if (kind == "rms")
    norm.kind = TIDE_NORM_RMS;
  else if (kind == "layer")
    norm.kind = TIDE_NORM_LAYER;
  else if (kind != "none")
    throw Misuse("attribute norm is \"" + kind + "\", not none, rms or layer");
  norm.epsilon = attributes.number("epsilon");
  return norm;
}

bool flag(Attributes const& attributes, char const* name) {
  int32_t const value = attributes.integer(name);
  if (value != 0 && value != 1) throw Misuse(std::string("attribute ") + name + " is neither 0 nor 1");
  return value == 1;
}

}  // namespace

uint32_t* Counters::get(cudaStream_t stream) {
  constexpr size_t kBytes = TIDE_EXIT_COUNTERS * sizeof(uint32_t);
  if (memory_ == nullptr) {
    check(cudaMalloc(&memory_, kBytes));
    check(cudaMemsetAsync(memory_, 0, kBytes, stream));
  }
  return static_cast<uint32_t*>(memory_);
}

Attributes TideExit::defaults() {
  return Attributes(
      {{"norm", std::string("none")}, {"epsilon", 0.0f}, {"lens", int32_t{0}}, {"shortlist", int32_t{0}}});
}

TideExit::TideExit(Attributes attributes)
    : Plugin(kName, std::move(attributes)),
      norm_(norm_of(attributes_)),
      shortlist_(kOptional),
      lens_(shortlist_ + (flag(attributes_, "shortlist") ? 2 : 0)),
      norm_weights_(lens_ + (flag(attributes_, "lens") ? 3 : 0)) {}

IPluginV3* TideExit::clone() noexcept {
  return guarded(kName, static_cast<IPluginV3*>(nullptr), [&]() -> IPluginV3* { return new TideExit(*this); });
}

int32_t TideExit::getAliasedInput(int32_t output) noexcept { return output == kNewExitStates ? kExitStates : -1; }

bool TideExit::takes_inputs(int32_t count) const {
  int32_t const weights = count - norm_weights_;
  if (norm_.kind == TIDE_NORM_LAYER) return weights == 1 || weights == 2;
  return weights == (norm_.kind == TIDE_NORM_RMS ? 1 : 0);
}

DataType TideExit::output_type(int32_t output, DataType const* inputs) const {
  if (output == kNewExitStates) return inputs[kExitStates];
  return output == kScore ? DataType::kFLOAT : DataType::kINT32;
}

void TideExit::output_shapes(DimsExprs const* inputs, DimsExprs* outputs, IExprBuilder&) const {
  require(inputs[kStates].nbDims == 3, "the states are not [slots, tokens, hidden]");
  require(inputs[kExitStates].nbDims == 4, "the exit states are not [slots, 1, rows, hidden]");
  outputs[kNewExitStates] = inputs[kExitStates];
  outputs[kScore] = outputs[kExits] = inputs[kThresholds];
}

bool TideExit::supports(int32_t position, DynamicPluginTensorDesc const* inputs) const {
  const DataType type = inputs[position].desc.type;
  if (position == kStates) return is_float(type);
  if (position == kLastTokens) return type == DataType::kINT64;
  if (position == kExitStates || position >= lens_) return type == inputs[kStates].desc.type;
  return type == DataType::kFLOAT;
}

TideExitArgs TideExit::sizes(PluginTensorDesc const* inputs) const {
  TideExitArgs args{};
  Dims const& states = inputs[kStates].dims;
  args.states_type = tide_type(inputs[kStates].type);
  args.slots = states.d[0];
  args.tokens = states.d[1];
  args.hidden = states.d[2];
  args.exit_rows = inputs[kExitStates].dims.d[2];
  args.bottleneck = last(inputs[kDown].dims);
  args.shortlist = lens_ > shortlist_ ? last(inputs[shortlist_].dims) : 0;
  args.lens_rank = norm_weights_ > lens_ ? last(inputs[lens_].dims) : 0;
  args.norm = norm_;
  return args;
}

int64_t TideExit::workspace_size(PluginTensorDesc const* inputs, int32_t) const {
  const TideExitArgs args = sizes(inputs);
  return tide_exit_workspace(&args);
}

void TideExit::launch(PluginTensorDesc const* desc, PluginTensorDesc const*, void const* const* inputs,
                      void* const* outputs, void* workspace, cudaStream_t stream) const {
  TideExitArgs args = sizes(desc);
  const auto check_volume = [&](int32_t input, int64_t expected, char const* text) {
    require(volume(desc[input].dims) == expected, text);
  };
  check_volume(kLastTokens, args.slots, "last_tokens is not one number per slot");
  check_volume(kThresholds, args.slots, "thresholds is not one number per slot");
  check_volume(kExitStates, args.slots * args.exit_rows * args.hidden, "exit_states is not [slots, 1, rows, hidden]");
  check_volume(kDown, args.hidden * args.bottleneck, "down is not [hidden, bottleneck]");
  check_volume(kUp, args.bottleneck, "up is not [bottleneck, 1]");
  check_volume(kBias, 1, "bias is not [1]");
  if (args.shortlist > 0) {
    check_volume(shortlist_, args.hidden * args.shortlist, "shortlist is not [hidden, tokens]");
    check_volume(shortlist_ + 1, 2 * args.bottleneck, "confidence is not [2, bottleneck]");
    args.shortlist_weight = static_cast<float const*>(inputs[shortlist_]);
    args.confidence = static_cast<float const*>(inputs[shortlist_ + 1]);
  }
  if (args.lens_rank > 0) {
    check_volume(lens_, args.hidden * args.lens_rank, "lens_down is not [hidden, rank]");
    check_volume(lens_ + 1, args.lens_rank * args.hidden, "lens_up is not [rank, hidden]");
    check_volume(lens_ + 2, args.hidden, "lens_bias is not [hidden]");
    args.lens_down = inputs[lens_];
    args.lens_up = inputs[lens_ + 1];
    args.lens_bias = inputs[lens_ + 2];
  }
  for (int32_t i = norm_weights_; i < input_count_; ++i) check_volume(i, args.hidden, "a norm's weight is not [hidden]");
  if (input_count_ > norm_weights_) args.norm.scale = inputs[norm_weights_];
  if (input_count_ > norm_weights_ + 1) args.norm.shift = inputs[norm_weights_ + 1];
  carry_over(outputs[kNewExitStates], inputs[kExitStates], desc[kExitStates], stream);
  args.states = inputs[kStates];
  args.last_tokens = static_cast<int64_t const*>(inputs[kLastTokens]);
  args.thresholds = static_cast<float const*>(inputs[kThresholds]);
  args.down = static_cast<float const*>(inputs[kDown]);
  args.up = static_cast<float const*>(inputs[kUp]);
  args.bias = static_cast<float const*>(inputs[kBias]);
  args.exit_states = outputs[kNewExitStates];
  args.scores = static_cast<float*>(outputs[kScore]);
  args.exits = static_cast<int32_t*>(outputs[kExits]);
  // TensorRT gives no size: it asked for that of the largest shapes, which is no smaller.
  check(tide_exit(&args, workspace, tide_exit_workspace(&args), counters_.get(stream), stream));
}

}  // namespace tide
