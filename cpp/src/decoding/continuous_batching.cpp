#include "decoding/continuous_batching.h"

#include <chrono>
#include <map>

#include "generation_error.h"
#include "packed/propagate.h"
#include "tide/errors.h"

namespace tide {
namespace {

// New tokens of a step, unless a single prompt is longer: bounds memory and latency.
constexpr std::size_t kMaxStepTokens = 2048;

// A sequence in a slot.
struct Active {
  std::size_t number;    // of its prompt
  double seconds = 0.0;  // that the steps of its block took so far
};

}  // namespace

std::unique_ptr<PackedBatch> empty_batch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest,
                                         Request const& request) {
  return or_generation_error("cannot start a batch", [&]() -> std::unique_ptr<PackedBatch> {
    if (manifest.propagates()) {
      return std::make_unique<PropagatingBatch>(std::move(sessions), manifest, request.thresholds);
    }
    return std::make_unique<PackedBatch>(std::move(sessions), manifest, request.thresholds, request.max_pending,
                                         request.compaction_threshold);
  });
}

void generate_batch(PackedBatch& batch, std::vector<Progress>& progress,
                    std::vector<std::unique_ptr<Decoder>>& decoders,
                    std::function<bool(std::size_t, Token const&)> const& on_token) {
  std::map<std::size_t, Active> active;  // by slot
  std::size_t next = 0;
  while (next < progress.size() || !active.empty()) {
    std::size_t tokens = 0;
    for (auto const& [slot, one] : active) tokens += decoders[one.number]->request().ids.size();
    while (next < progress.size() && batch.free_slots() > 0) {
      std::size_t const prompt = progress[next].next_ids().size();
      if (tokens > 0 && tokens + prompt > kMaxStepTokens) break;
      tokens += prompt;
      progress[next].begin(*decoders[next]);
      active[batch.join()] = {next++};
    }
    std::vector<SlotRequest> requests;
    for (auto const& [slot, one] : active) {
      requests.push_back({slot, decoders[one.number]->request(), decoders[one.number]->verifies()});
    }
    auto const started = std::chrono::steady_clock::now();
    std::vector<StepResult> const results = batch.step(requests);
    std::chrono::duration<double> const seconds = std::chrono::steady_clock::now() - started;
    auto result = results.begin();
    for (auto at = active.begin(); at != active.end();) {
      auto const current = at++;
      auto& [slot, one] = *current;
      Decoder& decoder = *decoders[one.number];
      PackedSequence& sequence = batch.sequence(slot);
      one.seconds += seconds.count();
      std::vector<Token> const block = decoder.take(*result++);
      if (block.empty()) continue;  // another step is requested
      if (sequence.length() > decoder.length()) sequence.rewind(decoder.length());
      Progress& generation = progress[one.number];
      std::function<bool(Token const&)> callback;
      if (on_token) callback = [&, number = one.number](Token const& token) { return on_token(number, token); };
      generation.take(block, decoder, sequence.computed(), one.seconds, callback);
      one.seconds = 0;
      if (!generation.ended()) {
        generation.begin(decoder);
        continue;
      }
      decoders[one.number].reset();
      batch.leave(slot);
      active.erase(current);
    }
  }
}

}  // namespace tide
