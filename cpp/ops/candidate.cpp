#include "candidate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "kernel.h"
#include "vector_products.h"

namespace tide_ops {
namespace {

constexpr std::size_t kRequired = 5;  // inputs, after which there are any number

enum class Norm { kNone, kRms, kLayer };

// What the attributes of a node say.
struct Kernel {
  bool lens, shortlist;
  Norm norm;
  float epsilon;
};

float sigmoid(float value) { return 1 / (1 + std::exp(-value)); }

// The larger and the second of the log-probabilities of `logits`.
void top_two(float const* logits, std::int64_t count, float* result) {
  float first = -std::numeric_limits<float>::infinity(), second = first, sum = 0;
  for (std::int64_t n = 0; n < count; ++n) {
    second = std::max(second, std::min(first, logits[n]));
    first = std::max(first, logits[n]);
  }
  for (std::int64_t n = 0; n < count; ++n) sum += std::exp(logits[n] - first);
  result[0] = -std::log(sum);
  result[1] = second - first - std::log(sum);
}

void normalize(Kernel const& kernel, float const* scale, float const* shift, std::int64_t size, float* row) {
  double mean = 0, square = 0;
  for (std::int64_t d = 0; d < size && kernel.norm == Norm::kLayer; ++d) mean += row[d];
  mean /= static_cast<double>(size);
  for (std::int64_t d = 0; d < size; ++d) square += (row[d] - mean) * (row[d] - mean);
  auto const factor = static_cast<float>(1 / std::sqrt(square / static_cast<double>(size) + kernel.epsilon));
  for (std::int64_t d = 0; d < size; ++d) {
    row[d] = (row[d] - static_cast<float>(mean)) * factor * scale[d] + (shift == nullptr ? 0 : shift[d]);
  }
}

// The inputs of a run after the hidden states, the last tokens and the thresholds.
struct Inputs {
  Matrix down, shortlist, lens_down, lens_up;
  float const *up, *bias, *confidence, *lens_bias, *scale, *shift;
};

Status* refused() {
  return api.CreateStatus(abi::kInvalidArgument,
                          "TideCandidate takes hidden states [1, n, D], last tokens among the n, a threshold for each, and "
                          "weights that fit");
}

// Reads the inputs in their order and checks their sizes.
class Reader {
 public:
  explicit Reader(Context* context) : context_(context) {}

  Status* next(Tensor& tensor) { return input_of(context_, index_++, tensor); }

  Status* matrix(std::int64_t k_size, Matrix& matrix) {
    Tensor tensor;
    TIDE_RETURN_IF_FAILED(next(tensor));
    if (tensor.rank != 2 || tensor.dims[0] != k_size) return refused();
    matrix = {static_cast<float const*>(tensor.data), k_size, tensor.dims[1]};
    return nullptr;
  }

  Status* vector(std::int64_t size, float const*& data) {
    Tensor tensor;
    TIDE_RETURN_IF_FAILED(next(tensor));
    std::int64_t count = 1;
    for (std::size_t d = 0; d < tensor.rank && d < kMaxRank; ++d) count *= tensor.dims[d];
    if (count != size) return refused();
    data = static_cast<float const*>(tensor.data);
    return nullptr;
  }

  Status* rest(std::size_t& count) const {
    std::size_t all;
    TIDE_RETURN_IF_FAILED(api.KernelContext_GetInputCount(context_, &all));
    count = all - std::min(all, index_);
    return nullptr;
  }

