// The functions that a test gives to `GenerationConfig`, which tests/cpp/hooks.py has in Python too.
#pragma once

#include <string>
#include <vector>

#include "options.h"

// As `parse`; knows in addition `--processor NAME`, `--detokenizer NAME` and `--stop-hex TEXT`.
Options parse_with_hooks(std::vector<std::string> words);

// The text of a hexadecimal word; "-" is "".
std::string from_hex(std::string const& word);
