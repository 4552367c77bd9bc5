#include "text/tokenizer.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>

#include "bundle/json.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {

// The C binding, as tokenizers_c.h of github.com/mlc-ai/tokenizers-cpp declares it.
namespace binding {

struct Encoded {
  int* ids;
  std::size_t count;
};
using Handle = void*;
using New = Handle (*)(char const* json, std::size_t size);
using Encode = void (*)(Handle, char const* text, std::size_t size, int special_tokens, Encoded* result);
using FreeEncoded = void (*)(Encoded* results, std::size_t count);
using Decode = void (*)(Handle, std::uint32_t const* ids, std::size_t count, int skip_special_tokens);
using GetDecoded = void (*)(Handle, char const** text, std::size_t* size);
using Free = void (*)(Handle);

}  // namespace binding

namespace {

constexpr char const* kTokenizersVariable = "TIDE_TOKENIZERS";
#ifdef __APPLE__
constexpr char const* kTokenizersLibrary = "libtokenizers_c.dylib";
#else
constexpr char const* kTokenizersLibrary = "libtokenizers_c.so";
#endif

std::string reason() {
  char const* const text = dlerror();
  return text != nullptr ? text : "it does not say why";
}

template <typename F>
F function(void* library, std::string const& path, char const* name) {
  auto const found = reinterpret_cast<F>(dlsym(library, name));
  if (found != nullptr) return found;
  throw ProviderError("'" + path + "' is no library with the C binding of tokenizers: " + reason());
}

// The content of a tokenizer.json that neither truncates nor pads text, which a file may say that was trained so. The
// binding ends the process where it cannot read the file, so what can be checked is.
std::string checked(BundleFile const& file) {
  std::string content = file.read();
  std::optional<Json> const json = Json::parse(content);
  if (!json || !json->is(Json::Kind::object) || json->object.count("model") == 0) {
    throw BundleError(quoted(file.path()) + " is not a usable tokenizer: it is no JSON object with a model");
  }
  std::map<std::size_t, std::size_t> omitted;  // from where to where, in the text
  for (char const* const name : {"truncation", "padding"}) {
    auto const found = json->object.find(name);
    if (found != json->object.end()) omitted[found->second.begin] = found->second.end;
  }
  for (auto range = omitted.rbegin(); range != omitted.rend(); ++range) {  // from the end, so that places stay
    content.replace(range->first, range->second - range->first, "null");
  }
  return content;
}

void check_text(std::string const& text) {
  if (!is_utf8(text)) throw GenerationError("the prompt is not valid UTF-8");
}

}  // namespace

// The functions of an open library, and one tokenizer of it. The library is never closed: it may have started threads.
class Tokenizer::Library {
 public:
  Library(void* library, std::string const& path, std::string const& json)
      : encode_(function<binding::Encode>(library, path, "tokenizers_encode")),
        free_encoded_(function<binding::FreeEncoded>(library, path, "tokenizers_free_encode_results")),
        decode_(function<binding::Decode>(library, path, "tokenizers_decode")),
        get_decoded_(function<binding::GetDecoded>(library, path, "tokenizers_get_decode_str")),
        free_(function<binding::Free>(library, path, "tokenizers_free")),
        handle_(function<binding::New>(library, path, "tokenizers_new_from_str")(json.data(), json.size())) {}
  ~Library() { free_(handle_); }
  Library(Library const&) = delete;
  Library& operator=(Library const&) = delete;

  std::vector<std::int64_t> encode(std::string const& text, bool special_tokens) {
    std::lock_guard<std::mutex> const lock(mutex_);
    binding::Encoded encoded{};
    encode_(handle_, text.data(), text.size(), special_tokens ? 1 : 0, &encoded);
    std::vector<std::int64_t> const ids(encoded.ids, encoded.ids + encoded.count);
    free_encoded_(&encoded, 1);
    return ids;
  }

  std::string decode(std::vector<std::int64_t> const& ids, bool special_tokens) {
    std::vector<std::uint32_t> const narrow(ids.begin(), ids.end());
    std::lock_guard<std::mutex> const lock(mutex_);  // the text is in the handle
    decode_(handle_, narrow.data(), narrow.size(), special_tokens ? 0 : 1);
    char const* text = nullptr;
    std::size_t size = 0;
    get_decoded_(handle_, &text, &size);
    return size == 0 ? std::string() : std::string(text, size);
  }

 private:
  binding::Encode const encode_;
  binding::FreeEncoded const free_encoded_;
  binding::Decode const decode_;
  binding::GetDecoded const get_decoded_;
  binding::Free const free_;
  binding::Handle const handle_;
  std::mutex mutex_;
};

std::vector<std::int64_t> Tokenizer::encode(std::string const& text, bool special_tokens) const {
  check_text(text);
  return library_->encode(text, special_tokens);
}

std::string Tokenizer::decode(std::vector<std::int64_t> const& ids, bool special_tokens) const {
  return ids.empty() ? "" : library_->decode(ids, special_tokens);
}

Tokenizer open_tokenizer(Bundle const& bundle, std::optional<std::filesystem::path> const& library) {
  auto const file = bundle.files.find(kTokenizerFile);
  if (file == bundle.files.end()) {
    throw BundleError("bundle " + bundle.path.string() + " holds no " + kTokenizerFile +
                      ", so it can only be run on token ids");
  }
  std::string const content = checked(*file->second);
  char const* const variable = std::getenv(kTokenizersVariable);
  std::string path = variable != nullptr && *variable != '\0' ? variable : kTokenizersLibrary;
  if (library) path = library->string();
  void* const opened = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (opened == nullptr) {
    throw ProviderError("text needs a library with the C binding of tokenizers: " + reason() + "; set " +
                        kTokenizersVariable + " to one, or give token ids");
  }
  return Tokenizer(std::make_shared<Tokenizer::Library>(opened, path, content));
}

}  // namespace tide
