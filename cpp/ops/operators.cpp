#include "operators.h"

#include <mutex>

#include "candidate.h"
#include "kernel.h"
#include "quantized_matmul.h"

namespace tide_ops {

abi::Api api;

namespace {

// All of them. Those for integers are missing on a CPU without their instructions.
struct Operators {
  std::vector<Operator> all{candidate_operator(false), candidate_operator(true), attention_operator(false),
                            attention_operator(true)};
  std::vector<Operator> of_integers = integer_operators();

  Operators() {
    for (Operator const& op : half_operators()) all.push_back(op);
  }
};

Operators const& operators() {
  static Operators const& made = *new Operators;  // kernels refer to it, some until the process ends
  return made;
}

}  // namespace

std::string operator_names() {
  std::string names;
  for (auto const* list : {&operators().all, &operators().of_integers}) {
    for (Operator const& op : *list) names += std::string(op.GetName(&op)) + ' ';
  }
  return names;
}

Status* register_operators(abi::SessionOptions* options, abi::ApiBase const* base) {
  static std::mutex mutex;
  static abi::Domain* domain = nullptr;  // sessions refer to it as long as they live
  std::lock_guard<std::mutex> const lock(mutex);
  if (domain == nullptr) {
    api.set(base->GetApi(abi::kVersion));
    if (!api) return nullptr;  // an older ONNX Runtime: graphs run without the operators, which are functions too
    abi::Domain* made;
    TIDE_RETURN_IF_FAILED(api.CreateCustomOpDomain("tide", &made));
    for (Operator const& op : operators().all) TIDE_RETURN_IF_FAILED(api.CustomOpDomain_Add(made, &op));
    if (integers_supported()) {  // on other CPUs their function runs: MatMulNBits
      for (Operator const& op : operators().of_integers) TIDE_RETURN_IF_FAILED(api.CustomOpDomain_Add(made, &op));
    }
    domain = made;
  }
  return api.AddCustomOpDomain(options, domain);
}

}  // namespace tide_ops
