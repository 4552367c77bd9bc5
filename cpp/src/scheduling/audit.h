// Estimates the share of tokens that early exits change in live traffic.
//
// Each token of mode `exit` is chosen with the same probability, before it is known. If it exited, it is computed again at full
// depth, after the same tokens and with the same noise (decoding/audited.h); otherwise it is the full model's. So the losses, 1
// if the tokens differ, are a fair sample, and `ConfidenceSequence` bounds the share of tokens that differ from those of the
// full model after the same text.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include "bundle/store.h"
#include "scheduling/confidence.h"
#include "tide/scheduler.h"

namespace tide {

// The audit of one scheduler. Any thread may use it.
class Audit {
 public:
  explicit Audit(AuditConfig config);

  // The thresholds of a request that begins now.
  std::vector<double> raised(std::vector<double> thresholds) const;

  std::int64_t raises() const;  // how often thresholds were raised

  bool chooses();  // whether to audit the next token

  // Counts a token that was chosen, of a request whose thresholds had been raised so often.
  void record(bool exited, bool different, std::int64_t raises);

  AuditState state() const;

 private:
  void raise();

  AuditConfig const config_;
  double const delta_;
  mutable std::mutex mutex_;  // of what follows
  std::mt19937_64 random_;
  AuditState counts_;
  ConfidenceSequence bounds_;
};

// An audit for requests of a bundle; null: without a configuration. Throws GenerationError: it is out of range, there is
// nothing to audit, or it cannot be undone.
std::shared_ptr<Audit> open_audit(Bundle const& bundle, std::optional<AuditConfig> const& config);

}  // namespace tide
