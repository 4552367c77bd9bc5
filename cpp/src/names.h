// Defines the fixed names of tensors and files, as tide_export/names/ and tide_export/bundle/file_names.py do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tide {
namespace names {

constexpr char const* kInputIds = "input_ids";  // int64 [1, N] or [B, S], of segment 0's network
constexpr char const* kLogits = "logits";       // float32 [1, m, V], of the head's network

// Prefix of the networks' metadata: what they were exported with and no tensor shows.
constexpr char const* kMetadata = "tide.";

constexpr char const* kKinds[] = {"key", "value"};

// Tensors of the batch networks: pages of keys or values, and the sequences that they belong to.
constexpr char const* kSequenceLengths = "sequence_lengths";  // int64 [R], tokens of each sequence, the new ones included
constexpr char const* kSequenceStarts = "sequence_starts";    // int64 [R + 1], where the new tokens of each begin among the N
constexpr char const* kPageTable = "page_table";              // int32 [R, J], the pages of each sequence
std::string pages(std::size_t layer, char const* kind);       // [pages, heads, page_tokens, width]; kind: of kKinds
std::string new_pages(std::size_t layer, char const* kind);   // the same pages after the step
constexpr char const* kLoraWeights = "lora_weights";          // float32 [A, T], a row of each adapter; zeros: of none
constexpr char const* kAdapters = "adapters";                 // int64 [R], each sequence's row
constexpr char const* kStatePlaces = "state_places";          // int64 [R, 2], where recurrent states are; settled tokens
std::string states(std::int64_t layer, std::int64_t number);      // float32 [places, ..], a recurrent state
std::string new_states(std::int64_t layer, std::int64_t number);  // the same after the step

// Tensors of the segment networks and the head. T is float32, float16 or bfloat16; P the rows of a buffer of hidden states.
std::string past(std::size_t layer, char const* kind);     // T [1, heads, C, head_dim], a K/V buffer
std::string present(std::size_t layer, char const* kind);  // the same buffer after the run
constexpr char const* kPendingStates = "pending_states";  // T [1, 1, P, D], of all but the first segment
constexpr char const* kTokenIndices = "token_indices";    // int64 [S], 0 .. S-1
constexpr char const* kKeyIndices = "key_indices";        // int64 [J], 0 .. J-1, the K/V that attention reads
constexpr char const* kPastLengths = "past_lengths";      // int64 [1], tokens in the segment's K/V before the run
constexpr char const* kExitStates = "exit_states";        // T [1, 1, P, D'], what the head reads
constexpr char const* kNewExitStates = "new_exit_states";  // the same buffer after the run
constexpr std::int64_t kExitRow = 0, kFinalRow = 2;  // rows of it: of an exit; from here on of the last segment's tokens
// Of all but the last segment; kNewPending is the same buffer as kNextPendingStates.
constexpr char const* kThresholds = "exit_thresholds";              // float32 [1]
constexpr char const* kNewPending = "new_pending_states";           // T [1, 1, P, D]
constexpr char const* kLastTokens = "last_tokens";                  // int64 [1], index of the last real token, 0 .. S-1
constexpr char const* kPendingLengths = "pending_lengths";          // int64 [1], row where the new hidden states go
constexpr char const* kNextPendingStates = "next_pending_states";   // T [1, 1, P, D], before the next segment
constexpr char const* kRouterScore = "router_score";                // float32 [1]
constexpr char const* kExitFlag = "exit_flag";                      // int32 [1], 1: the score is above the threshold
constexpr char const* kRows = "rows";                               // int64 [m], of kExitStates; of the head
constexpr char const* kEmbedding = "embedding";  // T [V, E], the matrix of kEmbeddingFile; of segment 0, a tied head
// The head gives kLogits. Two more networks take these, so that not all of them must cross to the host; a NaN counts as
// infinity.
constexpr char const* kBestTokens = "best_tokens";              // int32 [m], of the largest logit, the lowest if equal
constexpr char const* kBestLogits = "best_logits";              // float32 [m]
constexpr char const* kCandidateLogits = "candidate_logits";    // float32 [m, c], the largest, in descending order
constexpr char const* kCandidateTokens = "candidate_tokens";    // int64 [m, c]
constexpr std::int64_t kMaxCandidates = 128;                    // c, or the vocabulary's size if that is less

// Tensors of the batch networks: N tokens of R sequences, one sequence after the other.
constexpr char const* kHiddenStates = "hidden_states";         // float32 [1, N, D], of all but the first segment
constexpr char const* kNewHiddenStates = "new_hidden_states";  // float32 [1, N, D], of all but the last segment
constexpr char const* kDraftStates = "draft_states";           // float32 [1, N, H], of the last; what a drafter may read
constexpr char const* kPositionIds = "position_ids";        // int64 [1, N], each token's position in its sequence
constexpr char const* kSlotThresholds = "slot_thresholds";  // float32 [m, 1], above 1: no score of it is read

constexpr char const *kHead = "head", *kBest = "best", *kCandidates = "candidates";
constexpr std::size_t kAfterSegments = 3;  // these networks, which follow the segments
constexpr char const* kDrafter = "drafter";  // where the bundle has one that drafts from the final hidden states
std::string segment(std::size_t k);  // the name of segment k's network and engine

}  // namespace names

// Paths in a bundle.
std::string network_file(std::string const& name);  // the network `segment(k)`, kHead, kBest ...
std::string plan_file(std::string const& name);   // its plan
std::string batch_file(std::string const& name);    // the batch network `segment(k)` or kHead

}  // namespace tide
