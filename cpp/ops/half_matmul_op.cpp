// TideBf16MatMul, TideFp16MatMul and those with a gate.
#include "half_matmul.h"
#include "matmul_op.h"
#include "operators.h"

namespace tide_ops {
namespace {

struct Nothing {};

// y [.., N] = x [.., K] times the transpose of weights, bfloat16 or float16 [N, K]; sums are float32.
template <HalfFormat kFormat, bool kGated>
Status* compute(void*, Context* context) {
  Tensor x, weights;
  TIDE_RETURN_IF_FAILED(input_of(context, 0, x));
  TIDE_RETURN_IF_FAILED(input_of(context, 1, weights));
  if (x.rank < 1 || x.rank > kMaxRank || weights.rank != 2 || weights.dims[1] != x.dims[x.rank - 1]) {
    return api.CreateStatus(abi::kInvalidArgument,
                            "TideBf16MatMul and TideFp16MatMul take x [.., K] and weights [N, K]");
  }
  std::int64_t const k_size = weights.dims[1], stride = SplitRows::stride(k_size);
  Result result{};
  TIDE_RETURN_IF_FAILED(result.make(context, x, weights.dims[0], kGated));
  if (result.y == nullptr) return nullptr;
  try {
    Buffer once;
    float* const split = result.scratch(result.m_size * stride, kGated, once);
    HalfKernel const& kernel = *half_kernel(kFormat);
    for (std::int64_t m = 0; m < result.m_size; ++m) {
      kernel.split_row(static_cast<float const*>(x.data) + m * k_size, k_size, split + m * stride);
    }
    SplitRows const rows{split, result.m_size, k_size};
    auto const* const numbers = static_cast<std::uint16_t const*>(weights.data);
    return result.compute(context, 2 * k_size, 4, [&](std::int64_t n, std::int64_t count, float* to) {
      kernel.multiply(rows, numbers + n * k_size, count, to, result.n_size);
    });
  } catch (std::bad_alloc const&) {
    return api.CreateStatus(abi::kInvalidArgument, "TideBf16MatMul, TideFp16MatMul: not enough memory");
  }
}

template <HalfFormat kFormat, bool kGated>
Operator half_operator() {
  constexpr bool kIsBf16 = kFormat == HalfFormat::kBf16;
  Operator op = matmul_operator<Nothing>();
  op.GetName = [](Operator const*) {
    if (kGated) return kIsBf16 ? "TideGatedBf16MatMul" : "TideGatedFp16MatMul";
    return kIsBf16 ? "TideBf16MatMul" : "TideFp16MatMul";
  };
  op.GetInputType = [](Operator const*, std::size_t index) {
    return index == 0 ? abi::kFloat : kIsBf16 ? abi::kBFloat16 : abi::kFloat16;
  };
  op.GetInputTypeCount = [](Operator const*) -> std::size_t { return 2; };
  op.KernelComputeV2 = compute<kFormat, kGated>;
  return op;
}

}  // namespace

std::vector<Operator> half_operators() {
  return {half_operator<HalfFormat::kBf16, false>(), half_operator<HalfFormat::kBf16, true>(),
          half_operator<HalfFormat::kFp16, false>(), half_operator<HalfFormat::kFp16, true>()};
}

}  // namespace tide_ops
