// What a caller asked for, checked and completed from the manifest before a step is run. All throw GenerationError, in
// a sentence that names the option; they are those of tide_export/runtime/request.py.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bundle/store.h"
#include "decoding/decoder.h"
#include "tide/runtime.h"

namespace tide {

// Throws unless `value` is `least` or more.
std::int64_t whole_number(char const* name, std::int64_t value, std::int64_t least);

// Throws unless `value` is finite.
double real_number(char const* name, double value);

// Throws unless there is one per checkpoint, and a number.
void check_thresholds(Manifest const& manifest, std::vector<double> const& thresholds);

// Refuses options that change nothing: in mode full, of a bundle without checkpoints, of one that propagates; for one
// prompt what only says something of `several`.
void check_exits(Bundle const& bundle, Request const& request, bool several = false);

// Refuses a choice among tokens where none is drawn; the values are checked already.
void check_sampling(Request const& request);

// `what` names it.
void check_prompt(Manifest const& manifest, std::vector<std::int64_t> const& prompt, std::string const& what);

// Tokens that a sequence may have on ONNX Runtime, whose graphs count them in 32 bits.
std::int64_t context_of(Manifest const& manifest);

// Tokens a sequence of `length` has after a step over `count` more. Throws: none more, or more than `limit`.
std::int64_t length_after(std::int64_t length, std::size_t count, std::int64_t limit);

// How to draft; none outside lossless mode.
std::optional<DraftLimits> draft_limits(Bundle const& bundle, Request const& request);

// Tokens that may wait before a segment is forced to run, outside lossless mode.
std::int64_t waiting_limit(Manifest const& manifest, std::optional<std::int64_t> const& max_pending);

// The compaction threshold of a list of prompts.
double share_of(Manifest const& manifest, Request const& request);

// The seed of one prompt by itself; none draws one.
std::optional<std::int64_t> seed_of(Request const& request);

// One seed per prompt of a list.
std::vector<std::optional<std::int64_t>> seeds_of(Request const& request, std::size_t prompts);

std::set<std::int64_t> stops_of(Manifest const& manifest, Request const& request);

}  // namespace tide
