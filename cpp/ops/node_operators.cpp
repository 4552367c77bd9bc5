// The nodes that are operators: what ONNX Runtime asks about them.
#include "nodes.h"
#include "operators.h"

namespace tide_ops {
namespace {

constexpr int kFloat = abi::kFloat, kInt64 = abi::kInt64;
constexpr int kAnything = 0;  // of any number of inputs or outputs, of any types

// An operator and the types of its tensors. Inputs before the first and after the last required one may be absent.
struct NodeOperator : Operator {
  char const* name;
  std::vector<int> inputs, outputs;
  std::size_t first_required, last_required;  // inputs
};

NodeOperator const& of(Operator const* op) { return *static_cast<NodeOperator const*>(op); }

// The tensors of an operator that is one node.
class ContextOperands : public Operands {
 public:
  explicit ContextOperands(Context* context) : context_(context) {}

  Status* input(std::size_t index, Tensor& tensor) const override {
    std::size_t count;
    TIDE_RETURN_IF_FAILED(api.KernelContext_GetInputCount(context_, &count));
    if (index < count) return input_of(context_, index, tensor);
    tensor = {};
    return nullptr;
  }

  Status* output(std::size_t index, std::int64_t const* dims, std::size_t rank, void** data) const override {
    Value* value;
    TIDE_RETURN_IF_FAILED(api.KernelContext_GetOutput(context_, index, dims, rank, &value));
    *data = nullptr;
    return value == nullptr ? nullptr : api.GetTensorMutableData(value, data);
  }

 private:
  Context* const context_;
};

class KernelAttributes : public Attributes {
 public:
  explicit KernelAttributes(void const* info) : info_(info) {}

  std::int64_t integer(char const* name, std::int64_t otherwise) const override {
    return read(api.KernelInfoGetAttribute_int64, name, otherwise);
  }
  float number(char const* name, float otherwise) const override {
    return read(api.KernelInfoGetAttribute_float, name, otherwise);
  }
  std::string text(char const* name) const override {
    std::size_t size = 0;
    if (Status* const missing = api.KernelInfoGetAttribute_string(info_, name, nullptr, &size)) {
      api.ReleaseStatus(missing);
      return "";
    }
    std::string text(size, ' ');
    if (Status* const failed = api.KernelInfoGetAttribute_string(info_, name, &text[0], &size)) {
      api.ReleaseStatus(failed);
      return "";
    }
    text.resize(size > 0 ? size - 1 : 0);  // without the 0 after it
    return text;
  }

 private:
  template <typename T, typename Entry>
  T read(Entry const& entry, char const* name, T value) const {
    if (Status* const missing = entry(info_, name, &value)) api.ReleaseStatus(missing);
    return value;
  }