 private:
  Context* const context_;
  std::size_t index_ = 0;
};

Status* read(Kernel const& kernel, Reader& reader, std::int64_t width, Inputs& in) {
  TIDE_RETURN_IF_FAILED(reader.matrix(width, in.down));
  TIDE_RETURN_IF_FAILED(reader.vector(in.down.n_size, in.up));
  TIDE_RETURN_IF_FAILED(reader.vector(1, in.bias));
  if (kernel.shortlist) {
    TIDE_RETURN_IF_FAILED(reader.matrix(width, in.shortlist));
    TIDE_RETURN_IF_FAILED(reader.vector(2 * in.down.n_size, in.confidence));
  }
  if (kernel.lens) {
    TIDE_RETURN_IF_FAILED(reader.matrix(width, in.lens_down));
    TIDE_RETURN_IF_FAILED(reader.matrix(in.lens_down.n_size, in.lens_up));
    if (in.lens_up.n_size != width) return refused();
    TIDE_RETURN_IF_FAILED(reader.vector(width, in.lens_bias));
  }
  in.shift = nullptr;
  if (kernel.norm != Norm::kNone) {
    std::size_t left;
    TIDE_RETURN_IF_FAILED(reader.vector(width, in.scale));
    TIDE_RETURN_IF_FAILED(reader.rest(left));
    if (left > 0) TIDE_RETURN_IF_FAILED(reader.vector(width, in.shift));
  }
  return nullptr;
}

// In `hidden` [rows, width] those of tokens; replaced by what the head reads of them.
Status* make_exit_states(Kernel const& kernel, Context* context, Inputs const& in, std::int64_t width,
                         std::vector<float>& hidden) {
  std::size_t const rows = hidden.size() / static_cast<std::size_t>(width);
  if (kernel.lens) {
    Products low(rows), change(rows);
    low.add(hidden.data(), in.lens_down);
    TIDE_RETURN_IF_FAILED(low.run(context));
    change.add(low.result(0), in.lens_up);
    TIDE_RETURN_IF_FAILED(change.run(context));
    float const* sum = change.result(0);
    for (std::size_t row = 0; row < rows; ++row, sum += width) {
      float* const one = hidden.data() + row * static_cast<std::size_t>(width);
      for (std::int64_t d = 0; d < width; ++d) one[d] += sum[d] + in.lens_bias[d];
    }
  }
  if (kernel.norm == Norm::kNone) return nullptr;
  for (std::size_t row = 0; row < rows; ++row) {
    normalize(kernel, in.scale, in.shift, width, hidden.data() + row * static_cast<std::size_t>(width));
  }
  return nullptr;
}

// The router's scores of what the head reads, one for each of `scores`.
Status* make_scores(Kernel const& kernel, Context* context, Inputs const& in, std::vector<float> const& hidden,
                    std::vector<float>& scores) {
  Products products(scores.size());
  products.add(hidden.data(), in.down);
  if (kernel.shortlist) products.add(hidden.data(), in.shortlist);
  TIDE_RETURN_IF_FAILED(products.run(context));
  float const* inner = products.result(0);
  float const* logits = kernel.shortlist ? products.result(1) : nullptr;
  for (float& score : scores) {
    float summary[2] = {0, 0};
    if (kernel.shortlist) {
      top_two(logits, in.shortlist.n_size, summary);
      logits += in.shortlist.n_size;
    }
    float sum = *in.bias;
    for (std::int64_t r = 0; r < in.down.n_size; ++r) {
      float value = inner[r];
      if (kernel.shortlist) value += summary[0] * in.confidence[r] + summary[1] * in.confidence[in.down.n_size + r];
      sum += value * sigmoid(value) * in.up[r];
    }
    inner += in.down.n_size;
    score = sigmoid(sum);
  }
  return nullptr;
}

template <typename T>
Status* output(Context* context, std::size_t index, std::int64_t const (&dims)[2], T*& data) {
  Value* value;
  TIDE_RETURN_IF_FAILED(api.KernelContext_GetOutput(context, index, dims, 2, &value));
  return api.GetTensorMutableData(value, reinterpret_cast<void**>(&data));
}

// The outputs, a row for each last token.
struct Outputs {
  float *candidates, *scores;
  bool* exits;
};

// Computes the rows `scored` of `last`, the tokens' indices, and of the outputs.
Status* compute_rows(Kernel const& kernel, Context* context, Inputs const& in, Tensor const& hidden,
                     std::int64_t const* last, float const* thresholds, std::vector<std::size_t> const& scored,
                     Outputs const& out) {
  std::int64_t const width = hidden.dims[2];
  auto const size = static_cast<std::size_t>(width);
  std::vector<float> rows(scored.size() * size), scores(scored.size());
  for (std::size_t i = 0; i < scored.size(); ++i) {
    std::int64_t const token = last[scored[i]] + (last[scored[i]] < 0 ? hidden.dims[1] : 0);
    if (token < 0 || token >= hidden.dims[1]) return refused();
    std::copy_n(static_cast<float const*>(hidden.data) + token * width, width, rows.data() + i * size);
  }
  TIDE_RETURN_IF_FAILED(make_exit_states(kernel, context, in, width, rows));
  TIDE_RETURN_IF_FAILED(make_scores(kernel, context, in, rows, scores));
  for (std::size_t i = 0; i < scored.size(); ++i) {
    std::size_t const row = scored[i];
    std::copy_n(rows.data() + i * size, width, out.candidates + row * size);
    out.scores[row] = scores[i];
    out.exits[row] = scores[i] > thresholds[row];
  }
  return nullptr;
}

Status* compute(void* self, Context* context) {
  Kernel const& kernel = *static_cast<Kernel const*>(self);
  Reader reader(context);
  Tensor hidden, last;
  float const* thresholds = nullptr;
  TIDE_RETURN_IF_FAILED(reader.next(hidden));
  TIDE_RETURN_IF_FAILED(reader.next(last));
  if (hidden.rank != 3 || hidden.dims[0] != 1 || last.rank != 1) return refused();
  std::int64_t const rows = last.dims[0], width = hidden.dims[2];
  TIDE_RETURN_IF_FAILED(reader.vector(rows, thresholds));
  Outputs out;
  TIDE_RETURN_IF_FAILED(output(context, 0, {rows, width}, out.candidates));
  TIDE_RETURN_IF_FAILED(output(context, 1, {rows, 1}, out.scores));
  TIDE_RETURN_IF_FAILED(output(context, 2, {rows, 1}, out.exits));
  // Of a token that cannot exit neither score nor candidate will be read.
  std::fill_n(out.candidates, rows * width, 0.0f);
  std::fill_n(out.scores, rows, std::numeric_limits<float>::quiet_NaN());
  std::fill_n(out.exits, rows, false);
  try {
    std::vector<std::size_t> scored;
    for (std::int64_t row = 0; row < rows; ++row) {
      if (!(thresholds[row] > 1)) scored.push_back(static_cast<std::size_t>(row));
    }
    if (scored.empty()) return nullptr;  // and no weight is read
    Inputs in;
    TIDE_RETURN_IF_FAILED(read(kernel, reader, width, in));
    auto const* const tokens = static_cast<std::int64_t const*>(last.data);
    return compute_rows(kernel, context, in, hidden, tokens, thresholds, scored, out);
  } catch (std::bad_alloc const&) {
    return api.CreateStatus(abi::kInvalidArgument, "TideCandidate: not enough memory");
  }
}

Status* create(Operator const*, void const*, void const* info, void** kernel) {
  std::int64_t lens, shortlist;
  float epsilon;
  char norm[8];
  std::size_t size = sizeof norm;
  TIDE_RETURN_IF_FAILED(api.KernelInfoGetAttribute_int64(info, "lens", &lens));
  TIDE_RETURN_IF_FAILED(api.KernelInfoGetAttribute_int64(info, "shortlist", &shortlist));
  TIDE_RETURN_IF_FAILED(api.KernelInfoGetAttribute_float(info, "epsilon", &epsilon));
  TIDE_RETURN_IF_FAILED(api.KernelInfoGetAttribute_string(info, "norm", norm, &size));
  Norm const kind = std::strcmp(norm, "rms") == 0     ? Norm::kRms
                    : std::strcmp(norm, "layer") == 0 ? Norm::kLayer
                                                      : Norm::kNone;
  *kernel = new (std::nothrow) Kernel{lens != 0, shortlist != 0, kind, epsilon};
  if (*kernel == nullptr) return api.CreateStatus(abi::kInvalidArgument, "TideCandidate: not enough memory");
  return nullptr;
}

}  // namespace

Operator candidate_operator(bool lens) {
  Operator op = cpu_operator();
  op.GetName = lens ? [](Operator const*) { return "TideLensCandidate"; } : [](Operator const*) { return "TideCandidate"; };
  op.GetInputType = [](Operator const*, std::size_t index) { return index == 1 ? abi::kInt64 : abi::kFloat; };
  op.GetInputTypeCount = [](Operator const*) { return kRequired + 1; };
  op.GetInputCharacteristic = [](Operator const*, std::size_t index) { return index < kRequired ? 0 : abi::kVariadic; };
  op.GetOutputType = [](Operator const*, std::size_t index) { return index < 2 ? abi::kFloat : abi::kBool; };
  op.GetOutputTypeCount = [](Operator const*) -> std::size_t { return 3; };
  op.CreateKernelV2 = create;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.KernelComputeV2 = compute;
  return op;
}

}  // namespace tide_ops
