// Converts the exceptions of a generation to a GenerationError of one sentence.
#pragma once

#include <new>
#include <string>

#include "formatting.h"
#include "tide/errors.h"

namespace tide {

// Returns what `work` returns. Throws GenerationError, which begins with `failed`, in place of an exception that is no
// TideError: of ONNX Runtime, or std::bad_alloc.
template <typename F>
auto or_generation_error(char const* failed, F const& work) -> decltype(work()) {
  try {
    return work();
  } catch (TideError const&) {
    throw;
  } catch (std::bad_alloc const&) {
    throw GenerationError(std::string(failed) + ": not enough memory");
  } catch (std::exception const& error) {
    throw GenerationError(std::string(failed) + ": " + first_line(error));
  }
}

}  // namespace tide
