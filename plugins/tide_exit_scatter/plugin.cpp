#include "tide_exit_scatter/plugin.h"

#include <limits>

namespace tide {

using namespace nvinfer1;

namespace {

// Inputs; the lens's three and the norm's may follow.
enum Input { kStates, kExits, kDestination, kOutput, kExitLayers, kCounts, kOptional };

constexpr int32_t kLensInputs = 3;

}  // namespace

Attributes TideExitScatter::defaults() {
  return Attributes({{"norm", std::string("none")},
                     {"epsilon", 0.0f},
                     {"scale_offset", 0.0f},
                     {"layer", int32_t{1}},
                     {"checkpoint", int32_t{0}}});
}

TideExitScatter::TideExitScatter(Attributes attributes)
    : Plugin(kName, std::move(attributes)), norm_(norm_of(attributes_)) {
  require(attributes_.integer("layer") >= 1, "attribute layer is below 1");
  require(attributes_.integer("checkpoint") >= 0, "attribute checkpoint is negative");
}

IPluginV3* TideExitScatter::clone() noexcept {
  return guarded(kName, static_cast<IPluginV3*>(nullptr), [&]() -> IPluginV3* { return new TideExitScatter(*this); });
}

int32_t TideExitScatter::getAliasedInput(int32_t output) noexcept { return kOutput + output; }

bool TideExitScatter::takes_inputs(int32_t count) const {
  return is_norm_input_count(norm_.kind, count - kOptional) ||
         is_norm_input_count(norm_.kind, count - kOptional - kLensInputs);
}

bool TideExitScatter::has_lens(int32_t input_count) const {
  return !is_norm_input_count(norm_.kind, input_count - kOptional);
}

DataType TideExitScatter::output_type(int32_t output, DataType const* inputs) const { return inputs[kOutput + output]; }

void TideExitScatter::output_shapes(DimsExprs const* inputs, DimsExprs* outputs, IExprBuilder&) const {
  for (int32_t i = 0; i < 3; ++i) outputs[i] = inputs[kOutput + i];
}

bool TideExitScatter::supports(int32_t position, DynamicPluginTensorDesc const* inputs) const {
  const DataType type = inputs[position].desc.type;
  switch (position) {
    case kStates: return is_float(type);
    case kExits:
    case kDestination:
    case kExitLayers: return type == DataType::kINT32;
    case kOutput: return type == inputs[kStates].desc.type;
    case kCounts: return type == DataType::kINT64;
    case kOptional: return type == inputs[kStates].desc.type || type == DataType::kFLOAT;
    default: return type == inputs[kOptional].desc.type;
  }
}

TideExitScatterArgs TideExitScatter::sizes(PluginTensorDesc const* inputs, int32_t input_count) const {
  TideExitScatterArgs args{};
  args.states_type = tide_type(inputs[kStates].type);
  args.weights_type = input_count > kOptional ? tide_type(inputs[kOptional].type) : args.states_type;
  args.layer = attributes_.integer("layer");
  args.checkpoint = attributes_.integer("checkpoint");
  args.rows = rows_of(inputs[kStates].dims);
  args.hidden = args.states_stride = args.output_stride = last(inputs[kStates].dims);
  args.lens_rank = has_lens(input_count) ? last(inputs[kOptional].dims) : 0;
  args.output_rows = rows_of(inputs[kOutput].dims);
  args.norm = norm_;
  return args;
}

int64_t TideExitScatter::workspace_size(PluginTensorDesc const* inputs, int32_t input_count) const {
  const TideExitScatterArgs args = sizes(inputs, input_count);
  return tide_exit_scatter_workspace(&args);
}

void TideExitScatter::launch(PluginTensorDesc const* desc, PluginTensorDesc const*, void const* const* inputs,
                             void* const* outputs, void* workspace, cudaStream_t stream) const {
  TideExitScatterArgs args = sizes(desc, input_count_);
  require(volume(desc[kExits].dims) == args.rows, "exits is not one flag per row");
  require(volume(desc[kDestination].dims) == args.rows, "destination is not one number per row");
  require(last(desc[kOutput].dims) == args.hidden, "output rows are not as wide as the states");
  require(volume(desc[kExitLayers].dims) == args.output_rows, "exit_layers is not one number per output row");
  require(volume(desc[kCounts].dims) > args.checkpoint, "counts has no place for this checkpoint");
  for (int32_t i = 0; i < 3; ++i) carry_over(outputs[i], inputs[kOutput + i], desc[kOutput + i], stream);
  args.states = inputs[kStates];
  args.exits = static_cast<int32_t const*>(inputs[kExits]);
  args.destination = static_cast<int32_t const*>(inputs[kDestination]);
  args.output = outputs[0];
  args.exit_layers = static_cast<int32_t*>(outputs[1]);
  args.counts = static_cast<int64_t*>(outputs[2]);
  int32_t next = kOptional;
  if (args.lens_rank > 0) {
    require(volume(desc[next].dims) == args.hidden * args.lens_rank, "lens_down is not [hidden, rank]");
    require(volume(desc[next + 1].dims) == args.hidden * args.lens_rank, "lens_up is not [rank, hidden]");
    require(volume(desc[next + 2].dims) == args.hidden, "lens_bias is not [hidden]");
    args.lens_down = inputs[next++];
    args.lens_up = inputs[next++];
    args.lens_bias = inputs[next++];
  }
  for (int32_t i = next; i < input_count_; ++i)
    require(volume(desc[i].dims) == args.hidden, "a norm's weight is not [hidden]");
  if (next < input_count_) args.norm.scale = inputs[next++];
  if (next < input_count_) args.norm.shift = inputs[next++];
  check(tide_exit_scatter(&args, workspace, std::numeric_limits<int64_t>::max(), stream));
}

}  // namespace tide
