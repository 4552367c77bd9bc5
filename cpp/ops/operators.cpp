#include "operators.h"

#include <mutex>

#include "candidate.h"
#include "kernel.h"
#include "quantized_matmul.h"
#include "targets.h"

namespace tide_ops {

abi::Api api;

namespace {

// Those that this CPU has the instructions for; of others their functions run.
std::vector<Operator const*> operators() {
  static Operator const &candidate = *new Operator(candidate_operator(false)),
                        &lens_candidate = *new Operator(candidate_operator(true));
  std::vector<Operator const*> found{&candidate, &lens_candidate};
  for (bool const of_integers : {false, true}) {
    if (of_integers && integer_kernel() == nullptr) break;
    for (Operator const* const op : node_operators(of_integers)) found.push_back(op);
  }
  return found;
}

}  // namespace

Status* register_operators(abi::SessionOptions* options, abi::ApiBase const* base) {
  static std::mutex mutex;
  static abi::Domain* domain = nullptr;  // sessions refer to it as long as they live
  std::lock_guard<std::mutex> const lock(mutex);
  if (domain == nullptr) {
    api.set(base->GetApi(abi::kVersion));
    if (!api) return nullptr;  // an older ONNX Runtime: graphs run without the operators, which are functions too
    if (instruction_limit() != nullptr && !instructions_limited_to("avx2") && !instructions_limited_to("baseline")) {
      return api.CreateStatus(abi::kInvalidArgument, "the environment variable TIDE_INSTRUCTIONS must be avx2 or baseline");
    }
    abi::Domain* made;
    TIDE_RETURN_IF_FAILED(api.CreateCustomOpDomain("tide", &made));
    for (Operator const* const op : operators()) TIDE_RETURN_IF_FAILED(api.CustomOpDomain_Add(made, op));
    domain = made;
  }
  return api.AddCustomOpDomain(options, domain);
}

}  // namespace tide_ops
