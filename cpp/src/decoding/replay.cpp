#include "decoding/replay.h"

#include <numeric>

#include "decoding/sampling.h"
#include "decoding/shared_drafting.h"

namespace tide {

Replayed replay(Recording const& recording, DraftLimits const& limits) {
  std::vector<std::int64_t> depths(recording.checkpoints + 1);
  std::iota(depths.begin(), depths.end(), std::int64_t{1});  // as if checkpoints lay equally far apart
  auto const decoder = make_lossless_decoder(depths, std::nullopt, Sampler(GenerationConfig(), std::nullopt), limits, {},
                                             std::make_shared<SharedDrafting>(nullptr, 0));
  Replayed replayed;
  replayed.exits.resize(recording.checkpoints);
  std::vector<std::int64_t> ids = recording.prompt;
  auto const before = static_cast<std::int64_t>(recording.prompt.size());
  std::int64_t length = 0;
  for (std::size_t made = 0; made < recording.positions;) {
    decoder->begin(ids, static_cast<std::int64_t>(recording.positions - made));
    std::vector<Token> block;
    while (block.empty()) {
      StepRequest const& step = decoder->request();
      auto const count = static_cast<std::int64_t>(step.ids.size());
      length += count;
      auto const last = static_cast<std::size_t>(length - before);
      float const* const scores = recording.scores + last * recording.checkpoints;
      std::size_t left = step.full ? recording.checkpoints : 0;
      while (left < recording.checkpoints && !(scores[left] > step.thresholds[left])) ++left;
      std::vector<Candidates> choices;  // of which there is one at each position
      if (left < recording.checkpoints) {
        ++replayed.exits[left];
        choices.push_back({{recording.early[last * recording.checkpoints + left]}, {0}});
      } else {
        if (last > 0) replayed.runs.emplace_back(step.logits_to_keep - count, count);
        for (auto at = last + 1 - static_cast<std::size_t>(step.logits_to_keep); at <= last; ++at) {
          choices.push_back({{recording.full[at]}, {0}});
        }
      }
      StepResult result;
      result.rows = choices.size();
      result.candidates = choices.data();
      result.scores = scores;
      result.exit_layer = result.segments_run = static_cast<std::int64_t>(left) + 1;
      block = decoder->take(result);
    }
    length = decoder->length();
    made += block.size();
    ids = {block.back().id};
  }
  replayed.counts = decoder->counts();
  return replayed;
}

}  // namespace tide
