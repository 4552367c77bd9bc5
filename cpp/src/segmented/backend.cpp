#include "segmented/backend.h"

#include <algorithm>
#include <cstring>

#include "generation_error.h"
#include "segmented/batch.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::size_t kStaged = std::size_t{16} << 20;  // bytes of a file that cross to a device at a time

// The content of a file in the device's memory.
Buffer uploaded(BundleFile const& file, Device& device) {
  std::shared_ptr<Mapping const> const content = file.map();
  Buffer const memory = device.allocate(content->size());
  Buffer const staging = device.staging(std::min(kStaged, content->size()));
  for (std::size_t at = 0; at < content->size(); at += staging.size) {
    std::size_t const size = std::min(staging.size, content->size() - at);
    std::memcpy(staging.address, content->data() + at, size);
    device.upload(memory.address + at, staging.address, size);
    device.synchronize();
  }
  file.check_unchanged();
  return memory;
}

}  // namespace

SegmentBackend::SegmentBackend(Bundle bundle, std::string provider, std::vector<NetworkSpec> specs, OpenDevice open_device)
    : Backend(std::move(bundle), std::move(provider)), specs_(std::move(specs)), open_device_(std::move(open_device)) {
  if (!is_of(specs_.back(), NetworksOf::drafter)) return;
  drafter_spec_ = std::move(specs_.back());
  specs_.pop_back();
  drafts_info_ = drafts_info(*manifest().drafter);
  if (manifest().drafter->state_size == manifest().networks->exit_size) return;
  throw BundleError("bundle '" + this->bundle().path.string() + "' gives hidden states of " +
                    std::to_string(manifest().networks->exit_size) + " numbers, not of the " +
                    std::to_string(manifest().drafter->state_size) + " that the drafter reads: export it again");
}

std::unique_ptr<Drafts> SegmentBackend::start_drafts(std::size_t slots, Batch&) {
  if (!drafter_spec_) return nullptr;
  return or_generation_error("cannot start the drafter", [&] {
    std::size_t const count = std::min(slots, max_batch_size());
    std::unique_ptr<DraftBuffers> buffers = idle_drafts_.pop(count);
    if (buffers == nullptr) {
      buffers = std::make_unique<DraftBuffers>(*drafter_spec_, open(NetworksOf::drafter), *manifest().networks,
                                               *drafts_info_, count);
    }
    return std::make_unique<SegmentedDrafts>(*this, std::move(buffers));
  });
}

DeviceNetworks SegmentBackend::open(NetworksOf part) {
  DeviceNetworks opened = open_device_(part);
  if (!manifest().networks->embedding) return opened;
  std::lock_guard<std::mutex> const lock(embedding_mutex_);
  if (embedding_.address == nullptr) embedding_ = uploaded(bundle().file(kEmbeddingFile), *opened.device);
  opened.embedding = embedding_;
  return opened;
}

std::size_t SegmentBackend::max_batch_size() const {
  return static_cast<std::size_t>(manifest().networks->max_batch_size);
}

std::unique_ptr<Batch> SegmentBackend::start_batch(double compaction_threshold, std::size_t slots) {
  return or_generation_error("cannot start a batch", [&] {
    std::size_t const count = std::min(slots, max_batch_size());
    return std::make_unique<SegmentedBatch>(*this, take(count), compaction_threshold, count);
  });
}

std::unique_ptr<SegmentBuffers> SegmentBackend::take(std::size_t slots) {
  std::unique_ptr<SegmentBuffers> buffers = (slots == 1 ? idle_ : idle_batches_).pop(slots);
  if (buffers == nullptr) {
    return std::make_unique<SegmentBuffers>(specs_, open(NetworksOf::sequences), *manifest().networks, slots);
  }
  for (std::size_t slot = 0; slot < buffers->slots(); ++slot) buffers->clear(slot);
  return buffers;
}

void SegmentBackend::give_back(std::unique_ptr<SegmentBuffers> buffers) noexcept {
  (buffers->slots() == 1 ? idle_ : idle_batches_).push(std::move(buffers));
}

}  // namespace tide
