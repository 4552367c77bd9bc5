#include "tide_compact/plugin.h"

#include <limits>

namespace tide {

using namespace nvinfer1;

namespace {

enum Input { kStates, kExits, kInputs };
enum Output { kStaying, kLeaving, kStayingRows, kLeavingRows, kStayingSize, kLeavingSize };

}  // namespace

Attributes TideCompact::defaults() { return Attributes({}); }

TideCompact::TideCompact(Attributes attributes) : Plugin(kName, std::move(attributes)) {}

IPluginV3* TideCompact::clone() noexcept {
  return guarded(kName, static_cast<IPluginV3*>(nullptr), [&]() -> IPluginV3* { return new TideCompact(*this); });
}

bool TideCompact::takes_inputs(int32_t count) const { return count == kInputs; }

DataType TideCompact::output_type(int32_t output, DataType const* inputs) const {
  if (output <= kLeaving) return inputs[kStates];
  return output <= kLeavingRows ? DataType::kINT32 : DataType::kINT64;
}

void TideCompact::output_shapes(DimsExprs const* inputs, DimsExprs* outputs, IExprBuilder& builder) const {
  require(inputs[kStates].nbDims == 2, "the states are not [rows, hidden]");
  IDimensionExpr const& rows = *inputs[kStates].d[0];
  IDimensionExpr const* half = builder.operation(DimensionOperation::kCEIL_DIV, rows, *builder.constant(2));
  for (int32_t i = 0; i < 2; ++i) {
    IDimensionExpr const* size = builder.declareSizeTensor(kStayingSize + i, *half, rows);
    outputs[kStaying + i].nbDims = 2;
    outputs[kStaying + i].d[0] = outputs[kStayingRows + i].d[0] = size;
    outputs[kStaying + i].d[1] = inputs[kStates].d[1];
    outputs[kStayingRows + i].nbDims = 1;
    outputs[kStayingSize + i].nbDims = 0;  // a size tensor
  }
}

bool TideCompact::supports(int32_t position, DynamicPluginTensorDesc const* inputs) const {
  const DataType type = inputs[position].desc.type;
  return position == kStates ? is_float(type) : type == DataType::kINT32;
}

namespace {

TideCompactArgs sizes(PluginTensorDesc const* inputs) {
  TideCompactArgs args{};
  args.rows = rows_of(inputs[kStates].dims);
  args.row_bytes = args.states_stride =
      last(inputs[kStates].dims) * (tide_type(inputs[kStates].type) == TIDE_FLOAT32 ? 4 : 2);
  return args;
}

}  // namespace

int64_t TideCompact::workspace_size(PluginTensorDesc const* inputs, int32_t) const {
  const TideCompactArgs args = sizes(inputs);
  return tide_compact_workspace(&args);
}

void TideCompact::launch(PluginTensorDesc const* desc, PluginTensorDesc const*, void const* const* inputs,
                         void* const* outputs, void* workspace, cudaStream_t stream) const {
  TideCompactArgs args = sizes(desc);
  require(volume(desc[kExits].dims) == args.rows, "exits is not one flag per row");
  args.states = inputs[kStates];
  args.exits = static_cast<int32_t const*>(inputs[kExits]);
  args.staying = outputs[kStaying];
  args.leaving = outputs[kLeaving];
  args.staying_rows = static_cast<int32_t*>(outputs[kStayingRows]);
  args.leaving_rows = static_cast<int32_t*>(outputs[kLeavingRows]);
  args.staying_size = static_cast<int64_t*>(outputs[kStayingSize]);
  args.leaving_size = static_cast<int64_t*>(outputs[kLeavingSize]);
  check(tide_compact(&args, workspace, std::numeric_limits<int64_t>::max(), stream));
}

}  // namespace tide
