#include "scheduling/audit.h"

#include <cmath>
#include <cstdio>
#include <iostream>
#include <string>

#include "formatting.h"
#include "machine.h"
#include "request.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr double kDelta = 0.05;        // how likely a bound may ever be wrong
constexpr std::int64_t kRaises = 3;  // of thresholds; the next step turns exits off

double share(char const* name, double value) {
  if (0 < real_number(name, value) && value <= 1) return value;
  throw GenerationError(std::string(name) + " must be above 0 and at most 1, not " + shown(value));
}

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2g", 100 * share);
  return text;
}

}  // namespace

Audit::Audit(AuditConfig config)
    : config_(std::move(config)),
      delta_(config_.epsilon ? kDelta / static_cast<double>(kRaises + 2) : kDelta),
      random_(random_seed()),
      bounds_(delta_) {}

std::vector<double> Audit::raised(std::vector<double> thresholds) const {
  std::lock_guard<std::mutex> const lock(mutex_);
  for (double& value : thresholds) {
    if (counts_.raises > kRaises) value = kNeverExit;
    if (value < 1) value = 1 - (1 - value) / std::pow(2.0, static_cast<double>(counts_.raises));
  }
  return thresholds;
}

std::int64_t Audit::raises() const {
  std::lock_guard<std::mutex> const lock(mutex_);
  return counts_.raises;
}

bool Audit::chooses() {
  std::lock_guard<std::mutex> const lock(mutex_);
  return static_cast<double>(random_() >> 11) * 0x1p-53 < config_.rate;
}

void Audit::record(bool exited, bool different, std::int64_t raises) {
  std::lock_guard<std::mutex> const lock(mutex_);
  ++counts_.audited;
  counts_.checked += exited ? 1 : 0;
  counts_.different += different ? 1 : 0;
  if (raises != counts_.raises) return;
  bounds_.add(different ? 1 : 0);
  if (config_.epsilon && raises <= kRaises && bounds_.lower() > *config_.epsilon) raise();
}

AuditState Audit::state() const {
  std::lock_guard<std::mutex> const lock(mutex_);
  AuditState state = counts_;
  state.upper_bound = bounds_.upper();
  state.lower_bound = bounds_.lower();
  return state;
}

void Audit::raise() {
  ++counts_.raises;
  std::string const sentence = "audit: exits change at least " + percent(bounds_.lower()) +
                               " % of the tokens, and audit_epsilon is " + percent(*config_.epsilon) +
                               " %: the thresholds of requests that begin from now on " +
                               (counts_.raises <= kRaises ? "are raised" : "let nothing exit any more");
  bounds_ = ConfidenceSequence(delta_);
  if (config_.log) {
    config_.log(sentence);
  } else {
    std::cerr << "tide_runtime: " + sentence + "\n";
  }
}

std::shared_ptr<Audit> open_audit(Bundle const& bundle, std::optional<AuditConfig> const& config) {
  if (!config) return nullptr;
  share("audit rate", config->rate);
  if (config->epsilon) share("audit epsilon", *config->epsilon);
  if (bundle.manifest.checkpoints.empty()) {
    throw GenerationError("an audit is for checkpoints, and bundle " + bundle.path.string() +
                          " has none: no token leaves early");
  }
  return std::make_shared<Audit>(*config);
}

}  // namespace tide
