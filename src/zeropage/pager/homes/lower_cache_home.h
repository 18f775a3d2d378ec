// The home of a device's pages: the host's cache below it, reached by uploads and downloads. It is to the device's
// cache what a disk is to the host's.
//
// For the cache above, an upload ends as soon as the device was asked for it: users of the frame wait for its event.
// The host's page stays pinned until the device has read it.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "zeropage/base/mutex.h"
#include "zeropage/pager/frame_cache.h"

namespace zeropage {

class LowerCacheHome final : public Home {
 public:
  /// `upper`: of the cache whose home this is.
  LowerCacheHome(Monitor& upper, FrameCache& lower, DeviceMemory& device)
      : upper_(upper), lower_(lower), device_(device) {}
  ~LowerCacheHome() override;

  std::optional<Outcome> read(const Run& run, std::size_t page, std::byte* into, Priority priority,
                              Done done) override;
  std::optional<Outcome> write(const Run& run, std::size_t page, const std::byte* from,
                               const DeviceMemory::Event& after, Priority priority, Done done) override;
  bool ready_to_read(const Run& run, std::size_t page) override;
  bool ready_to_write(const Run& run, std::size_t page) override;
  bool tidy(bool wait) override;
  void finish_reads(const Run& run, std::size_t page) override;
  void forget(const Run& run) noexcept override;

 private:
  struct UnderWay {
    const Run* run;  // only compared: it may have died
    std::size_t page;
    DeviceMemory::Event event;
    PagePin host_page;
    Done done;  // for downloads
    std::exception_ptr error = nullptr;
  };
  using Key = std::tuple<const Run*, std::size_t, Access>;

  PagePin pin(const Run& run, std::size_t page, Access access, Priority priority);
  PagePin find_or_take(const Run& run, std::size_t page, Access access, Priority priority);
  void follow(const Run& run, std::size_t page, Access access);
  bool is_ready(const Run& run, std::size_t page, Access access);
  bool has_ended(UnderWay& transfer) const noexcept;
  bool has_just_ended(std::list<UnderWay>& transfer);
  void wait_for(const DeviceMemory::Event& event);

  Monitor& upper_;
  FrameCache& lower_;
  DeviceMemory& device_;
  Mutex mutex_;                                                  // never held while waiting
  std::list<UnderWay> uploads_, downloads_;                      // oldest first; moved without an allocation
  std::list<UnderWay> lost_;                                     // that the device failed to do
  std::map<Key, PagePin> ready_;                                 // pages found ready, until their transfers start
  std::map<std::pair<const Run*, Access>, std::size_t> passes_;  // the next page of each
};

}  // namespace zeropage
