#include "names.h"

namespace tide {
namespace {

// Zero-padded, so that names sort.
std::string two_digits(std::size_t number) { return (number < 10 ? "0" : "") + std::to_string(number); }

}  // namespace

namespace names {

std::string past(std::size_t layer, char const* kind) {
  return "past_key_values." + std::to_string(layer) + "." + kind;
}
std::string present(std::size_t layer, char const* kind) { return "present." + std::to_string(layer) + "." + kind; }
std::string pages(std::size_t layer, char const* kind) { return "pages." + std::to_string(layer) + "." + kind; }
std::string new_pages(std::size_t layer, char const* kind) { return "new_" + pages(layer, kind); }
std::string states(std::int64_t layer, std::int64_t number) {
  return "states." + std::to_string(layer) + "." + std::to_string(number);
}
std::string new_states(std::int64_t layer, std::int64_t number) { return "new_" + states(layer, number); }
std::string segment(std::size_t k) { return "segment_" + two_digits(k); }

}  // namespace names

std::string network_file(std::string const& name) { return "segments/" + name + ".onnx"; }
std::string plan_file(std::string const& name) { return "engines/" + name + ".engine"; }
std::string batch_file(std::string const& name) { return "batch/" + name + ".onnx"; }

}  // namespace tide
