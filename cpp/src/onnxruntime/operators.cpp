#include "onnxruntime/operators.h"

#include "../../ops/operators.h"

namespace tide {

void register_operators(Ort::SessionOptions& options) {
  Ort::require(tide_ops::register_operators(options.get(), Ort::api_base()));
}

}  // namespace tide
