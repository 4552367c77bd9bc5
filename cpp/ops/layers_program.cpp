#include "layers_program.h"

#include <algorithm>
#include <locale>
#include <sstream>
#include <stdexcept>

namespace tide_ops {
namespace {

// Numbers are written as in C, whatever the program's locale is.
std::istringstream stream_of(std::string const& text) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  return stream;
}

template <typename T>
T read(std::map<std::string, std::string> const& values, char const* name, T value) {
  auto const found = values.find(name);
  if (found != values.end() && !(stream_of(found->second) >> value)) throw std::invalid_argument(found->second);
  return value;
}

std::int64_t width_of(std::string const& word) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  std::int64_t width = 0;
  if (!(stream_of(word) >> width) || width < 1 || width > kMost) throw std::invalid_argument(word);
  return width;
}

Operand operand_of(std::string const& word) {
  constexpr std::size_t kMostDigits = 5;
  if (word == "-") return {Operand::kAbsent, 0};
  bool const known = word.find_first_of("iwos") == 0 && word.size() > 1 && word.size() <= 1 + kMostDigits;
  if (!known || word.find_first_not_of("0123456789", 1) != std::string::npos) throw std::invalid_argument(word);
  return {static_cast<Operand::Kind>(word[0]), std::stoul(word.substr(1))};
}

// Notes what the program reads and makes of the operator's tensors.
void note(Operand const& operand, std::string const& word, Program& program) {
  if (operand.kind == Operand::kHidden && operand.index >= program.widths.size()) throw std::invalid_argument(word);
  if (operand.kind == Operand::kOutput) program.outputs = std::max(program.outputs, operand.index + 1);
  if (operand.kind != Operand::kInput && operand.kind != Operand::kWeight) return;
  std::vector<bool>& read = operand.kind == Operand::kInput ? program.inputs : program.weights;
  if (read.size() <= operand.index) read.resize(operand.index + 1);
  read[operand.index] = true;
}

Line line_of(std::string name, std::istringstream& words, Program& program) {
  Line line;
  line.name = std::move(name);
  std::vector<Operand>* operands = &line.outputs;
  for (std::string word; words >> word;) {
    if (word == "=") {
      operands = &line.inputs;
    } else if (word.find('=') != std::string::npos) {
      line.attributes.add(word);
    } else {
      operands->push_back(operand_of(word));
      note(operands->back(), word, program);
    }
  }
  return line;
}

}  // namespace

void WrittenAttributes::add(std::string const& word) {
  std::size_t const equals = word.find('=');
  values_[word.substr(0, equals)] = word.substr(equals + 1);
}

std::int64_t WrittenAttributes::integer(char const* name, std::int64_t otherwise) const {
  return read(values_, name, otherwise);
}

float WrittenAttributes::number(char const* name, float otherwise) const { return read(values_, name, otherwise); }

std::string WrittenAttributes::text(char const* name) const { return read(values_, name, std::string()); }

Program program_of(std::string const& text) {
  Program program;
  std::istringstream lines(text);
  for (std::string written; std::getline(lines, written);) {
    std::istringstream words = stream_of(written);
    std::string name;
    words >> name;
    if (name == "slots") {
      for (std::string word; words >> word;) program.widths.push_back(width_of(word));
    } else {
      program.lines.push_back(line_of(name, words, program));
    }
  }
  return program;
}

}  // namespace tide_ops
