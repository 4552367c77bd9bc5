// Holds what all sequences that are decoded together know of drafts.
#pragma once

#include <cstddef>
#include <optional>

#include "decoding/acceptance.h"
#include "decoding/earlier_answers.h"

namespace tide {

struct SharedDrafting {
  // answers: bytes of earlier answers to draft from; 0: none are kept.
  explicit SharedDrafting(std::size_t sequences = 1, std::size_t answer_bytes = 0)
      : exits(sequences), ngrams(sequences), learned(sequences) {
    if (answer_bytes > 0) answers.emplace(answer_bytes);
  }

  Balance exits, ngrams, learned;  // by kind of draft; `ngrams`: of all text
  std::optional<EarlierAnswers> answers;
};

}  // namespace tide
