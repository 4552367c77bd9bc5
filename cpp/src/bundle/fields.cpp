#include "bundle/fields.h"

#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::size_t kShown = 60;  // characters of a value or name in a message

Json const kNull;

}  // namespace

std::string shown_name(std::string const& name) {
  std::string const quoted = json_text(name);
  return quoted.substr(1, quoted.size() - 2).substr(0, kShown);
}

void Field::refuse(std::string const& rule) const { throw BundleError(source_ + ": field '" + where_ + "' " + rule); }

std::int64_t Field::whole(std::int64_t least) const {
  if (!value_.is(Json::Kind::whole)) wrong("a whole number");
  require(value_.whole >= least, "must be " + std::to_string(least) + " or more");
  return value_.whole;
}

double Field::real() const {
  if (!value_.is(Json::Kind::whole) && !value_.is(Json::Kind::real)) wrong("a number");
  return value_.real;
}

std::string Field::text() const {
  if (!value_.is(Json::Kind::text)) wrong("a string");
  return value_.text;
}

bool Field::boolean() const {
  if (!value_.is(Json::Kind::boolean)) wrong("true or false");
  return value_.boolean;
}

std::vector<std::int64_t> Field::wholes(std::int64_t least) const {
  return list<std::int64_t>([&](Field const& entry) { return entry.whole(least); });
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

Field Field::operator[](std::string const& name) const {
  Json const* const value = value_of(name);
  if (value == nullptr) at(name, kNull).refuse("is missing");
  return at(name, *value);
}

std::optional<Field> Field::find(std::string const& name) const {
  Json const* const value = value_of(name);
  if (value == nullptr || value->is(Json::Kind::null)) return std::nullopt;
  return at(name, *value);
}

std::vector<std::pair<std::string, Field>> Field::entries() const {
  if (!value_.is(Json::Kind::object)) wrong("an object");
  std::vector<std::pair<std::string, Field>> fields;
  for (auto const& [name, entry] : value_.object) fields.emplace_back(name, at(name, entry));
  return fields;
}

std::size_t Field::size() const {
  if (!value_.is(Json::Kind::list)) wrong("a list");
  return value_.list.size();
}

Json const* Field::value_of(std::string const& name) const {
  if (!value_.is(Json::Kind::object)) wrong("an object");
  auto const found = value_.object.find(name);
  return found == value_.object.end() ? nullptr : &found->second;
}

Field Field::at(std::string const& name, Json const& value) const {
  return Field(value, source_, (where_.empty() ? "" : where_ + ".") + shown_name(name));
}

void Field::wrong(std::string const& expected) const {
  refuse("must be " + expected + ", not " + value_.shown().substr(0, kShown));
}

}  // namespace tide
