#include "networks.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "table.h"

namespace table {

constexpr float kForgotten = -1;

std::size_t bytes_of(std::vector<std::int64_t> const& shape, int type) {
  std::size_t bytes = type == kInt64 ? 8 : 4;
  for (std::int64_t const size : shape) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

namespace {

// A run that reads what it must not is a bug of who bound it: it fails, and says so.
void require(bool condition, char const* what) {
  if (!condition) throw std::logic_error(std::string("the table refuses: ") + what);
}

std::string pages(std::int64_t k, bool value, bool made) {
  return std::string(made ? "new_" : "") + "pages." + std::to_string(k) + (value ? ".value" : ".key");
}

std::string states(std::int64_t k, bool made) {
  return std::string(made ? "new_" : "") + "states." + std::to_string(k) + ".0";
}

float likeliest(std::uint64_t x) { return static_cast<float>(x >> 40) / 16777216.0f; }

}  // namespace

Tensor const& Bound::in(std::string const& name) const {
  for (Entry const& entry : inputs) {
    if (entry.name == name) return entry.tensor;
  }
  throw std::logic_error("the table refuses: " + name + " is not bound");
}

float* Bound::write(std::string const& name, std::vector<std::int64_t> const& shape) {
  for (Entry& entry : outputs) {
    if (entry.name != name) continue;
    if (entry.device) {
      auto own = std::make_shared<std::vector<char>>(std::max<std::size_t>(bytes_of(shape, kFloat), 1));
      entry.tensor = {shape, kFloat, own->data(), own};
    }
    require(entry.tensor.shape == shape, "an output has another shape than it is bound with");
    return static_cast<float*>(entry.tensor.data);
  }
  return nullptr;
}

// One sequence of a run.
struct Network::Row {
  std::int64_t first, count, total;  // index of its first token in the run, its tokens in it, and all after it
  std::int32_t const* pages;
  std::int64_t place = 0, settled = 0, adapter = 0;
};

Network::Network(std::string const& text) {
  std::istringstream words(text);
  words >> kind_;
  if (kind_ == "segment") words >> k_;
  std::string more;
  recurrent_ = static_cast<bool>(words >> more);
  auto const input = [&](std::string name, int type, std::vector<std::int64_t> shape) {
    inputs.push_back({std::move(name), type, std::move(shape)});
  };
  auto const output = [&](std::string name, std::vector<std::int64_t> shape) {
    outputs.push_back({std::move(name), kFloat, std::move(shape)});
  };
  auto const paged = [&](std::int64_t first, std::int64_t end, bool of_model) {
    input("sequence_lengths", kInt64, {-1});
    input("page_table", kInt32, {-1, -1});
    for (std::int64_t k = first; k < end; ++k) {
      for (bool const value : {false, true}) {
        input(pages(k, value, false), kFloat, {-1, 1, -1, 1});
        output(pages(k, value, true), {-1, 1, -1, 1});
      }
      if (!of_model || !recurrent_) continue;
      input(states(k, false), kFloat, {-1, kContext + 1});
      output(states(k, true), {-1, kContext + 1});
    }
    if (of_model && recurrent_) input("state_places", kInt64, {-1, 2});
    if (of_model) input("lora_weights", kFloat, {-1, 5 * kSegments});
    if (of_model) input("adapters", kInt64, {-1});
  };
  if (kind_ == "head") {
    input("exit_states", kFloat, {1, -1, kWidth});
    output("logits", {1, -1, kVocabulary});
  } else if (kind_ == "drafter") {
    input("input_ids", kInt64, {1, -1});
    input("hidden_states", kFloat, {1, -1, kWidth});
    input("position_ids", kInt64, {1, -1});
    input("last_tokens", kInt64, {-1});
    input("sequence_starts", kInt64, {-1});
    output("logits", {-1, kDrafted});
    output("new_hidden_states", {-1, kWidth});
    paged(0, 1, false);
  } else {
    if (k_ == 0) input("input_ids", kInt64, {1, -1});
    if (k_ > 0) input("hidden_states", kFloat, {1, -1, kWidth});
    for (char const* name : {"position_ids"}) input(name, kInt64, {1, -1});
    for (char const* name : {"last_tokens", "sequence_starts"}) input(name, kInt64, {-1});
    output("exit_states", {-1, kWidth});
    if (k_ + 1 < kSegments) {
      output("new_hidden_states", {1, -1, kWidth});
      input("slot_thresholds", kFloat, {-1, 1});
      output("router_score", {-1, 1});
    }
    paged(k_, k_ + 1, true);
  }
}

void Network::run(Bound& bound) const {
  if (kind_ == "segment") return run_segment(bound);
  if (kind_ == "head") return run_head(bound);
  run_drafter(bound);
}

// The sequences of a run, by their new tokens.
std::vector<Network::Row> Network::rows_of(Bound const& bound) const {
  Tensor const& lengths = bound.in("sequence_lengths");
  std::int64_t const width = bound.in("page_table").shape[1];
  std::vector<Row> rows;
  for (std::int64_t i = 0; i < lengths.shape[0]; ++i) {
    auto const* const starts = bound.read<std::int64_t>("sequence_starts");
    Row row{starts[i], starts[i + 1] - starts[i], static_cast<std::int64_t const*>(lengths.data)[i],
            bound.read<std::int32_t>("page_table") + i * width};
    require(row.count > 0 && row.count <= row.total && (row.total + kPage - 1) / kPage <= width, "a run's lengths");
    if (kind_ != "drafter") {
      if (recurrent_) {
        row.place = bound.read<std::int64_t>("state_places")[2 * i];
        row.settled = bound.read<std::int64_t>("state_places")[2 * i + 1];
      }
      std::int64_t const number = bound.read<std::int64_t>("adapters")[i], size = 5 * kSegments;
      require(number >= 0 && number < bound.in("lora_weights").shape[0], "an adapter that is not loaded");
      float sum = 0;
      for (std::int64_t j = 0; j < size; ++j) sum += bound.read<float>("lora_weights")[number * size + j];
      row.adapter = std::lround(sum);
    }
    rows.push_back(row);
  }
  return rows;
}

// Runs segment k over the new tokens of sequences: hidden states [n, kWidth], each with its position.
void Network::segment(Bound& bound, std::int64_t k, std::vector<Row> const& rows, float const* input, float* output) const {
  auto* const keys = static_cast<float*>(bound.in(pages(k, false, false)).data);
  auto* const values = static_cast<float*>(bound.in(pages(k, true, false)).data);
  std::int64_t const count = bound.in(pages(k, false, false)).shape[0];
  for (Row const& row : rows) {
    float* const state = recurrent_ ? static_cast<float*>(bound.in(states(k, false)).data) + row.place * (kContext + 1) : nullptr;
    std::int64_t const before = row.total - row.count;
    std::uint64_t attention = 0;
    for (std::int64_t position = 0; position < row.total; ++position) {
      std::int64_t const page = row.pages[position / kPage];
      require(page >= 0 && page < count, "a page that there is not");
      std::int64_t const at = page * kPage + position % kPage, i = row.first + position - before;
      std::int64_t hidden = 0;
      if (position >= before) {
        hidden = std::lround(input[i * kWidth]);
        require(input[i * kWidth + 1] == static_cast<float>(position), "a hidden state of another position");
        keys[at] = static_cast<float>(key(k, hidden));
        values[at] = static_cast<float>(position);
      }
      require(values[at] == static_cast<float>(position), "K/V of another position");
      attention += attends(std::lround(keys[at]), position);
      if (position < before) continue;
      std::int64_t now = 0;
      if (recurrent_) {
        require(position == 0 || state[position] != kForgotten, "a recurrent state that is not kept");
        now = next_state(position == 0 ? 0 : std::lround(state[position]), hidden);
        state[position + 1] = static_cast<float>(now);
      }
      output[i * kWidth] = static_cast<float>(layer(k, hidden, attention, now, row.adapter));
      output[i * kWidth + 1] = static_cast<float>(position);
    }
    std::int64_t const kept = std::max(std::min(row.settled, before), row.total - kUndo);
    for (std::int64_t position = 0; recurrent_ && position < kept; ++position) state[position] = kForgotten;
  }
}

void Network::run_segment(Bound& bound) const {
  std::vector<Row> const rows = rows_of(bound);
  std::int64_t const tokens = bound.in("position_ids").shape[1];
  std::vector<float> input(static_cast<std::size_t>(tokens * kWidth)), output(input.size());
  auto const* const positions = bound.read<std::int64_t>("position_ids");
  for (std::int64_t i = 0; i < tokens; ++i) {
    input[i * kWidth] = k_ > 0 ? bound.read<float>("hidden_states")[i * kWidth]
                               : static_cast<float>(embedding(bound.read<std::int64_t>("input_ids")[i]));
    input[i * kWidth + 1] = static_cast<float>(positions[i]);
    require(k_ == 0 || bound.read<float>("hidden_states")[i * kWidth + 1] == input[i * kWidth + 1], "a position");
  }
  segment(bound, k_, rows, input.data(), output.data());
  Tensor const& last = bound.in("last_tokens");
  float* const exits = bound.write("exit_states", {last.shape[0], kWidth});
  bool const deepest = k_ + 1 == kSegments;
  if (!deepest) std::copy(output.begin(), output.end(), bound.write("new_hidden_states", {1, tokens, kWidth}));
  float* const scores = deepest ? nullptr : bound.write("router_score", {last.shape[0], 1});
  for (std::int64_t i = 0; i < last.shape[0]; ++i) {
    std::int64_t const token = static_cast<std::int64_t const*>(last.data)[i];
    require(token >= 0 && token < tokens, "a token that there is not");
    std::copy_n(output.data() + token * kWidth, kWidth, exits + i * kWidth);
    if (!deepest) scores[i] = score(std::lround(output[token * kWidth]));
  }
}

void Network::run_head(Bound& bound) const {
  std::int64_t const count = bound.in("exit_states").shape[1];
  auto const* const states = bound.read<float>("exit_states");
  float* const logits = bound.write("logits", {1, count, kVocabulary});
  for (std::int64_t i = 0; i < count * kVocabulary; ++i) {
    logits[i] = logit(std::lround(states[i / kVocabulary * kWidth]), i % kVocabulary);
  }
}

// Proposes the token that most often follows; its K/V say which rows it ran over.
void Network::run_drafter(Bound& bound) const {
  auto* const keys = static_cast<float*>(bound.in(pages(0, false, false)).data);
  auto* const values = static_cast<float*>(bound.in(pages(0, true, false)).data);
  std::vector<Row> const rows = rows_of(bound);
  auto const count = static_cast<std::int64_t>(rows.size());
  float* const logits = bound.write("logits", {count, kDrafted});
  float* const next = bound.write("new_hidden_states", {count, kWidth});
  for (std::int64_t i = 0; i < count; ++i) {
    Row const& row = rows[static_cast<std::size_t>(i)];
    std::uint64_t attention = 0;
    std::int64_t const before = row.total - row.count;
    for (std::int64_t position = 0; position < row.total; ++position) {
      std::int64_t const at = row.pages[position / kPage] * kPage + position % kPage, from = row.first + position - before;
      if (position >= before) {
        require(bound.read<std::int64_t>("position_ids")[from] == position, "a row of another position");
        keys[at] = static_cast<float>(bound.read<std::int64_t>("input_ids")[from]);
        values[at] = static_cast<float>(position);
      }
      require(values[at] == static_cast<float>(position), "a drafter's K/V of another position");
      attention += attends(std::lround(keys[at]), position);
    }
    std::int64_t const last = bound.read<std::int64_t>("last_tokens")[i];
    require(last == row.first + row.count - 1, "the last row of a sequence");
    std::int64_t const id = bound.read<std::int64_t>("input_ids")[last];
    for (std::int64_t token = 0; token < kDrafted; ++token) {
      logits[i * kDrafted + token] = 2 * likeliest(mix(attention, static_cast<std::uint64_t>(token))) + (follower(id) == token ? 4.0f : 0.0f);
    }
    next[i * kWidth] = static_cast<float>(attention & 0xFFFFFF);
    next[i * kWidth + 1] = 0;
  }
}

}  // namespace table
