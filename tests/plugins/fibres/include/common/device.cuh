// Stands in for plugins/common/device.cuh on a CPU.
#pragma once

#include "fibres.h"

namespace tide {

inline float* shared_memory() { return static_cast<float*>(fibres::shared()); }

}  // namespace tide
