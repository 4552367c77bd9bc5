#include "bundle/fields.h"

#include <algorithm>
#include <limits>

#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr int kMaxDepth = 100;       // of lists and objects in each other
constexpr std::size_t kShown = 60;   // characters of a value or name in a message

struct TooDeep {};

bool is_above_int64(Json const& value) {
  return value.is_number_unsigned() &&
         value.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()};
}

}  // namespace

std::optional<Json> parse_json(std::string const& text) {
  // The library skips a byte order mark, and takes NUL for the end.
  if (text.rfind("\xEF\xBB\xBF", 0) == 0 || text.find('\0') != std::string::npos) return std::nullopt;
  auto const check_depth = [](int depth, Json::parse_event_t event, Json&) {
    bool const opens = event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
    if (opens && depth >= kMaxDepth) throw TooDeep();
    return true;
  };
  try {
    return Json::parse(text, check_depth);
  } catch (Json::exception const&) {
  } catch (TooDeep const&) {
  }
  return std::nullopt;
}

std::string shown_name(std::string const& name) {
  std::string const quoted = Json(name).dump(-1, ' ', true);
  return quoted.substr(1, quoted.size() - 2).substr(0, kShown);
}

void Field::refuse(std::string const& rule) const { throw BundleError(source_ + ": field '" + where_ + "' " + rule); }

std::int64_t Field::whole() const {
  if (!value_.is_number_integer() || is_above_int64(value_)) wrong("a whole number");
  return value_.get<std::int64_t>();
}

double Field::real() const {
  if (!value_.is_number()) wrong("a number");
  return value_.get<double>();
}

std::string Field::text() const {
  if (!value_.is_string()) wrong("a string");
  return value_.get<std::string>();
}

bool Field::boolean() const {
  if (!value_.is_boolean()) wrong("true or false");
  return value_.get<bool>();
}

std::vector<std::int64_t> Field::wholes() const {
  return list<std::int64_t>([](Field const& entry) { return entry.whole(); });
}

std::vector<double> Field::reals() const {
  return list<double>([](Field const& entry) { return entry.real(); });
}

std::vector<std::string> Field::texts() const {
  return list<std::string>([](Field const& entry) { return entry.text(); });
}

std::pair<std::int64_t, std::int64_t> Field::two_wholes() const {
  if (size() != 2) wrong("a list of 2");
  auto const sizes = wholes();
  return {sizes[0], sizes[1]};
}

void Field::whole_or_text() const {
  if (!value_.is_string()) whole();
}

Field const& Field::object(std::vector<std::string> const& fields, std::set<std::string> const& omitted) const {
  if (!value_.is_object()) wrong("an object");
  for (std::string const& name : fields) {
    if (!value_.contains(name) && omitted.count(name) == 0) at(name, nullptr).refuse("is missing");
  }
  for (auto const& [name, entry] : value_.items()) {
    if (std::find(fields.begin(), fields.end(), name) == fields.end()) at(name, entry).refuse("is unknown");
  }
  return *this;
}

std::vector<std::pair<std::string, Field>> Field::entries() const {
  if (!value_.is_object()) wrong("an object");
  std::vector<std::pair<std::string, Field>> fields;
  for (auto const& [name, entry] : value_.items()) fields.emplace_back(name, at(name, entry));
  return fields;
}

std::size_t Field::size() const {
  if (!value_.is_array()) wrong("a list");
  return value_.size();
}

Field Field::at(std::string const& name, Json const& value) const {
  return Field(value, source_, (where_.empty() ? "" : where_ + ".") + shown_name(name));
}

void Field::wrong(std::string const& expected) const {
  bool const is_real = value_.is_number_float() || is_above_int64(value_);
  std::string const text = value_.is_array()    ? "a list"
                           : value_.is_object() ? "an object"
                           : is_real            ? shown(value_.get<double>())
                                                : value_.dump(-1, ' ', true);
  refuse("must be " + expected + ", not " + text.substr(0, kShown));
}

}  // namespace tide
