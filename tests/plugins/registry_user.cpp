// Does in NVIDIA's own TensorRT what a program does with the plugin library, as far as a machine without a GPU allows:
//   registry_user LIBNVINFER LIBTIDE_PLUGINS
// Loads the plugins through the registry, creates one for either phase, clones it, attaches it, makes another from what
// it serialises, and unloads them. For tests/plugins/test_real_tensorrt.py. Ends with 0, or says what went wrong.
#include <NvInfer.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

using namespace nvinfer1;

namespace {

void expect(bool condition, std::string const& what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

template <class Function>
Function function(void* library, char const* name) {
  void* const found = dlsym(library, name);
  expect(found != nullptr, std::string("no function ") + name);
  return reinterpret_cast<Function>(found);
}

IPluginCreatorV3One* find(IPluginRegistry& registry) {
  return static_cast<IPluginCreatorV3One*>(registry.getCreator("TideExit", "1", "tide"));
}

bool is(InterfaceInfo const& info, char const* kind, int32_t major) {
  return std::strcmp(info.kind, kind) == 0 && info.major == major && info.minor == 0;
}

void expect_capabilities(IPluginV3& plugin, std::string const& which) {
  struct {
    PluginCapabilityType type;
    char const* kind;
    int32_t major;
  } const wanted[] = {{PluginCapabilityType::kCORE, "PLUGIN_V3ONE_CORE", 1},
                      {PluginCapabilityType::kBUILD, "PLUGIN_V3ONE_BUILD", 2},
                      {PluginCapabilityType::kRUNTIME, "PLUGIN_V3ONE_RUNTIME", 1}};
  expect(is(plugin.getInterfaceInfo(), "PLUGIN", 1), which + " is no plugin");
  for (auto const& [type, kind, major] : wanted) {
    IPluginCapability* const capability = plugin.getCapabilityInterface(type);
    expect(capability != nullptr && is(capability->getInterfaceInfo(), kind, major), which + " lacks " + kind);
  }
}

IPluginV3OneRuntime& runtime_of(IPluginV3& plugin) {
  return *static_cast<IPluginV3OneRuntime*>(plugin.getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

}  // namespace

int main(int, char** arguments) {
  void* const tensorrt = dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL);
  expect(tensorrt != nullptr, "TensorRT does not load");
  std::printf("%d\n", static_cast<int>(function<int32_t (*)()>(tensorrt, "getInferLibVersion")()));
  IPluginRegistry& registry = *function<IPluginRegistry* (*)()>(tensorrt, "getPluginRegistry")();

  int32_t before = 0, after = 0;
  registry.getAllCreators(&before);
  expect(find(registry) == nullptr, "registered before it was loaded");
  void* const handle = registry.loadLibrary(arguments[2]);
  expect(handle != nullptr, "the plugin library does not load");
  registry.getAllCreators(&after);
  expect(after == before + 1, "not one creator more");
  IPluginCreatorV3One* const creator = find(registry);
  expect(creator != nullptr, "not registered");
  expect(is(creator->getInterfaceInfo(), "PLUGIN CREATOR_V3ONE", 1), "another kind of creator");
  expect(!registry.registerCreator(*creator, "tide"), "registered twice");

  float const epsilon = 1e-6f;
  int32_t const one = 1;
  PluginField const given[] = {{"norm", "rms", PluginFieldType::kCHAR, 3},
                               {"epsilon", &epsilon, PluginFieldType::kFLOAT32, 1},
                               {"lens", &one, PluginFieldType::kINT32, 1},
                               {"shortlist", &one, PluginFieldType::kINT32, 1}};
  PluginFieldCollection const fields{4, given};
  std::unique_ptr<IPluginV3> built(creator->createPlugin("node", &fields, TensorRTPhase::kBUILD));
  expect(built != nullptr, "not created to build");
  expect_capabilities(*built, "the one to build");
  std::unique_ptr<IPluginV3> copy(built->clone());
  built.reset();
  expect(copy != nullptr, "not cloned");
  expect_capabilities(*copy, "the clone");

  // What the builder stores in an engine, and the runtime makes of it.
  PluginFieldCollection const* const stored = runtime_of(*copy).getFieldsToSerialize();
  expect(stored != nullptr && stored->nbFields == 4, "not four fields to serialise");
  std::unique_ptr<IPluginV3> loaded(creator->createPlugin("node", stored, TensorRTPhase::kRUNTIME));
  expect(loaded != nullptr, "not created from what it serialises");
  std::unique_ptr<IPluginV3> attached(runtime_of(*loaded).attachToContext(nullptr));
  expect(attached != nullptr, "not attached");
  expect_capabilities(*attached, "the attached one");
  PluginFieldCollection const* const again = runtime_of(*attached).getFieldsToSerialize();
  for (int32_t i = 0; i < 4; ++i) {
    PluginField const& field = again->fields[i];
    expect(std::strcmp(field.name, given[i].name) == 0 && field.type == given[i].type,
           std::string("another field than ") + given[i].name);
    size_t const size = field.type == PluginFieldType::kCHAR ? 3 : 4;
    expect(std::memcmp(field.data, given[i].data, size) == 0, std::string("another value of ") + given[i].name);
  }
  copy.reset();
  loaded.reset();
  attached.reset();

  registry.deregisterLibrary(handle);
  expect(find(registry) == nullptr, "registered after it was unloaded");
  return 0;
}
