// The program of TideLayers: its attribute `nodes`, parsed. tide_export/lower/onnxruntime/layers_text.py writes it, as
// text that one can read:
//
//   slots 576 1536
//   RMSNormalization s0 = i0 w5 epsilon=1e-05
//   TideInt4MatMul s1 = s0 w6 w7
//   SkipSimplifiedLayerNormalization s0 - - o1 = i0 s1 w8 epsilon=1e-05
//
// The first line has the widths of hidden states: how many floats each holds for a token. Each other line is a node, in the
// order in which they run: its operator, its outputs, "=", its inputs, and what it says about itself as name=value; all
// are words, with a space between them. A tensor is a letter and a number:
//
//   i0  the operator's input 0
//   w5  its input 5, which never changes: a weight
//   o1  its output 1, which nodes after the one that makes it may read
//   s0  hidden states 0, [1, N, ..] of N tokens: memory between nodes, of the width that the first line gives it. A node may
//       make it again, of another shape, once what it held is read no more
//   -   an input that is absent, or an output that nothing reads
//
// N is that of input 0, [1, N, ..].
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "node.h"

namespace tide_ops {

struct Operand {
  enum Kind : char { kInput = 'i', kWeight = 'w', kOutput = 'o', kHidden = 's', kAbsent = '-' };

  Kind kind;
  std::size_t index;
};

// What a line says after its operands.
class WrittenAttributes : public Attributes {
 public:
  // `word`: name=value.
  void add(std::string const& word);

  std::int64_t integer(char const* name, std::int64_t otherwise) const override;
  float number(char const* name, float otherwise) const override;
  std::string text(char const* name) const override;

 private:
  std::map<std::string, std::string> values_;
};

struct Line {
  std::string name;  // of the operator
  std::vector<Operand> outputs, inputs;
  WrittenAttributes attributes;
};

struct Program {
  std::vector<std::int64_t> widths;  // of hidden states
  std::vector<Line> lines;
  std::vector<bool> inputs, weights;  // which inputs of the operator they read
  std::size_t outputs = 0;            // of the operator
};

// Throws std::invalid_argument, of the word that it cannot read.
Program program_of(std::string const& text);

}  // namespace tide_ops
