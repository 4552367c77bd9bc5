// What the library exports of the operators, for sessions that others open.
#include "operators.h"

extern "C" __attribute__((visibility("default"))) tide_ops::abi::Status* RegisterCustomOps(
    tide_ops::abi::SessionOptions* options, tide_ops::abi::ApiBase const* base) {
  return tide_ops::register_operators(options, base);
}
