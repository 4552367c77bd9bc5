// Reads JSON fields: those that are asked for must be there and of their type; others are ignored.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bundle/json.h"

namespace tide {

// A key for a message: printable ASCII, cut off.
std::string shown_name(std::string const& name);

// One value of the file, with its location for messages. All functions throw BundleError.
class Field {
 public:
  // `value` must outlive the field.
  Field(Json const& value, std::string source, std::string where)
      : value_(value), source_(std::move(source)), where_(std::move(where)) {}

  bool is_null() const { return value_.is(Json::Kind::null); }
  bool is_list() const { return value_.is(Json::Kind::list); }
  [[noreturn]] void refuse(std::string const& rule) const;
  void require(bool holds, std::string const& rule) const {
    if (!holds) refuse(rule);
  }

  std::int64_t whole(std::int64_t least = std::numeric_limits<std::int64_t>::min()) const;
  double real() const;
  std::string text() const;
  bool boolean() const;

  template <typename T>
  std::vector<T> list(std::function<T(Field const&)> const& entry) const {
    std::vector<T> values;
    for (std::size_t i = 0; i < size(); ++i) {
      values.push_back(entry(Field(value_.list[i], source_, where_ + "." + std::to_string(i))));
    }
    return values;
  }
  std::vector<std::int64_t> wholes(std::int64_t least = std::numeric_limits<std::int64_t>::min()) const;
  std::vector<double> reals() const;
  std::vector<std::string> texts() const;
  std::pair<std::int64_t, std::int64_t> two_wholes() const;

  // The fields of an object, by name.
  std::vector<std::pair<std::string, Field>> entries() const;

  // A field of an object, which must have it.
  Field operator[](std::string const& name) const;

  // None where it is missing or null.
  std::optional<Field> find(std::string const& name) const;

 private:
  std::size_t size() const;  // of a list
  Field at(std::string const& name, Json const& value) const;
  Json const* value_of(std::string const& name) const;  // of a field of an object; null: there is none
  [[noreturn]] void wrong(std::string const& expected) const;

  Json const& value_;
  std::string source_, where_;
};

}  // namespace tide
