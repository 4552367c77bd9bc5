// TideCandidate and TideLensCandidate: what the head reads of sequences' last tokens should they exit after a segment,
// and the router's scores of them (tide_export/compose/checkpoint_op.py defines both).
#pragma once

#include "onnxruntime_abi.h"

namespace tide_ops {

// lens: TideLensCandidate, else TideCandidate. One graph may have both, so they have two names.
abi::Operator candidate_operator(bool lens);

}  // namespace tide_ops
