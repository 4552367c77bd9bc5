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
// no memory, ONNX Runtime failed, logits that are not finite.
class GenerationError : public TideError {
 public:
  using TideError::TideError;
};

// ONNX Runtime cannot be used: the library is older than the headers this one was compiled with.
class ProviderError : public TideError {
 public:
  using TideError::TideError;
};

}  // namespace tide
