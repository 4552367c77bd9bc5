#include "onnxruntime/operators.h"

#include "../../ops/operators.h"
#include "../../ops/weight_copies.h"
#include "bundle/store.h"

namespace tide {

void register_operators(Ort::SessionOptions& options) {
  tide_ops::forget_weights = Mapping::forget;
  Ort::require(tide_ops::register_operators(options.get(), Ort::api_base()));
}

}  // namespace tide
