// The functions that a test gives to `GenerationConfig`, which tests/cpp/hooks.py has in Python too.
#pragma once

#include <string>
#include <vector>

#include "options.h"

// As `parse`; knows in addition `--processor NAME`, `--detokenizer NAME` (of which "bundle" is `tokenizer`),
// `--stop-hex TEXT`, and `--regex-hex REGEX` with `--regex-bundle FOLDER`, a grammar.
Options parse_with_hooks(std::vector<std::string> words, tide::Engine const& engine,
                         std::optional<tide::Tokenizer> const& tokenizer = std::nullopt);

// The text of a hexadecimal word; "-" is "".
std::string from_hex(std::string const& word);
