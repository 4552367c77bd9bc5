// The functions of tide.h that step sequences and batches by hand, and that replay drafting.
#include "capi/objects.h"
#include "capi/options.h"
#include "decoding/replay.h"
#include "decoding/sampling.h"
#include "request.h"

using namespace tide::capi;

namespace {

tide_step step_of(tide::StepResult const& result) {
  return {result.logits, result.rows, result.vocabulary, result.exit_layer, result.segments_run, result.scores};
}

void put_lengths(std::vector<std::int64_t> const& all, std::int64_t* lengths) {
  std::copy(all.begin(), all.end(), lengths);
}

std::optional<std::int64_t> given(std::int64_t max_pending) {
  return max_pending == -1 ? std::nullopt : std::optional(max_pending);
}

std::optional<std::string> named(char const* adapter) {
  return adapter == nullptr ? std::nullopt : std::optional<std::string>(adapter);
}

}  // namespace

tide_status tide_sequence_create(tide_engine const* engine, double const* thresholds, std::size_t count,
                                 std::int64_t max_pending, char const* adapter, tide_sequence** sequence) {
  return create(sequence, [&] {
    return tide_sequence{engine->engine.start(vector_of(thresholds, count), given(max_pending), named(adapter))};
  });
}

tide_status tide_sequence_step(tide_sequence* sequence, std::int64_t const* ids, std::size_t count,
                               std::int64_t logits_to_keep, int full, tide_step* result) {
  return alone(sequence, [&] { *result = step_of(sequence->state.step(ids, count, logits_to_keep, full != 0)); });
}

tide_status tide_sequence_rewind(tide_sequence* sequence, std::int64_t length) {
  return alone(sequence, [&] { sequence->state.rewind(length); });
}

tide_status tide_sequence_set_thresholds(tide_sequence* sequence, double const* thresholds, std::size_t count) {
  return alone(sequence, [&] { sequence->state.set_thresholds(vector_of(thresholds, count)); });
}

tide_status tide_sequence_lengths(tide_sequence const* sequence, std::int64_t* lengths) {
  return alone(sequence, [&] { put_lengths(sequence->state.lengths(), lengths); });
}

void tide_sequence_free(tide_sequence* sequence) { delete sequence; }

tide_status tide_sample(char const* options, std::int64_t position, float const* logits, std::size_t vocabulary,
                        std::int64_t* token) {
  return guarded([&] {
    tide::GenerationConfig const config = tide::generation_config(options, nullptr);
    std::optional<std::int64_t> seed;
    if (config.seed) seed = config.seed->values(1).front();
    tide::Sampler sampler(config, seed);
    sampler.rewind(static_cast<std::size_t>(tide::whole_number("position", position, 0)));
    tide::StepResult result;
    result.logits = logits;
    result.rows = 1;
    result.vocabulary = vocabulary;
    *token = sampler(result, 0).id;
  });
}

tide_status tide_batch_create(tide_engine const* engine, double compaction_threshold, std::int64_t slots,
                              tide_batch** batch) {
  return create(batch, [&] { return tide_batch{engine->engine.start_batch(compaction_threshold, slots)}; });
}

std::size_t tide_batch_free_slots(tide_batch const* batch) { return batch->batch.free_slots(); }

tide_status tide_batch_join(tide_batch* batch, double const* thresholds, std::size_t count, std::int64_t max_pending,
                            char const* adapter, std::size_t* slot) {
  return alone(batch, [&] { *slot = batch->batch.join(vector_of(thresholds, count), max_pending, named(adapter)); });
}

tide_status tide_batch_leave(tide_batch* batch, std::size_t slot) {
  return alone(batch, [&] { batch->batch.leave(slot); });
}

tide_status tide_batch_step(tide_batch* batch, tide_slot_step const* parts, std::size_t count, tide_step* results) {
  return alone(batch, [&] {
    std::vector<tide::SlotStep> steps;
    for (std::size_t i = 0; i < count; ++i) {
      tide_slot_step const& part = parts[i];
      std::optional<std::int64_t> keep;
      if (part.logits_to_keep != 0) keep = part.logits_to_keep;
      steps.push_back({part.slot, vector_of(part.ids, part.count), keep, part.full != 0});
    }
    std::vector<tide::StepResult> const made = batch->batch.step(steps);
    std::transform(made.begin(), made.end(), results, step_of);
  });
}

tide_status tide_batch_rewind(tide_batch* batch, std::size_t slot, std::int64_t length) {
  return alone(batch, [&] { batch->batch.rewind(slot, length); });
}

tide_status tide_batch_lengths(tide_batch const* batch, std::size_t slot, std::int64_t* lengths) {
  return alone(batch, [&] { put_lengths(batch->batch.lengths(slot), lengths); });
}

void tide_batch_free(tide_batch* batch) { delete batch; }

tide_status tide_replay(char const* drafting, std::int64_t const* prompt, std::size_t count, float const* scores,
                        std::int64_t const* early, std::int64_t const* full, std::size_t positions,
                        std::size_t checkpoints, std::int64_t* counts, std::int64_t* exits, std::int64_t* runs) {
  return guarded([&] {
    tide::Drafting const given = tide::drafting_options(drafting);
    tide::check_drafting(given, checkpoints);
    if (given.thresholds.size() != checkpoints) {
      throw tide::GenerationError("drafting.thresholds must have one value per checkpoint");
    }
    tide::DraftLimits limits(given);
    limits.costs = tide::given_costs(given);
    tide::Recording const recording{vector_of(prompt, count), checkpoints, scores, early, full, positions};
    tide::Replayed const replayed = tide::replay(recording, limits);
    tide::DraftCounts::Of const& of_exits = replayed.counts.of(tide::DraftSource::exit);
    tide::DraftCounts::Of const& lookup = replayed.counts.of(tide::DraftSource::lookup);
    counts[0] = of_exits.drafted + lookup.drafted;
    counts[1] = of_exits.accepted + lookup.accepted;
    counts[2] = lookup.drafted;
    counts[3] = lookup.accepted;
    put_lengths(replayed.exits, exits);
    for (std::size_t i = 0; i < replayed.runs.size(); ++i) {
      runs[2 * i] = replayed.runs[i].first;
      runs[2 * i + 1] = replayed.runs[i].second;
    }
  });
}
