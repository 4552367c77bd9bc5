// What nodes that multiply by integers hold of their weights.
#pragma once

#include <memory>

#include "node.h"
#include "quantized_matmul.h"
#include "weight_copies.h"

namespace tide_ops {

// The packed copy of `weights`, which is made at the first run. Throws std::bad_alloc.
std::shared_ptr<PackedWeights const> packed_of(IntegerWeights const& weights, KeptCopy<PackedWeights>& kept, Run& run);

}  // namespace tide_ops
