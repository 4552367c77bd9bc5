#include "tensorrt/plugins.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>
#include <vector>

#include "tensorrt/plans.h"
#include "bundle/sha256.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr char const* kVariable = "TIDE_PLUGINS";
constexpr char kFound = '+', kFailed = '-';  // the first byte of an answer

// In the child process: writes kFound and the two versions, a line each, or kFailed and the reason. The library may
// crash, and other threads do not exist here: takes no locks and runs no destructors.
[[noreturn]] void answer_in_child(char const* path, int answers) {
  for (int const signal : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTERM}) std::signal(signal, SIG_DFL);
  int const null_device = open("/dev/null", O_WRONLY);
  for (int const output : {STDOUT_FILENO, STDERR_FILENO}) dup2(null_device, output);
  auto const send = [&](char const* text) { (void)!write(answers, text, std::strlen(text)); };
  auto const fail = [&] {
    char const* const reason = dlerror();
    send("-");
    send(reason != nullptr ? reason : "it does not say why");
    _exit(0);
  };
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail();
  char const* versions[2];
  char const* const functions[] = {"tide_plugins_version", "tide_plugins_tensorrt_version"};
  for (int i = 0; i < 2; ++i) {
    auto const function = reinterpret_cast<char const* (*)()>(dlsym(library, functions[i]));
    if (function == nullptr) fail();
    versions[i] = function();
  }
  if (dlsym(library, kCopiedBytes) == nullptr) fail();
  send("+");
  for (char const* version : versions) {
    send(version);
    send("\n");
  }
  _exit(0);
}

// A pipe that no program started meanwhile keeps open; false: there is none.
bool open_pipe(int (&ends)[2]) {
#ifdef __APPLE__  // it has no pipe2
  if (pipe(ends) != 0) return false;
  for (int const end : ends) fcntl(end, F_SETFD, FD_CLOEXEC);
  return true;
#else
  return pipe2(ends, O_CLOEXEC) == 0;
#endif
}

// The two versions of the library at `path`. Throws ProviderError: it does not return them; `what` is its name in
// messages.
std::string versions_of(std::filesystem::path const& path, std::string const& what) {
  int ends[2];
  if (!open_pipe(ends)) throw ProviderError(what + " cannot be asked: " + std::strerror(errno));
  pid_t const child = fork();
  if (child == 0) answer_in_child(path.c_str(), ends[1]);
  int const fork_error = errno;
  close(ends[1]);
  std::string answer;
  char chunk[256];
  for (ssize_t size; child > 0 && ((size = read(ends[0], chunk, sizeof chunk)) > 0 || (size < 0 && errno == EINTR));) {
    if (size > 0) answer.append(chunk, static_cast<std::size_t>(size));
  }
  close(ends[0]);
  if (child < 0) throw ProviderError(what + " cannot be asked: " + std::strerror(fork_error));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!answer.empty() && answer[0] == kFound && WIFEXITED(status)) return answer.substr(1);
  std::string reason = answer.empty() || answer[0] != kFailed ? "it does not say why" : answer.substr(1);
  if (WIFSIGNALED(status)) {
    char const* const name = sigabbrev_np(WTERMSIG(status));
    reason = std::string("opening it crashes (SIG") + (name != nullptr ? name : "nal") + ")";
  }
  throw ProviderError(what + " is damaged or no plugin library of tide_export: " + reason.substr(0, reason.find('\n')));
}

std::string major_of(std::string const& version) { return version.substr(0, version.find('.')); }

}  // namespace

std::optional<PluginLibrary> find_plugins(std::optional<std::filesystem::path> const& chosen) {
  char const* const variable = std::getenv(kVariable);
  std::filesystem::path const named = chosen ? *chosen : variable != nullptr ? variable : "";
  if (named.empty() || named == kNoPlugins) return std::nullopt;
  std::string const what = "the plugin library " + quoted(named);
  std::string const without = std::string(", or do without it: plugins '") + kNoPlugins + "'";
  std::error_code error;
  if (!std::filesystem::is_regular_file(named, error)) {
    throw ProviderError(what + " does not exist: build it (plugins/README.md)" + without);
  }
  std::filesystem::path const path = std::filesystem::absolute(named);
  std::string const answer = versions_of(path, what);
  std::size_t const line = answer.find('\n');
  PluginLibrary library{path, answer.substr(0, line), answer.substr(line + 1), ""};
  library.tensorrt.resize(library.tensorrt.find('\n'));
  if (library.version != TIDE_EXPORT_VERSION) {
    throw ProviderError(what + " belongs to tide_export " + library.version + ", but this is " TIDE_EXPORT_VERSION
                        ": build it from this release's plugins/" + without);
  }
  std::ifstream stream(path, std::ios::binary);
  library.sha256 = sha256([&stream](char* to, std::size_t size) {
    stream.read(to, static_cast<std::streamsize>(size));
    return static_cast<std::size_t>(stream.gcount());
  });
  return library;
}

PluginLibrary plugins_to_load(Bundle const& bundle, std::string const& version,
                              std::optional<std::filesystem::path> const& path,
                              std::function<void(std::string const&)> const& log) {
  PluginsInfo const& needed = bundle.manifest.engines.value().plugins.value();
  std::optional<PluginLibrary> const found = find_plugins(path);
  std::string const plans = "the plans of bundle " + quoted(bundle.path);
  std::string const without =
      "build the plans again without with `tide-export build " + bundle.path.string() + " --plugins none`";
  if (!found) {
    throw ProviderError(plans + " hold plugins of tide_export " + needed.version +
                        " and no plugin library is named here: name it as plugins or in the variable " + kVariable +
                        ", or " + without);
  }
  if (found->version != needed.version) {
    throw ProviderError(plans + " hold plugins of tide_export " + needed.version + ", but the library " +
                        quoted(found->path) + " is of " + found->version + ": use the other library and release, or " +
                        without);
  }
  if (major_of(found->tensorrt) != major_of(version)) {
    throw ProviderError("the plugin library " + quoted(found->path) + " was compiled for TensorRT " + found->tensorrt +
                        " and " + version + " is installed: build it with the headers of that version");
  }
  if (found->sha256 != needed.sha256) {
    log("the plugin library " + quoted(found->path) + " is another build than " + plans + " were built with");
  }
  return *found;
}

}  // namespace tide
