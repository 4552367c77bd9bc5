#include "measured_costs.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <string_view>
#include <vector>

#include "bundle/sha256.h"
#include "bundle/user_cache.h"
#include "decoding/draft_limits.h"
#include "machine.h"
#include "request.h"
#include "sequence.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr char const* kCostsVariable = "TIDE_DRAFT_COSTS";
constexpr std::string_view kAssumed = "assumed", kCached = "cache";

constexpr double kCostSeconds = 2;      // no step begins later
constexpr double kMoreSeconds = 0.25;   // the same after `kCostRounds`
constexpr std::size_t kCostRounds = 12, kMostRounds = 48;
constexpr std::size_t kQuickest = 8;    // of so many steps the second quickest counts: other programs delay others
constexpr std::int64_t kTextBefore = 16;
constexpr std::int64_t kLongestRun = 1 + (std::int64_t{1} << (kVerifyCosts - 1));
constexpr std::int64_t kSpread = 7919;  // of token ids: experts of a mixture are chosen by the tokens

constexpr std::int64_t kStepsToKeep = 256;
constexpr std::size_t kKeptCosts = 1000;     // files
constexpr std::size_t kMostCached = 1 << 16;  // bytes of one
constexpr std::chrono::hours kFresh(24);      // then they are measured again: other programs may have delayed all steps

double const kUnknown = std::numeric_limits<double>::quiet_NaN();

// Steps of one sequence, each after the same text.
class TimedSteps {
 public:
  explicit TimedSteps(Backend& backend) : manifest_(backend.manifest()), depth_(manifest_.checkpoints.size()) {
    batch_ = backend.start_batch(1, 1);
    drafts_ = backend.start_drafts(1, *batch_);
    slot_ = batch_->join(std::vector<double>(depth_, kNeverExit), kNoLimit);
    Sequence& sequence = batch_->sequence(slot_);
    sequence.candidates = Sampler(GenerationConfig(), std::nullopt).candidates();
    sequence.draft_states = drafts_ != nullptr;
    began_ = seconds_now();
    std::int64_t const room = std::min(context_of(manifest_), kTextBefore + kLongestRun);
    before_ = std::max<std::int64_t>(room - kLongestRun, 1);
    longest_ = std::min({room - before_, kLongestRun, manifest_.model.undo()});
    if (longest_ < 2) return;
    step(before_, 1, true);
    if (drafts_ != nullptr) draft(0, std::min(before_, drafts_->info().max_rows - drafts_->info().block_size - 1));
  }

  StepCosts costs() {
    StepCosts costs = assumed_costs(manifest_);
    std::vector<std::vector<double>> seconds(1 + kVerifyCosts + 1 + depth_);
    double now = seconds_now();
    for (std::size_t i = 0; longest_ > 1 && i < kMostRounds * seconds.size(); ++i) {  // a busy moment delays all alike
      if (!(now - began_ < (i < kCostRounds * seconds.size() ? kCostSeconds : kMoreSeconds))) break;
      std::size_t const number = i % seconds.size();
      double const started = now;
      bool const ran = run(number);
      now = seconds_now();
      if (ran && std::isfinite(now - started) && now > started) seconds[number].push_back(now - started);
    }
    double const unit = quick(seconds[0]);
    auto const cost = [&](std::size_t number, double otherwise, double most) {  // more than `most` is no cost
      double const found = quick(seconds[number]) / unit;
      return std::isfinite(found) ? std::min(found, most) : otherwise;
    };
    if (!std::isfinite(cost(1, kUnknown, 2))) return {};
    for (std::size_t i = 0; i < kVerifyCosts; ++i) {
      double const last = i > 0 ? costs.verify[i - 1] : 0, slope = i > 1 ? last - costs.verify[i - 2] : last / 2;
      double const one_by_one = 1 + static_cast<double>(std::size_t{1} << i);
      costs.verify[i] = std::max(last, cost(1 + i, 1 + last + 2 * slope, one_by_one) - 1);  // not run: as those before
    }
    costs.drafter = cost(1 + kVerifyCosts, costs.drafter, 1);
    for (std::size_t i = 0; i < depth_; ++i) costs.exits[i] = cost(2 + kVerifyCosts + i, costs.exits[i], 1);
    return costs;
  }

 private:
  // Runs the step of a number: over one token, those of `StepCosts::verify`, a draft, exits. Returns whether it can be run.
  bool run(std::size_t number) {
    if (number == 1 + kVerifyCosts) return drafts_ != nullptr && draft(rows_, 1);
    if (number > 1 + kVerifyCosts) {
      std::vector<float>& thresholds = batch_->sequence(slot_).rule.thresholds;
      std::vector<float> const never = thresholds;
      thresholds[number - 2 - kVerifyCosts] = kAlwaysExit;
      step(1, 1, false);
      thresholds = never;
      return true;
    }
    std::int64_t const tokens = number == 0 ? 1 : 1 + (std::int64_t{1} << (number - 1));
    if (tokens > longest_) return false;
    step(tokens, tokens, true);
    return true;
  }

  void step(std::int64_t tokens, std::int64_t logits, bool full) {
    Sequence& sequence = batch_->sequence(slot_);
    std::int64_t const before = sequence.length();
    StepRequest request{{}, logits, full};
    for (std::int64_t i = 0; i < tokens; ++i) request.ids.push_back((before + i) * kSpread % manifest_.model.vocab_size);
    batch_->step({{slot_, request, true}});
    if (before > 0) sequence.rewind(before);
  }

