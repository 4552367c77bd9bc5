// Stands in for plugins/common/device.cuh on a CPU.
#pragma once

#include "fibres.h"

namespace tide {

inline float* shared_memory() { return static_cast<float*>(fibres::shared()); }

inline void prefetch_line(const void* at) { fibres::prefetch(at); }

}  // namespace tide
