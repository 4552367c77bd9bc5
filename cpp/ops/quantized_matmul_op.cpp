// TideInt4MatMul, TideInt8MatMul and those with a gate.
#include "matmul_op.h"
#include "operators.h"
#include "quantized_matmul.h"
#include "weight_copies.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kRoundedRows = 16;  // rounded by one thread at a time

// The weights, or the gate's and the others: each begins with a panel.
using Halves = std::vector<PackedWeights>;
using Kept = KeptCopy<Halves>;

Halves pack(Context* context, IntegerWeights const& weights, bool gated) {
  Halves halves;
  IntegerWeights half = weights;
  half.rows = weights.rows / (gated ? 2 : 1);
  for (std::int64_t row = 0; row < weights.rows; row += half.rows) {
    half.integers = weights.integers + row * weights.row_bytes();
    half.scales = weights.scales + row * weights.blocks;
    halves.emplace_back(half, weight_memory(static_cast<std::size_t>(PackedWeights::bytes(half))));
    PackedWeights& packed = halves.back();
    Status* const failed =
        in_parallel(context, packed.panels(), false, [&](std::int64_t panel) { packed.fill(half, panel); });
    if (failed != nullptr) {
      api.ReleaseStatus(failed);
      throw std::bad_alloc();
    }
  }
  forget(weights.integers, static_cast<std::size_t>(weights.rows * weights.row_bytes()));
  forget(weights.scales, static_cast<std::size_t>(weights.rows * weights.blocks) * sizeof(float));
  return halves;
}

// y [.., N] = x [.., K], rounded to 8 bits, times the transpose of weights: integers [N, blocks, block_size * bits / 8]
// and scales [N, blocks].
template <int kBits, bool kGated>
Status* compute(void* kept, Context* context) {
  Tensor x, integers, scales;
  TIDE_RETURN_IF_FAILED(input_of(context, 0, x));
  TIDE_RETURN_IF_FAILED(input_of(context, 1, integers));
  TIDE_RETURN_IF_FAILED(input_of(context, 2, scales));
  bool const shapes = x.rank >= 1 && x.rank <= kMaxRank && integers.rank == 3 && scales.rank == 2 &&
                      scales.dims[0] == integers.dims[0] && scales.dims[1] == integers.dims[1];
  std::int64_t const k_size = shapes ? x.dims[x.rank - 1] : 0, block_size = shapes ? integers.dims[2] * 8 / kBits : 0;
  if (!shapes || !is_block_size(block_size) || (k_size + block_size - 1) / block_size != integers.dims[1]) {
    return api.CreateStatus(abi::kInvalidArgument, "TideInt4MatMul and TideInt8MatMul take x [.., K], integers [N, "
                                                   "blocks, bytes of a block] and scales [N, blocks]");
  }
  IntegerWeights const weights{static_cast<std::uint8_t const*>(integers.data),
                               static_cast<float const*>(scales.data),
                               integers.dims[0],
                               integers.dims[1],
                               block_size,
                               kBits};
  Result result{};
  TIDE_RETURN_IF_FAILED(result.make(context, x, weights.rows, kGated));
  if (result.y == nullptr) return nullptr;
  try {
    auto const key = [&] {
      auto const bytes = static_cast<std::size_t>(weights.rows * weights.row_bytes());
      return WeightKey(integers.data, bytes, {weights.rows, weights.blocks, block_size, kBits, kGated});
    };
    std::shared_ptr<Halves const> const packed = static_cast<Kept*>(kept)->of(
        integers.data, key, [&] { return std::make_shared<Halves const>(pack(context, weights, kGated)); });
    Buffer once;
    RoundedInputs inputs{nullptr, weights.blocks, block_size, kBits};
    inputs.rows = reinterpret_cast<char*>(result.scratch(result.m_size * inputs.stride() / 4, kGated, once));
    auto const round = [&](std::int64_t part) {
      for (std::int64_t m = part * kRoundedRows; m < std::min((part + 1) * kRoundedRows, result.m_size); ++m) {
        inputs.round(static_cast<float const*>(x.data) + m * k_size, k_size, m);
      }
    };
    TIDE_RETURN_IF_FAILED(in_parallel(context, (result.m_size + kRoundedRows - 1) / kRoundedRows, false, round));
    std::int64_t const row_bytes = weights.row_bytes() + 4 * weights.blocks;
    return result.compute(context, row_bytes, PackedWeights::kRows, [&](std::int64_t n, std::int64_t count, float* to) {
      PackedWeights const& half = n < result.n_size ? packed->front() : packed->back();
      multiply_integers(inputs, result.m_size, half, n % result.n_size, count, to, result.n_size);
    });
  } catch (std::bad_alloc const&) {
    return api.CreateStatus(abi::kInvalidArgument, "TideInt4MatMul, TideInt8MatMul: not enough memory");
  }
}

template <int kBits, bool kGated>
Operator integer_operator() {
  Operator op = matmul_operator<Kept>();
  op.GetName = [](Operator const*) {
    if (kGated) return kBits == 4 ? "TideGatedInt4MatMul" : "TideGatedInt8MatMul";
    return kBits == 4 ? "TideInt4MatMul" : "TideInt8MatMul";
  };
  op.GetInputType = [](Operator const*, std::size_t index) { return index == 1 ? abi::kUInt8 : abi::kFloat; };
  op.GetInputTypeCount = [](Operator const*) -> std::size_t { return 3; };
  op.KernelComputeV2 = compute<kBits, kGated>;
  return op;
}

}  // namespace

std::vector<Operator> integer_operators() {
  return {integer_operator<4, false>(), integer_operator<4, true>(), integer_operator<8, false>(),
          integer_operator<8, true>()};
}

}  // namespace tide_ops
