#include "batch.h"

#include "allocations.h"
#include "lists.h"
#include "networks.h"
#include "options.h"
#include "packed/sequence.h"

std::string BatchDriver::answer(std::string const& command, std::vector<std::string> const& words) {
  if (command == "batch_step") return step(words);
  if (command == "batch_load") {
    tide::Bundle bundle = tide::open_bundle(words.at(0), true);
    batch_.reset();
    tide::LoadOptions options;
    options.provider = "cpu";
    options.threads = 1;
    if (words.size() == 1) backend_ = tide::open_backend(std::move(bundle), options);
    if (words.size() > 1) backend_ = backend_on_networks(words.at(1), std::move(bundle), options);
    return "null";
  }
  if (command == "batch_start") {
    double const share = real_numbers(command, words.at(0)).at(0);
    batch_.reset();  // so that buffers are used again
    batch_ = backend_->start_batch(share, static_cast<std::size_t>(whole_numbers(command, words.at(1)).at(0)));
    used_.assign(batch_->free_slots(), false);
  } else if (command == "batch_join") {
    std::size_t const slot = batch_->join(real_numbers(command, words.at(0)), whole_numbers(command, words.at(1)).at(0));
    used_.at(slot) = true;
    return std::to_string(slot);
  } else {
    auto const slot = static_cast<std::size_t>(whole_numbers(command, words.at(0)).at(0));
    if (command == "batch_rewind") batch_->sequence(slot).rewind(whole_numbers(command, words.at(1)).at(0));
    if (command == "batch_leave") {
      batch_->leave(slot);
      used_.at(slot) = false;
    }
  }
  return described();
}

std::string BatchDriver::step(std::vector<std::string> const& words) {
  std::vector<tide::StepRequest> steps(words.size() / 4);
  std::vector<tide::SlotRequest> requests;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    std::string const* const word = &words.at(4 * i);
    std::int64_t const keep = whole_numbers("batch_step", word[1]).at(0);
    if (word[3] != "none") steps[i].ids = whole_numbers("batch_step", word[3]);
    steps[i].logits_to_keep = keep == 0 ? 1 : keep;
    steps[i].full = word[2] == "1";
    auto const slot = static_cast<std::size_t>(whole_numbers("batch_step", word[0]).at(0));
    requests.push_back({slot, steps[i], keep > 0});
  }
  std::string text;
  for (tide::StepResult const& result : injected([&] { return batch_->step(requests); })) {
    text += (text.empty() ? "" : ", ") + ("{\"exit_layer\": " + std::to_string(result.exit_layer)) +
            ", \"segments_run\": " + std::to_string(result.segments_run) +
            ", \"vocabulary\": " + std::to_string(result.vocabulary) +
            ", \"rows\": " + list(result.logits, result.rows * result.vocabulary) + "}";
  }
  return "{\"results\": [" + text + "], \"sequences\": " + described() + "}";
}

std::string BatchDriver::described() const {
  std::string text;
  for (std::size_t slot = 0; slot < used_.size(); ++slot) {
    if (!used_[slot]) continue;
    tide::SequenceState const& sequence = batch_->sequence(slot);
    auto const* const packed = dynamic_cast<tide::PackedSequence const*>(&sequence);
    std::vector<std::int64_t> pending;
    for (std::size_t k = 1; k < sequence.lengths.size(); ++k) {
      pending.push_back(sequence.lengths[k - 1] - sequence.lengths[k]);
      if (packed == nullptr) continue;
      pending.back() = static_cast<std::int64_t>(packed->pending[k].size()) / backend_->manifest().model.hidden_size;
    }
    text += (text.empty() ? "\"" : ", \"") + std::to_string(slot) + "\": {\"lengths\": " + list(sequence.lengths) +
            ", \"computed\": " + list(sequence.computed()) + ", \"pending\": " + list(pending) + "}";
  }
  return "{" + text + "}";
}
