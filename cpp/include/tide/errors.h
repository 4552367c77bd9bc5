// What the runtime throws: one class per stage, each with a single sentence a user can act on, under the names of the
// Python package's tide_export/errors.py. A service catches `TideError`, or the stage it cares about.
#pragma once

#include <stdexcept>

namespace tide {

// Base of every error a user can cause or mend; the text is one sentence naming the file or option.
class TideError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An option of `Engine::load` is out of range.
class ConfigError : public TideError {
 public:
  using TideError::TideError;
};

// A bundle is missing, damaged or of another release.
class BundleError : public TideError {
 public:
  using TideError::TideError;
};

// A generation request is unusable: empty prompt, prompt beyond the context, option out of range. Or a step failed:
// no memory, what runs the bundle failed, logits that are not finite.
class GenerationError : public TideError {
 public:
  using TideError::TideError;
};

// What shall run the bundle cannot run here: ONNX Runtime or TensorRT are missing or of the wrong version, the bundle
// has no engines for it, there is no GPU or another one than they were built for.
class ProviderError : public TideError {
 public:
  using TideError::TideError;
};

}  // namespace tide
