// Two or three launches: the rows' moments where there is a norm, the projection onto `down` and the shortlist, and
// `Finish`, which adds the projection's slices and goes through the small rest of the router, one block per row.
#include "tide_route/kernel.cuh"

#include "common/norm.cuh"
#include "common/project.cuh"

namespace tide {
namespace {

struct FinishArgs {
  TideRouteArgs route;
  const float* partial;
  int64_t slices;
};

struct Finish {
  static constexpr int kThreads = 128;
  using Args = FinishArgs;
  union Shared {
    TopTwo top[kThreads];
    float sums[kThreads];
  };

  template <class B>
  static TIDE_DEVICE void run(B& block, Shared& shared, const Args& args) {
    const TideRouteArgs& route = args.route;
    const int64_t row = block.x, columns = route.bottleneck + route.shortlist;
    const float* products = args.partial + row * columns;
    const auto product = [&](int64_t column) {
      return slice_sum(products + column, args.slices, route.rows * columns);
    };

    float first = 0.0f, second = 0.0f;
    if (route.shortlist > 0) {
      block.phase([&](int thread) {
        TopTwo seen = empty_top_two();
        for (int64_t i = thread; i < route.shortlist; i += kThreads) seen = with(seen, product(route.bottleneck + i));
        shared.top[thread] = seen;
      });
      fold<kThreads>(block, shared.top, [](TopTwo a, TopTwo b) { return merged(a, b); });
      first = first_log_probability(shared.top[0]);
      second = second_log_probability(shared.top[0]);
      block.phase([](int) {});  // all have read slot 0 before `sums`, which lies in its place, is written
    }
    block.phase([&](int thread) {
      float sum = 0.0f;
      for (int64_t i = thread; i < route.bottleneck; i += kThreads) {
        float z = product(i);
        if (route.shortlist > 0)
          z += first * element(route.confidence, route.weights_type, i) +
               second * element(route.confidence, route.weights_type, route.bottleneck + i);
        sum += silu(z) * element(route.up, route.weights_type, i);
      }
      shared.sums[thread] = sum;
    });
    fold<kThreads>(block, shared.sums, [](float a, float b) { return a + b; });
    block.phase([&](int thread) {
      if (thread != 0) return;
      const float score = sigmoid(shared.sums[0] + element(route.bias, route.weights_type, 0));
      route.scores[row] = score;
      route.exits[row] = score > element(route.threshold, route.threshold_type, row * route.threshold_stride);
    });
  }
};

int64_t moments_bytes(const TideRouteArgs& args) {
  return args.norm.kind == TIDE_NORM_NONE ? 0 : blocks_for(args.rows * int64_t{sizeof(Moments)}, 256) * 256;
}

bool usable(const TideRouteArgs& args) {
  const bool sizes = args.rows >= 0 && args.rows <= INT32_MAX && args.hidden > 0 && args.bottleneck > 0 &&
                     args.shortlist >= 0 && args.shortlist != 1 && (args.rows <= 1 || args.states_stride >= 0);
  const bool types = known_type(args.states_type) && known_type(args.threshold_type) &&
                     (args.weights_type == args.states_type || args.weights_type == TIDE_FLOAT32);
  return sizes && types && usable_norm(args.norm);
}

bool complete(const TideRouteArgs& args) {
  return args.states && args.down && args.up && args.bias && args.threshold && args.scores && args.exits &&
         (args.shortlist == 0 || (args.shortlist_weight && args.confidence));
}

}  // namespace
}  // namespace tide

extern "C" int64_t tide_route_workspace(const TideRouteArgs* args) {
  return tide::moments_bytes(*args) +
         tide::partial_size(args->rows, args->hidden, args->bottleneck + args->shortlist) * int64_t{sizeof(float)};
}

extern "C" cudaError_t tide_route(const TideRouteArgs* args, void* workspace, int64_t workspace_bytes,
                                  cudaStream_t stream) {
  using namespace tide;
  if (args == nullptr || !usable(*args)) return cudaErrorInvalidValue;
  if (args->rows == 0) return cudaSuccess;
  if (!complete(*args) || workspace == nullptr || workspace_bytes < tide_route_workspace(args))
    return cudaErrorInvalidValue;

  Moments* moments = args->norm.kind == TIDE_NORM_NONE ? nullptr : static_cast<Moments*>(workspace);
  float* partial = reinterpret_cast<float*>(static_cast<char*>(workspace) + moments_bytes(*args));
  cudaError_t status = cudaSuccess;
  if (moments != nullptr)
    status = row_moments(args->states, args->states_type, args->rows, args->hidden, args->states_stride,
                         args->norm.kind, args->norm.epsilon, moments, stream);
  if (status != cudaSuccess) return status;

  Projection projection{};
  projection.x = args->states;
  projection.x_type = args->states_type;
  projection.rows = args->rows;
  projection.depth = args->hidden;
  projection.x_stride = args->states_stride;
  projection.moments = moments;
  projection.scale = args->norm.scale;
  projection.shift = args->norm.shift;
  projection.scale_offset = args->norm.scale_offset;
  projection.weights_type = args->weights_type;
  projection.weights[0] = {args->down, args->bottleneck, false};
  projection.weights[1] = {args->shortlist_weight, args->shortlist, false};
  projection.partial = partial;
  status = project(projection, stream);
  if (status != cudaSuccess) return status;
  return launch<Finish>(dim3(static_cast<unsigned>(args->rows)), {*args, partial, slices(args->rows, args->hidden)}, stream);
}
