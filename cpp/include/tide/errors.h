// Declares the runtime's exceptions: one class per stage, named as in the Python package's tide_export/errors.py.
#pragma once

#include <stdexcept>

namespace tide {

// Base of every error that a user can cause or fix; the text is one sentence that names the file or option. Any call may
// also throw std::bad_alloc; an engine and its states are then unchanged.
struct TideError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An option of `Engine::load` is out of range.
struct ConfigError : TideError {
  using TideError::TideError;
};

// A bundle is missing, damaged or written by an incompatible release.
struct BundleError : TideError {
  using TideError::TideError;
};

// A generation request is invalid (an empty prompt, a prompt longer than the context, an option out of range), or a step
// failed (too little memory, an error in the engine, logits that are not finite).
struct GenerationError : TideError {
  using TideError::TideError;
};

// The constraints of a request (a grammar, biases, penalties, a processor) leave no next token.
struct ConstraintError : GenerationError {
  using GenerationError::GenerationError;
};

// A scheduler's queue is full.
struct QueueFullError : GenerationError {
  using GenerationError::GenerationError;
};

// The provider cannot run the bundle here: ONNX Runtime or TensorRT is missing or of the wrong version, the bundle has
// no plans for it, or there is no GPU for which they were built.
struct ProviderError : TideError {
  using TideError::TideError;
};

}  // namespace tide
