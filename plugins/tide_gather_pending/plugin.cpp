#include "tide_gather_pending/plugin.h"

namespace tide {

using namespace nvinfer1;

namespace {

enum Input { kStates, kTake, kLengths, kPending, kCounts, kInputs };
enum Output { kNewPending, kNewCounts, kPositions };

}  // namespace

Attributes TideGatherPending::defaults() { return Attributes({}); }

TideGatherPending::TideGatherPending(Attributes attributes) : Plugin(kName, std::move(attributes)) {}

IPluginV3* TideGatherPending::clone() noexcept {
  return guarded(kName, static_cast<IPluginV3*>(nullptr), [&]() -> IPluginV3* { return new TideGatherPending(*this); });
}

int32_t TideGatherPending::getAliasedInput(int32_t output) noexcept {
  return output == kPositions ? -1 : kPending + output;
}

bool TideGatherPending::takes_inputs(int32_t count) const { return count == kInputs; }

DataType TideGatherPending::output_type(int32_t output, DataType const* inputs) const {
  return output == kNewPending ? inputs[kPending] : DataType::kINT32;
}

void TideGatherPending::output_shapes(DimsExprs const* inputs, DimsExprs* outputs, IExprBuilder&) const {
  require(inputs[kStates].nbDims == 3 && inputs[kPending].nbDims == 3,
          "states and pending are not [batch, tokens, hidden]");
  outputs[kNewPending] = inputs[kPending];
  outputs[kNewCounts] = inputs[kCounts];
  outputs[kPositions].nbDims = 2;
  outputs[kPositions].d[0] = inputs[kPending].d[0];
  outputs[kPositions].d[1] = inputs[kPending].d[1];
}

bool TideGatherPending::supports(int32_t position, DynamicPluginTensorDesc const* inputs) const {
  const DataType type = inputs[position].desc.type;
  if (position == kStates) return is_float(type);
  return type == (position == kPending ? inputs[kStates].desc.type : DataType::kINT32);
}

int64_t TideGatherPending::workspace_size(PluginTensorDesc const*, int32_t) const { return 0; }

void TideGatherPending::launch(PluginTensorDesc const* desc, PluginTensorDesc const*, void const* const* inputs,
                               void* const* outputs, void*, cudaStream_t stream) const {
  Dims const& states = desc[kStates].dims;
  Dims const& pending = desc[kPending].dims;
  require(states.d[0] == pending.d[0] && states.d[2] == pending.d[2], "states and pending differ in batch or width");
  for (int32_t input : {kTake, kLengths, kCounts})
    require(volume(desc[input].dims) == pending.d[0], "take, lengths or counts is not one number per sequence");
  carry_over(outputs[kNewPending], inputs[kPending], desc[kPending], stream);
  carry_over(outputs[kNewCounts], inputs[kCounts], desc[kCounts], stream);
  TideGatherPendingArgs args{};
  args.batch = pending.d[0];
  args.tokens = states.d[1];
  args.capacity = pending.d[1];
  args.token_bytes = pending.d[2] * (tide_type(desc[kStates].type) == TIDE_FLOAT32 ? 4 : 2);
  args.states = inputs[kStates];
  args.take = static_cast<int32_t const*>(inputs[kTake]);
  args.lengths = static_cast<int32_t const*>(inputs[kLengths]);
  args.pending = outputs[kNewPending];
  args.counts = static_cast<int32_t*>(outputs[kNewCounts]);
  args.positions = static_cast<int32_t*>(outputs[kPositions]);
  check(tide_gather_pending(&args, stream));
}

}  // namespace tide
