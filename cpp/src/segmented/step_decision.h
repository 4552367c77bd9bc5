// Decides on a GPU which segments a step runs, by the rules of `walk_segments`, for one slot at a time.
//
// `step_kernel.cu` calls these functions in a thread per slot; tests call them on the host. After each segment, each slot
// either exits or continues, the slots that need the next segment are counted, and each is scheduled or made padding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decoding/depth_rule.h"

namespace tide {

constexpr float kNever = 2.0F, kSure = 1.0F;  // thresholds: no score is above either

// What the host says of a step, and of its slots.
struct Sharing {
  double compaction_threshold;
  std::int32_t everyone;    // slots with new tokens
  std::int32_t cumulative;  // whether scores are (`cumulative_score`)
};
struct SlotRule {
  std::int64_t max_pending;
  std::int32_t requested;  // 0: the slot is padding
  std::int32_t verifies;
};
// A row of the exit states that the head runs over: one of two.
struct RowChoice {
  std::int64_t exited, final;
  std::int64_t slot;
};

// What the device finds out of a slot.
struct Outcome {
  std::int32_t exit;          // the segment after which it exits; -1: none
  std::int32_t segments_run;  // segments 0 .. segments_run - 1 ran over it
  std::int32_t scheduled;     // whether the segment that ran last was to run over it
  float share;                // its score so far, where scores are cumulative
};

// Where it all is, in the device's memory. Arrays by segment have `pitch` elements for each.
struct DecisionArguments {
  Sharing const* share;
  SlotRule const* rules;
  std::int64_t const* counts;     // by segment and slot: tokens of a run
  float const* thresholds;        // by segment and slot
  float const* scores;             // by segment and slot, of its last run, as the next
  std::int32_t const* exit_flags;
  RowChoice const* choices;
  Outcome* outcomes;
  std::int64_t* last_tokens;  // by segment and slot; inputs of the networks, as the next
  float* run_thresholds;
  std::int64_t* rows;  // the head's
  std::int32_t slots, segments, pitch, num_rows;
};

// Takes note of segment `next - 1`, which may have run over a slot; returns whether the slot needs the next one.
constexpr bool settle(DecisionArguments const& step, std::int32_t next, std::int32_t slot) {
  Outcome& outcome = step.outcomes[slot];
  if (outcome.scheduled == 0) return false;
  outcome.segments_run = next;
  if (next == step.segments) return false;
  std::int32_t const ran = (next - 1) * step.pitch + slot;
  if (outcome.exit < 0 && step.exit_flags[ran] != 0) outcome.exit = next - 1;
  if (step.share->cumulative != 0) outcome.share = cumulative_score(outcome.share, step.scores[ran]);
  return is_active(outcome.exit >= 0, step.counts[next * step.pitch + slot], step.rules[slot].max_pending);
}

// Lets the next segment run over a slot, or makes it padding. active, ran: how many slots need it, and ran the segment
// before. Returns the power of two to which the slot's tokens are padded; 0: it is padding.
constexpr std::uint32_t schedule(DecisionArguments const& step, std::int32_t next, std::int32_t slot, bool needs,
                                 std::int32_t active, std::int32_t ran) {
  Sharing const& share = *step.share;
  bool const all = active > 0 && all_catch_up(static_cast<std::size_t>(active), static_cast<std::size_t>(share.everyone),
                                              ran == share.everyone, share.compaction_threshold);
  bool const scheduled = all ? step.rules[slot].requested != 0 : needs;
  std::int32_t const place = next * step.pitch + slot;
  step.outcomes[slot].scheduled = scheduled ? 1 : 0;
  step.last_tokens[place] = scheduled ? step.counts[place] - 1 : 0;
  bool const may_exit = scheduled && step.outcomes[slot].exit < 0;
  step.run_thresholds[place] = may_exit ? threshold_of_rest(step.thresholds[place], step.outcomes[slot].share) : kNever;
  std::uint32_t padded = scheduled ? 1 : 0;
  while (scheduled && padded < static_cast<std::uint64_t>(step.counts[place])) padded *= 2;
  return padded;
}

// Chooses a row for the head.
constexpr void choose_row(DecisionArguments const& step, std::int32_t row) {
  RowChoice const& choice = step.choices[row];
  Outcome const& outcome = step.outcomes[choice.slot];
  step.rows[row] = outcome.exit >= 0 && at_its_exit(step.rules[choice.slot].verifies != 0,
                                                    outcome.segments_run == step.segments)
                       ? choice.exited
                       : choice.final;
}

}  // namespace tide
