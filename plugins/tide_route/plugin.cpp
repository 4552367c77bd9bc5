#include "tide_route/plugin.h"

#include <limits>

namespace tide {

using namespace nvinfer1;

namespace {

// Inputs; the shortlist's two and the norm's may follow.
enum Input { kStates, kThreshold, kDown, kUp, kBias, kOptional };

}  // namespace

Attributes TideRoute::defaults() {
  return Attributes({{"norm", std::string("none")}, {"epsilon", 0.0f}, {"scale_offset", 0.0f}});
}

TideRoute::TideRoute(Attributes attributes) : Plugin(kName, std::move(attributes)), norm_(norm_of(attributes_)) {}

IPluginV3* TideRoute::clone() noexcept {
  return guarded(kName, static_cast<IPluginV3*>(nullptr), [&]() -> IPluginV3* { return new TideRoute(*this); });
}

bool TideRoute::takes_inputs(int32_t count) const {
  return is_norm_input_count(norm_.kind, count - kOptional) || is_norm_input_count(norm_.kind, count - kOptional - 2);
}

// LayerNorm's scale and shift look like a shortlist, but then the norm would have no scale.
int32_t TideRoute::norm_inputs(int32_t input_count) const {
  const int32_t more = input_count - kOptional;
  return is_norm_input_count(norm_.kind, more) ? more : more - 2;
}

DataType TideRoute::output_type(int32_t output, DataType const*) const {
  return output == 0 ? DataType::kFLOAT : DataType::kINT32;
}

void TideRoute::output_shapes(DimsExprs const* inputs, DimsExprs* outputs, IExprBuilder& builder) const {
  require(inputs[kStates].nbDims >= 1, "the states have no dimensions");
  for (int32_t i = 0; i < 2; ++i) {
    outputs[i] = inputs[kStates];
    outputs[i].d[inputs[kStates].nbDims - 1] = builder.constant(1);
  }
}

bool TideRoute::supports(int32_t position, DynamicPluginTensorDesc const* inputs) const {
  const DataType type = inputs[position].desc.type;
  if (position == kStates || position == kThreshold) return is_float(type);
  if (position == kDown) return type == inputs[kStates].desc.type || type == DataType::kFLOAT;
  return type == inputs[kDown].desc.type;
}

TideRouteArgs TideRoute::sizes(PluginTensorDesc const* inputs, int32_t input_count) const {
  TideRouteArgs args{};
  args.states_type = tide_type(inputs[kStates].type);
  args.weights_type = tide_type(inputs[kDown].type);
  args.threshold_type = tide_type(inputs[kThreshold].type);
  args.rows = rows_of(inputs[kStates].dims);
  args.hidden = args.states_stride = last(inputs[kStates].dims);
  args.bottleneck = last(inputs[kDown].dims);
  args.norm = norm_;
  if (input_count - norm_inputs(input_count) > kOptional) args.shortlist = last(inputs[kOptional].dims);
  return args;
}

int64_t TideRoute::workspace_size(PluginTensorDesc const* inputs, int32_t input_count) const {
  const TideRouteArgs args = sizes(inputs, input_count);
  return tide_route_workspace(&args);
}

void TideRoute::launch(PluginTensorDesc const* desc, PluginTensorDesc const*, void const* const* inputs,
                       void* const* outputs, void* workspace, cudaStream_t stream) const {
  TideRouteArgs args = sizes(desc, input_count_);
  const int64_t thresholds = volume(desc[kThreshold].dims);
  require(volume(desc[kDown].dims) == args.hidden * args.bottleneck, "down is not [hidden, bottleneck]");
  require(volume(desc[kUp].dims) == args.bottleneck, "up is not [bottleneck, 1]");
  require(volume(desc[kBias].dims) == 1, "bias is not [1]");
  require(thresholds == 1 || thresholds == args.rows, "there is neither one threshold nor one per row");
  args.threshold_stride = thresholds == 1 ? 0 : 1;
  args.states = inputs[kStates];
  args.threshold = inputs[kThreshold];
  args.down = inputs[kDown];
  args.up = inputs[kUp];
  args.bias = inputs[kBias];
  int32_t next = kOptional;
  if (args.shortlist > 0) {
    require(volume(desc[next].dims) == args.hidden * args.shortlist, "shortlist is not [hidden, tokens]");
    require(volume(desc[next + 1].dims) == 2 * args.bottleneck, "confidence is not [2, bottleneck]");
    args.shortlist_weight = inputs[next++];
    args.confidence = inputs[next++];
  }
  for (int32_t i = next; i < input_count_; ++i)
    require(volume(desc[i].dims) == args.hidden, "a norm's weight is not [hidden]");
  if (next < input_count_) args.norm.scale = inputs[next++];
  if (next < input_count_) args.norm.shift = inputs[next++];
  args.scores = static_cast<float*>(outputs[0]);
  args.exits = static_cast<int32_t*>(outputs[1]);
  check(tide_route(&args, workspace, std::numeric_limits<int64_t>::max(), stream));
}

}  // namespace tide
