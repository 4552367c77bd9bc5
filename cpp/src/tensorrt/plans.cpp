// Checks of plans that need no TensorRT. Messages are those of tide_export/runtime/tensorrt/plans.py.
#include "tensorrt/plans.h"

#include <algorithm>

#include "formatting.h"
#include "names.h"
#include "tide/errors.h"

namespace tide {
namespace {

// Of the GPUs that plans of TensorRT for RTX run on, wherever they were built.
std::vector<std::string> const kRtxCapabilities = {"8.0", "8.6", "8.9", "12.0", "12.1"};

bool contains(std::vector<std::string> const& list, std::string const& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

}  // namespace

bool is_flavour(std::string const& name) { return name == "tensorrt" || name == "tensorrt-rtx"; }

bool has_drafter_plan(Manifest const& manifest) {
  return manifest.has_drafter_network() && manifest.files.count(plan_file(names::kDrafter)) == 1;
}

std::string title_of(std::string const& flavour) { return flavour == "tensorrt" ? "TensorRT" : "TensorRT for RTX"; }

void check_plans(Bundle const& bundle, std::string const& flavour) {
  auto const& plans = bundle.manifest.engines;
  std::string const path = bundle.path.string(), build = "`tide-export build " + path + " --target " + flavour + "`";
  if (!bundle.manifest.networks || bundle.manifest.networks->cuda) {
    throw ProviderError("bundle '" + path + "' holds no networks for provider '" + flavour +
                        "': export it with --target " + flavour + ", or use provider 'cpu'");
  }
  if (!plans) {
    throw ProviderError("bundle '" + path + "' holds no TensorRT plans: build them with " + build +
                        ", or use provider 'cpu'");
  }
  if (plans->flavour != flavour) {
    throw ProviderError("the plans of bundle '" + path + "' are of " + title_of(plans->flavour) +
                        ": use provider '" + plans->flavour + "', or build others with " + build);
  }
  std::string const &plan = plans->weights_sha256, &model = bundle.manifest.model.weights_sha256;
  if (plan != model) {
    throw BundleError("the plans of bundle '" + path + "' were built from other weights than its model's (sha256 " +
                      plan.substr(0, 12) + ", not " + model.substr(0, 12) + "): build them again");
  }
}

void check_machine(Bundle const& bundle, std::string const& version, ComputeCapability device) {
  PlansInfo const& plans = bundle.manifest.engines.value();
  std::string const path = bundle.path.string(), title = title_of(plans.flavour);
  std::string again = "build them again with `tide-export build " + path + " --target " + plans.flavour + "`";
  if (plans.version != version) {
    throw ProviderError("the plans of bundle '" + path + "' were built by " + title + " " + plans.version +
                        " and run on no other, but " + version + " is installed: " + again);
  }
  if (device.major == 0) throw ProviderError(title + " needs an NVIDIA GPU and its driver, and there is none here");
  bool const rtx = plans.flavour == "tensorrt-rtx";
  std::string const here = std::to_string(device.major) + "." + std::to_string(device.minor);
  std::vector<std::string> built = plans.compute_capabilities;
  if (built.empty() && rtx) built = kRtxCapabilities;
  if (contains(built, here)) return;
  if (rtx && !contains(kRtxCapabilities, here)) {  // no plan of this flavour runs on it
    again = "build others with `tide-export build " + path + " --target tensorrt`";
  }
  std::string listed;
  for (std::string const& one : built) listed += (listed.empty() ? "" : ", ") + one;
  throw ProviderError("the plans of bundle '" + path + "' were built for GPUs of compute capability " + listed +
                      ", this one has " + here + ": " + again);
}

}  // namespace tide