  bool draft(std::int64_t before, std::int64_t count) {
    DraftsInfo const& info = drafts_->info();
    auto const rows = static_cast<std::size_t>(count);
    DraftRows const next{before, std::vector<std::int64_t>(rows, info.tokens[0]), std::vector<float>(rows * info.width)};
    drafts_->run({{0, next}});
    if (before == 0) rows_ = count;
    return true;
  }

  static double quick(std::vector<double> seconds) {
    if (seconds.size() > 2) seconds.erase(seconds.begin());  // the first allocates memory and fills caches
    if (seconds.empty()) return kUnknown;
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / kQuickest];
  }

  static constexpr float kAlwaysExit = -1;

  Manifest const& manifest_;
  std::size_t const depth_;
  std::unique_ptr<Batch> batch_;
  std::unique_ptr<Drafts> drafts_;  // may read the batch's K/V: goes first
  std::size_t slot_ = 0;
  double began_ = 0;
  std::int64_t before_ = 0, longest_ = 0, rows_ = 0;
};

std::string content_of_costs(StepCosts const& costs, std::string const& key) {
  std::ostringstream numbers;
  numbers.precision(std::numeric_limits<double>::max_digits10);
  for (double const cost : costs.verify) numbers << cost << " ";
  for (double const cost : costs.exits) numbers << cost << " ";
  numbers << costs.drafter << "\n";
  return numbers.str() + sha256_of(key + numbers.str()) + "\n";
}

// What a file holds; empty: it is missing, old, damaged or of something else.
StepCosts read_costs(std::filesystem::path const& file, std::string const& key, std::size_t checkpoints) {
  std::error_code missing;
  auto const age = std::filesystem::file_time_type::clock::now() - std::filesystem::last_write_time(file, missing);
  if (missing || age > kFresh || age < -kFresh) return {};
  std::ifstream in(file, std::ios::binary);
  std::string text(kMostCached, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(in.gcount()));
  std::istringstream numbers(text);
  StepCosts costs{std::vector<double>(checkpoints), std::vector<double>(kVerifyCosts), 0};
  for (double& cost : costs.verify) numbers >> cost;
  for (double& cost : costs.exits) numbers >> cost;
  numbers >> costs.drafter;
  return numbers && text == content_of_costs(costs, key) ? costs : StepCosts();
}

}  // namespace

bool MeasuredCosts::are_assumed() {
  char const* const variable = std::getenv(kCostsVariable);
  if (variable == nullptr || *variable == '\0') return false;
  if (variable == kAssumed) return true;
  throw GenerationError(std::string(kCostsVariable) + " must be 'assumed' or not set, not '" + variable + "'");
}

MeasuredCosts::Found MeasuredCosts::now(Backend& backend) {
  if (!backend.process().is_this()) return {assumed_costs(backend.manifest()), kAssumed.data()};
  std::lock_guard<std::mutex> const finding(finding_);
  bool known;
  {
    std::lock_guard<std::mutex> const lock(mutex_);
    known = found_.has_value();
  }
  if (!known) {
    Found found = find(backend);
    std::lock_guard<std::mutex> const lock(mutex_);
    found_ = std::move(found);
  }
  std::lock_guard<std::mutex> const lock(mutex_);
  return *found_;
}

MeasuredCosts::Found MeasuredCosts::find(Backend& backend) {
  Manifest const& manifest = backend.manifest();
  Found const assumed{assumed_costs(manifest), kAssumed.data()};
  if (are_assumed()) return assumed;
  std::filesystem::path const folder = user_cache();
  if (how_ && !folder.empty()) {
    key_ = std::string(TIDE_EXPORT_VERSION) + "\n" + machine_name() + "\n" + backend.provider() + "\n" + *how_ + "\n";
    for (auto const& [name, file] : manifest.files) key_ += name + " " + file.sha256 + "\n";
    file_ = folder / "draft_costs" / sha256_of(key_);
    StepCosts cached = read_costs(file_, key_, manifest.checkpoints.size());
    if (!cached.verify.empty()) return {std::move(cached), kCached.data()};
  }
  StepCosts measured;
  try {
    measured = TimedSteps(backend).costs();
  } catch (std::exception const&) {  // a request fails by the same, and says so
  }
  if (measured.verify.empty()) return assumed;
  if (!file_.empty()) {
    try {
      replace_cached(file_, content_of_costs(measured, key_));
      keep_newest(file_.parent_path(), kKeptCosts);
    } catch (std::filesystem::filesystem_error const&) {  // they are then measured again the next time
    }
  }
  return {std::move(measured), "measured"};
}

template <typename Correct>
void MeasuredCosts::correct(Correct const& correct) noexcept {
  std::lock_guard<std::mutex> const lock(mutex_);
  if (found_ && found_->source != kAssumed) correct(found_->costs);
}

void MeasuredCosts::ran(std::size_t tokens, double seconds) noexcept {
  correct([&](StepCosts& costs) { correction_.ran(costs, tokens, seconds); });
}

void MeasuredCosts::exited(std::size_t checkpoint, double seconds) noexcept {
  correct([&](StepCosts& costs) { correction_.exited(costs, checkpoint, seconds); });
}

void MeasuredCosts::drafted(double seconds) noexcept {
  correct([&](StepCosts& costs) { correction_.drafted(costs, seconds); });
}

void MeasuredCosts::save() const noexcept {
  if (file_.empty() || correction_.steps() < kStepsToKeep) return;
  try {
    replace_cached(file_, content_of_costs(found_->costs, key_));
  } catch (...) {  // no memory: they are corrected again
  }
}

}  // namespace tide
