// What all sessions of ONNX Runtime have in common here.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <optional>

namespace tide {

// Throws ProviderError: the library is older than the headers.
void check_onnxruntime();

// `threads` of one run, 1 or more; none: one per physical core.
Ort::SessionOptions session_options(std::optional<std::int64_t> threads);

}  // namespace tide
