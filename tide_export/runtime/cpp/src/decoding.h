// How tokens are made out of steps. `OneByOne` makes one of every step; `LosslessDecoder` drafts and verifies.
#pragma once

#include <optional>
#include <set>
#include <vector>

#include "lookup.h"
#include "tide/runtime.h"

namespace tide {

class Sampler;
struct Choices;

// How far a decoder may draft; the defaults are for bundles that do not say.
struct DraftLimits {
  std::int64_t max_drafts = 6;   // early exits that may wait for one verification; 0 never drafts by exits
  std::int64_t lookup = 8;       // tokens of one guess from the text; 0 never looks up
  std::int64_t least_match = 2;  // tokens that must have stood there before
};

// Chooses the tokens of one sequence.
class Decoder {
 public:
  virtual ~Decoder() = default;

  // Runs steps and returns the next 1 to `most` tokens behind `ids`, which the sequence has not seen: the prompt, or
  // the last token given.
  virtual std::vector<Token> block(std::vector<std::int64_t> const& ids, std::int64_t most) = 0;

  std::int64_t drafted = 0, accepted = 0;            // drafts made, drafts that stood
  std::int64_t looked_up = 0, lookups_accepted = 0;  // those of them that came from the text
  std::int64_t undone = 0;                           // positions that every layer computed and that were then forgotten
};

// Of an empty sequence, which takes no steps but the decoder's. Without `limits` every step gives a token; with them,
// `state` must have no limit of what waits.
std::unique_ptr<Decoder> make_decoder(Manifest const& manifest, State& state, Sampler& sampler,
                                      std::optional<DraftLimits> const& limits, std::set<std::int64_t> const& stops);

}  // namespace tide
