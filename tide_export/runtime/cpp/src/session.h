// A checked bundle in an ONNX Runtime session: what all sequences of an engine share.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <optional>
#include <string>

#include "bundle.h"

namespace tide {

// The graph's fixed names, as tide_export/names.py has them.
namespace names {

constexpr char const* kInputIds = "input_ids";                 // int64 [1, S]
constexpr char const* kTotalLength = "total_sequence_length";  // int32 []
constexpr char const* kKeptTokens = "kept_tokens";             // int64 [m, 2], as [0, place from the end]
constexpr char const* kThresholds = "exit_thresholds";         // float32 [K-1]
constexpr char const* kLogits = "logits";                      // float32 [m, V]
constexpr char const* kScores = "router_scores";               // float32 [1, K-1], NaN: not reached
constexpr char const* kNewPending = "new_pending_states";      // float32 [1, n, D]

std::string skip_threshold(std::size_t k);                 // float32 [1], of segment k >= 1
std::string pending(std::size_t k);                        // float32 [1, n_k, D], before segment k >= 1
std::string past(std::size_t layer, char const* kind);     // float32 [1, heads, C, head_dim]; kind: key, value
std::string present(std::size_t layer, char const* kind);  // the same buffer after the step

}  // namespace names

class Session {
 public:
  // Throws BundleError: the graph does not load, or its inputs and outputs are not those of the manifest. ConfigError:
  // threads below 1. ProviderError: ONNX Runtime is too old.
  Session(Bundle bundle, std::optional<std::int64_t> threads);

  Bundle const& bundle() const { return bundle_; }
  Manifest const& manifest() const { return bundle_.manifest; }

  // `Run` of several threads at once is safe; it is what ONNX Runtime's C++ interface wants to have as not const.
  Ort::Session& onnxruntime() { return session_; }

 private:
  Bundle bundle_;
  Ort::Env env_{nullptr};
  Ort::Session session_{nullptr};
};

}  // namespace tide
