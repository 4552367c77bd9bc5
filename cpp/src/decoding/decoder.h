// How tokens are made out of steps, apart from who runs the steps: `run_block` on a sequence of its own, a batch
// (`batch/generate`) for all its decoders at once. `OneByOne` makes a token of every step; `LosslessDecoder` drafts and
// verifies.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "decoding/prompt_lookup.h"
#include "decoding/sampling.h"
#include "tide/runtime.h"

namespace tide {

// How far a decoder may draft; the defaults are for bundles that do not say.
struct DraftLimits {
  std::int64_t max_drafts = 6;   // early exits that may wait for one verification; 0 never drafts by exits
  std::int64_t prompt_lookup = 8;       // tokens of one guess from the text; 0 never looks up
  std::int64_t min_match = 2;  // tokens that must have stood there before
};

// A step that a decoder asks for: the arguments of `State::step`.
struct StepRequest {
  std::vector<std::int64_t> ids;
  std::int64_t logits_to_keep = 1;
  bool full = false;
};

// Chooses the tokens of one sequence, which is empty at first and takes no steps but those that are asked for here.
class Decoder {
 public:
  virtual ~Decoder() = default;

  // Begins the next 1 to `most` tokens behind `ids`, which the sequence has not seen: the prompt, or the last token
  // given.
  virtual void begin(std::vector<std::int64_t> const& ids, std::int64_t most) = 0;

  // The step that is to be run next.
  StepRequest const& request() const { return request_; }

  // Goes on with its result. The tokens; none while another step is asked for.
  virtual std::vector<Token> take(StepResult const& result) = 0;

  // Tokens the sequence is to have once there are tokens: it is rewound to that, for drafts that fell are forgotten.
  std::int64_t length() const { return length_; }

  // Whether a step that comes to the last segment must give the logits of full depth, also where the token could have
  // left before and only came along with others.
  virtual bool verifies() const { return false; }

  std::int64_t drafted = 0, accepted = 0;            // drafts made, drafts that stood
  std::int64_t lookup_drafted = 0, lookup_accepted = 0;  // those of them that came from the text
  std::int64_t undone = 0;                           // positions that every layer computed and that were then forgotten

 protected:
  StepRequest request_;
  std::int64_t length_ = 0;
};

// Without `limits` every step gives a token. With them, nothing but `full` may force a token of the sequence through
// the last segment: where it comes along with other sequences' tokens it is verified there and then, which gives the
// same greedy tokens, but other drawn ones.
std::unique_ptr<Decoder> make_decoder(Manifest const& manifest, Sampler sampler,
                                      std::optional<DraftLimits> const& limits, std::set<std::int64_t> const& stops);

// The tokens of the block that was begun, whose steps `state` runs one after the other.
std::vector<Token> run_block(Decoder& decoder, State& state);

}  // namespace tide
