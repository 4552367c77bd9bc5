#include "onnxruntime/external_data.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>

namespace tide {
namespace {

// WireField numbers in onnx.proto.
constexpr std::uint64_t kGraph = 7, kInitializer = 5;
constexpr std::uint64_t kDims = 1, kDataType = 2, kName = 8, kExternalData = 13;
constexpr std::uint64_t kKey = 1, kValue = 2;

// Bytes of an element: float, uint8, int8, uint16, int16, int32, int64, bool, float16, double, uint32, uint64,
// bfloat16, float8e4m3fn.
std::map<int, std::size_t> const kElementSizes = {{1, 4},  {2, 1},  {3, 1},  {4, 2},  {5, 2},  {6, 4},  {7, 8},
                                                  {9, 1}, {10, 2}, {11, 8}, {12, 4}, {13, 8}, {16, 2}, {17, 1}};
constexpr int kInt4 = 22;  // whose elements are packed in pairs

struct NotOnnx : std::runtime_error {
  NotOnnx() : std::runtime_error("no ONNX model") {}
};

// A field is an integer, or the bytes of what is longer.
struct WireField {
  std::uint64_t number = 0, integer = 0;
  bool is_integer = false;
  std::string_view bytes;
};

// Takes a variable-length integer from the front of `message`.
std::uint64_t take_integer(std::string_view& message) {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 70 && !message.empty(); shift += 7) {
    auto const byte = static_cast<unsigned char>(message.front());
    message.remove_prefix(1);
    if (shift < 64) value |= std::uint64_t{byte & 0x7Fu} << shift;
    if (byte < 0x80) return value;
  }
  throw NotOnnx();
}

std::vector<WireField> fields_of(std::string_view message) {
  std::vector<WireField> fields;
  while (!message.empty()) {
    std::uint64_t const tag = take_integer(message), kind = tag & 7;
    WireField field{tag >> 3, 0, kind == 0, {}};
    if (kind == 0) {
      field.integer = take_integer(message);
    } else {
      if (kind != 1 && kind != 2 && kind != 5) throw NotOnnx();
      std::uint64_t const size = kind == 2 ? take_integer(message) : kind == 1 ? 8 : 4;
      if (size > message.size()) throw NotOnnx();
      field.bytes = message.substr(0, static_cast<std::size_t>(size));
      message.remove_prefix(static_cast<std::size_t>(size));
    }
    fields.push_back(field);
  }
  return fields;
}

template <typename Visit>
void for_each(std::vector<WireField> const& fields, std::uint64_t number, bool integers, Visit const& visit) {
  for (WireField const& field : fields) {
    if (field.number != number) continue;
    if (field.is_integer != integers) throw NotOnnx();
    visit(field);
  }
}

std::string text_of(std::vector<WireField> const& fields, std::uint64_t number) {
  std::string text;
  for_each(fields, number, false, [&](WireField const& field) { text = field.bytes; });
  return text;
}

ExternalTensor external_tensor(std::vector<WireField> const& fields) {
  std::map<std::string, std::string> place;
  for_each(fields, kExternalData, false, [&](WireField const& field) {
    std::vector<WireField> const entry = fields_of(field.bytes);
    place[text_of(entry, kKey)] = text_of(entry, kValue);
  });
  ExternalTensor tensor;
  tensor.name = text_of(fields, kName);
  for_each(fields, kDataType, true, [&](WireField const& field) { tensor.type = static_cast<int>(field.integer); });
  for (WireField const& field : fields) {
    if (field.number != kDims) continue;
    if (field.is_integer) tensor.shape.push_back(static_cast<std::int64_t>(field.integer));
    for (std::string_view packed = field.bytes; !packed.empty();) {
      tensor.shape.push_back(static_cast<std::int64_t>(take_integer(packed)));
    }
  }
  tensor.location = place["location"];
  std::string const offset = place.count("offset") == 1 ? place["offset"] : "0";
  bool const digits = !offset.empty() && offset.size() < 20 && std::all_of(offset.begin(), offset.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
  if (!digits) throw NotOnnx();
  tensor.offset = std::stoull(offset);
  return tensor;
}

}  // namespace

std::optional<std::size_t> ExternalTensor::size() const {
  auto const found = kElementSizes.find(type);
  if (found == kElementSizes.end() && type != kInt4) return std::nullopt;
  constexpr std::size_t largest = std::numeric_limits<std::size_t>::max();
  std::size_t size = type == kInt4 ? 1 : found->second;
  for (std::int64_t const dim : shape) {
    auto const count = static_cast<std::size_t>(dim);
    if (dim < 0 || (count > 0 && size > largest / count)) return largest;
    size *= count;
  }
  return type == kInt4 && size < largest ? (size + 1) / 2 : size;
}

std::vector<ExternalTensor> external_tensors(std::string_view model) {
  std::vector<ExternalTensor> tensors;
  try {
    for_each(fields_of(model), kGraph, false, [&](WireField const& graph) {
      for_each(fields_of(graph.bytes), kInitializer, false, [&](WireField const& initializer) {
        std::vector<WireField> const fields = fields_of(initializer.bytes);
        bool const external = std::any_of(fields.begin(), fields.end(),
                                          [](WireField const& field) { return field.number == kExternalData; });
        if (external) tensors.push_back(external_tensor(fields));
      });
    });
  } catch (NotOnnx const&) {
    return {};  // as ONNX Runtime will say
  }
  return tensors;
}

}  // namespace tide
