// Reads JSON fields strictly: each must be present and of its type. Accepts and refuses the same texts as
// tide_export/bundle/strict_json.py, in the same order and with the same messages.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
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
  bool has(std::string const& name) const { return value_.object.count(name) == 1; }
  [[noreturn]] void refuse(std::string const& rule) const;

  std::int64_t whole() const;
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
  std::vector<std::int64_t> wholes() const;
  std::vector<double> reals() const;
  std::vector<std::string> texts() const;
  std::pair<std::int64_t, std::int64_t> two_wholes() const;
  void whole_or_text() const;

  // This value, checked to be an object with these fields and no others; those in `omitted` may be missing.
  Field const& object(std::vector<std::string> const& fields, std::set<std::string> const& omitted = {}) const;

  // The fields of an object that may have any, by name.
  std::vector<std::pair<std::string, Field>> entries() const;

  Field operator[](std::string const& name) const { return at(name, value_.object.at(name)); }

 private:
  std::size_t size() const;  // of a list
  Field at(std::string const& name, Json const& value) const;
  [[noreturn]] void wrong(std::string const& expected) const;

  Json const& value_;
  std::string source_, where_;
};

}  // namespace tide
