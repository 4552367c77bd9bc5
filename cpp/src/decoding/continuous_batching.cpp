#include "decoding/continuous_batching.h"

#include <chrono>
#include <map>

#include "packed/propagate.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

// New tokens a step takes at most, but for a single longer prompt: bounds memory and waiting.
constexpr std::size_t kPromptTokens = 2048;

// A sequence while it has a place.
struct Placed {
  std::size_t number;    // of its prompt
  double seconds = 0.0;  // that the steps of its block took so far
};

}  // namespace

std::unique_ptr<Batch> empty_batch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest,
                                   std::vector<double> const& thresholds, std::int64_t max_pending,
                                   double compaction_threshold) {
  try {
    if (manifest.propagates()) return std::make_unique<PropagatingBatch>(std::move(sessions), manifest, thresholds);
    return std::make_unique<Batch>(std::move(sessions), manifest, thresholds, max_pending, compaction_threshold);
  } catch (std::exception const& error) {  // ONNX Runtime's, or no memory
    throw GenerationError("cannot start a batch: " + first_line(error));
  }
}

void generate_batch(Batch& batch, std::vector<Progress>& progress, std::vector<std::unique_ptr<Decoder>>& decoders,
                    std::function<bool(std::size_t, Token const&)> const& on_token) {
  std::map<std::size_t, Placed> running;  // by place
  std::size_t next = 0;
  while (next < progress.size() || !running.empty()) {
    std::size_t load = 0;
    for (auto const& [place, one] : running) load += decoders[one.number]->request().ids.size();
    while (next < progress.size() && batch.free() > 0) {
      std::size_t const prompt = progress[next].next_ids().size();
      if (load > 0 && load + prompt > kPromptTokens) break;
      load += prompt;
      progress[next].begin(*decoders[next]);
      running[batch.join()] = {next++};
    }
    std::vector<Wanted> wanted;
    for (auto const& [place, one] : running) {
      wanted.push_back({place, decoders[one.number]->request(), decoders[one.number]->verifies()});
    }
    auto const started = std::chrono::steady_clock::now();
    std::vector<StepResult> const results = batch.step(wanted);
    std::chrono::duration<double> const seconds = std::chrono::steady_clock::now() - started;
    auto result = results.begin();
    for (auto at = running.begin(); at != running.end();) {
      auto const current = at++;
      auto& [place, one] = *current;
      Decoder& decoder = *decoders[one.number];
      Row& row = batch.row(place);
      one.seconds += seconds.count();
      std::vector<Token> const tokens = decoder.take(*result++);
      if (tokens.empty()) continue;  // it asks for another step
      if (row.length() > decoder.length()) row.rewind(decoder.length());
      Progress& own = progress[one.number];
      std::function<bool(Token const&)> hand_out;
      if (on_token) hand_out = [&, number = one.number](Token const& token) { return on_token(number, token); };
      own.take(tokens, decoder, row.computed(), one.seconds, hand_out);
      one.seconds = 0;
      if (!own.ended()) {
        own.begin(decoder);
        continue;
      }
      decoders[one.number].reset();
      batch.leave(place);
      running.erase(current);
    }
  }
}

}  // namespace tide
