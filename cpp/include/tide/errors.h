// The runtime's exceptions: one class per stage, named as in the Python package's tide_export/errors.py. A service
// catches `TideError`, or the stage it cares about.
#pragma once

#include <stdexcept>

namespace tide {

// Base of every error a user can cause or fix; the text is one sentence that names the file or option. Any call may throw
// std::bad_alloc too, where there is no memory for a few bytes; an engine and its states are then as before the call.
struct TideError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An option of `Engine::load` is out of range.
struct ConfigError : TideError {
  using TideError::TideError;
};

// A bundle is missing, damaged or of another release.
struct BundleError : TideError {
  using TideError::TideError;
};

// A generation request is unusable (empty prompt, prompt longer than the context, option out of range), or a step
// failed (not enough memory, an error in the engine, logits that are not finite).
struct GenerationError : TideError {
  using TideError::TideError;
};

// What a request asks of its text (a grammar, biases, penalties, a processor) leaves no next token.
struct ConstraintError : GenerationError {
  using GenerationError::GenerationError;
};

// A scheduler's queue is full.
struct QueueFullError : GenerationError {
  using GenerationError::GenerationError;
};

// The provider cannot run the bundle here: ONNX Runtime or TensorRT is missing or of the wrong version, the bundle has
// no engines for it, or there is no GPU of the kind that they were built for.
struct ProviderError : TideError {
  using TideError::TideError;
};

}  // namespace tide
