#include "onnxruntime/session.h"

#include <string>

#include "tide/errors.h"

namespace tide {
namespace {

// A worker thread waits so long for the next operator before it sleeps: tide_export/runtime/onnxruntime/session.py says why.
constexpr char const* kSpinMicroseconds = "20";

}  // namespace

void check_onnxruntime() {
  OrtApiBase const* const base = OrtGetApiBase();
  if (base->GetApi(ORT_API_VERSION) != nullptr) return;
  throw ProviderError(std::string("the ONNX Runtime library is version ") + base->GetVersionString() +
                      ", older than the headers that tide_runtime was compiled with: use one from 1." +
                      std::to_string(ORT_API_VERSION) + " on");
}

Ort::SessionOptions session_options(std::optional<std::int64_t> threads) {
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(static_cast<int>(threads.value_or(0)));
  options.AddConfigEntry("session.intra_op.spin_duration_us", kSpinMicroseconds);
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);  // errors reach the caller as exceptions
  return options;
}

}  // namespace tide