  void const* const info_;
};

Status* create(Operator const* op, void const*, void const* info, void** kernel) {
  try {
    *kernel = node_of(of(op).name, KernelAttributes(info)).release();
    return nullptr;
  } catch (std::bad_alloc const&) {
    return invalid("not enough memory for an operator");
  } catch (std::exception const& error) {
    return invalid((std::string(of(op).name) + " has a wrong attribute: " + error.what()).c_str());
  }
}

Status* compute(void* kernel, Context* context) {
  try {
    Run run(context);
    TIDE_RETURN_IF_FAILED(static_cast<Node*>(kernel)->add(ContextOperands(context), run));
    return run.finish();
  } catch (std::bad_alloc const&) {
    return invalid("not enough memory for an operator's run");
  }
}

NodeOperator operator_of(char const* name, std::vector<int> inputs, std::vector<int> outputs,
                         std::size_t first_required, std::size_t last_required) {
  NodeOperator op{cpu_operator(), name, std::move(inputs), std::move(outputs), first_required, last_required};
  op.GetName = [](Operator const* self) { return of(self).name; };
  op.GetInputType = [](Operator const* self, std::size_t index) { return of(self).inputs[index]; };
  op.GetInputTypeCount = [](Operator const* self) { return of(self).inputs.size(); };
  op.GetInputCharacteristic = [](Operator const* self, std::size_t index) -> int {
    NodeOperator const& asked = of(self);
    if (asked.inputs[index] == kAnything) return abi::kVariadic;
    return index < asked.first_required || index > asked.last_required ? abi::kOptional : 0;
  };
  op.GetOutputType = [](Operator const* self, std::size_t index) { return of(self).outputs[index]; };
  op.GetOutputTypeCount = [](Operator const* self) { return of(self).outputs.size(); };
  op.GetOutputCharacteristic = [](Operator const* self, std::size_t index) -> int {
    if (of(self).outputs[index] == kAnything) return abi::kVariadic;
    return index > 0 ? abi::kOptional : 0;
  };
  if (op.inputs[0] == kAnything) {
    op.GetVariadicInputHomogeneity = op.GetVariadicOutputHomogeneity = [](Operator const*) { return 0; };
  }
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.KernelComputeV2 = compute;
  return op;
}

NodeOperator matmul(char const* name, std::vector<int> inputs) {
  return operator_of(name, std::move(inputs), {abi::kFloat}, 0, 2);
}

NodeOperator outlier_matmul(char const* name) {
  return operator_of(name, {abi::kFloat, abi::kUInt8, abi::kFloat, abi::kInt64}, {abi::kFloat}, 0, 3);
}

NodeOperator expert_matmul(char const* name, std::vector<int> weights) {
  std::vector<int> inputs{kFloat, kInt64};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  return operator_of(name, inputs, {kFloat}, 0, inputs.size() - 1);
}

NodeOperator attention(char const* name, int number) {
  return operator_of(
      name,
      {kFloat, kFloat, kFloat, number, number, abi::kInt32, kInt64, kInt64, kFloat, kFloat, kFloat, kFloat, kFloat},
      {kFloat, number, number}, 3, 6);
}

struct Operators {
  std::vector<NodeOperator> nodes{
      matmul("TideBf16MatMul", {abi::kFloat, abi::kBFloat16}),
      matmul("TideGatedBf16MatMul", {abi::kFloat, abi::kBFloat16}),
      matmul("TideFp16MatMul", {abi::kFloat, abi::kFloat16}),
      matmul("TideGatedFp16MatMul", {abi::kFloat, abi::kFloat16}),
      expert_matmul("TideBf16ExpertMatMul", {abi::kBFloat16}),
      expert_matmul("TideFp16ExpertMatMul", {abi::kFloat16}),
      attention("TidePagedAttention", abi::kFloat),
      attention("TideInt8PagedAttention", abi::kInt8),
      operator_of("TideCausalConv", {kFloat, kFloat, kFloat, kInt64, kInt64, kFloat, kInt64}, {kFloat, kFloat}, 0, 4),
      operator_of("TideRecurrence",
                  {kFloat, kFloat, kFloat, kFloat, kFloat, kFloat, kInt64, kInt64, kFloat, kInt64},
                  {kFloat, kFloat, kFloat}, 0, 7),
      operator_of("TideGate", {kFloat}, {kFloat}, 0, 0),
      operator_of("TideLora", {kFloat, kFloat, kFloat, kInt64, kInt64}, {kFloat}, 0, 3),
      operator_of("TideLayers", {kAnything}, {kAnything}, 0, 0),
  };
  std::vector<NodeOperator> of_integers{
      matmul("TideInt4MatMul", {abi::kFloat, abi::kUInt8, abi::kFloat}),
      matmul("TideGatedInt4MatMul", {abi::kFloat, abi::kUInt8, abi::kFloat}),
      matmul("TideInt8MatMul", {abi::kFloat, abi::kUInt8, abi::kFloat}),
      matmul("TideGatedInt8MatMul", {abi::kFloat, abi::kUInt8, abi::kFloat}),
      outlier_matmul("TideInt4OutlierMatMul"),
      outlier_matmul("TideGatedInt4OutlierMatMul"),
      expert_matmul("TideInt4ExpertMatMul", {abi::kUInt8, kFloat}),
      expert_matmul("TideInt8ExpertMatMul", {abi::kUInt8, kFloat}),
      expert_matmul("TideMxfp4ExpertMatMul", {abi::kUInt8, abi::kUInt8}),
      operator_of("TideIntegerLayers", {kAnything}, {kAnything}, 0, 0),
  };
};

}  // namespace

std::unique_ptr<Node> node_of(std::string const& name, Attributes const& attributes) {
  for (bool const gated : {false, true}) {
    std::string const prefix = gated ? "TideGated" : "Tide";
    if (name == prefix + "Bf16MatMul") return half_matmul_node(HalfFormat::kBf16, gated);
    if (name == prefix + "Fp16MatMul") return half_matmul_node(HalfFormat::kFp16, gated);
    if (name == prefix + "Int4MatMul" || name == prefix + "Int4OutlierMatMul") {
      return integer_matmul_node(IntegerFormat::kInt4, gated);
    }
    if (name == prefix + "Int8MatMul") return integer_matmul_node(IntegerFormat::kInt8, gated);
  }
  if (name == "TideBf16ExpertMatMul") return half_expert_matmul_node(HalfFormat::kBf16);
  if (name == "TideFp16ExpertMatMul") return half_expert_matmul_node(HalfFormat::kFp16);
  if (name == "TideInt4ExpertMatMul") return integer_expert_matmul_node(IntegerFormat::kInt4);
  if (name == "TideInt8ExpertMatMul") return integer_expert_matmul_node(IntegerFormat::kInt8);
  if (name == "TideMxfp4ExpertMatMul") return integer_expert_matmul_node(IntegerFormat::kMxfp4);
  if (name == "TidePagedAttention") return attention_node(false, attributes);
  if (name == "TideInt8PagedAttention") return attention_node(true, attributes);
  if (name == "TideCausalConv") return causal_conv_node(attributes);
  if (name == "TideRecurrence") return recurrence_node();
  if (name == "TideGate") return gate_node();
  if (name == "TideLora") return lora_node(attributes);
  if (name == "TideLayers" || name == "TideIntegerLayers") return layers_node(attributes.text("nodes"));
  if (name == "RMSNormalization") return norm_node(false, false, attributes);
  if (name == "LayerNormalization") return norm_node(true, false, attributes);
  if (name == "SkipSimplifiedLayerNormalization") return norm_node(false, true, attributes);
  if (name == "SkipLayerNormalization") return norm_node(true, true, attributes);
  return elementwise_node(name, attributes);
}

std::vector<Operator const*> node_operators(bool of_integers) {
  static Operators const& made = *new Operators;  // kernels refer to it, some until the process ends
  std::vector<Operator const*> pointers;
  for (NodeOperator const& op : of_integers ? made.of_integers : made.nodes) pointers.push_back(&op);
  return pointers;
}

}  // namespace tide_ops
