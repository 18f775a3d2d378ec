#include "zeropage/pager/homes/lower_cache_home.h"

#include "zeropage/base/errors.h"

namespace zeropage {

LowerCacheHome::~LowerCacheHome() {
  for (auto* queue : {&uploads_, &downloads_}) {
    for (UnderWay& transfer : *queue) {
      try {
        device_.wait(transfer.event);
      } catch (...) {  // a lost device reads nothing
      }
    }
  }
}

/// Also if the device has failed: then its error is the transfer's.
bool LowerCacheHome::has_ended(UnderWay& transfer) const noexcept {
  if (transfer.error) return true;
  try {
    return device_.done(transfer.event);
  } catch (...) {
    transfer.error = std::current_exception();
    return true;
  }
}

/// Throws the device's error. The device may then still use the host's page, which is kept.
bool LowerCacheHome::has_just_ended(std::list<UnderWay>& transfer) {
  try {
    return device_.done(transfer.front().event);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    lost_.splice(lost_.end(), transfer);
    throw;
  }
}

/// Waits for the event. Its error is that of its transfer, which has then ended, and is thrown too.
void LowerCacheHome::wait_for(const DeviceMemory::Event& event) {
  try {
    device_.wait(event);
  } catch (...) {
    {
      std::lock_guard lock(mutex_);
      for (auto* queue : {&downloads_, &uploads_}) {
        for (UnderWay& transfer : *queue) {
          if (transfer.event == event) transfer.error = std::current_exception();
        }
      }
    }
    tidy(/*wait=*/false);
    throw;
  }
}

/// Announces one use to the plan below for the pages that the cache above asks for, as long as their numbers grow.
void LowerCacheHome::follow(const Run& run, std::size_t page, Access access) {
  {
    std::lock_guard lock(mutex_);
    const auto [next, is_new] = passes_.try_emplace({&run, access}, page);
    if (!is_new && page >= next->second) return;
    next->second = page;
  }
  const PinRequest request{run.below.get(), access};
  lower_.announce({&request, 1});
}

bool LowerCacheHome::is_ready(const Run& run, std::size_t page, Access access) {
  follow(run, page, access);
  PagePin pin = lower_.try_pin_page(*run.below, page, access);
  if (!pin) return false;
  std::lock_guard lock(mutex_);
  ready_.insert_or_assign({&run, page, access}, std::move(pin));
  return true;
}

bool LowerCacheHome::ready_to_read(const Run& run, std::size_t page) { return is_ready(run, page, Access::read); }
bool LowerCacheHome::ready_to_write(const Run& run, std::size_t page) {
  return is_ready(run, page, Access::overwrite);
}

/// The page below, for a transfer to use now. Only a demanded transfer waits.
PagePin LowerCacheHome::pin(const Run& run, std::size_t page, Access access, Priority priority) {
  PagePin host_page = find_or_take(run, page, access, priority);
  if (priority == Priority::demanded) {
    host_page.wait();
  } else if (!host_page.try_wait()) {
    throw BudgetError("the page in host_memory is in use");  // it was ready a moment ago
  }
  return host_page;
}

PagePin LowerCacheHome::find_or_take(const Run& run, std::size_t page, Access access, Priority priority) {
  follow(run, page, access);
  {
    std::lock_guard lock(mutex_);
    passes_[{&run, access}] = page + 1;
    if (const auto found = ready_.find({&run, page, access}); found != ready_.end()) {
      PagePin pin = std::move(found->second);
      ready_.erase(found);
      return pin;
    }
  }
  while (true) {
    try {
      if (priority == Priority::demanded) return lower_.pin_page(*run.below, page, access);
      if (PagePin pin = lower_.try_pin_page(*run.below, page, access)) return pin;
      throw BudgetError("host_memory is in use");  // it was ready a moment ago; a read ahead starts again
    } catch (const BudgetError&) {
      // Transfers between host and device hold pages too.
      if (priority != Priority::demanded || !tidy(/*wait=*/true)) throw;
    }
  }
}

std::optional<Home::Outcome> LowerCacheHome::read(const Run& run, std::size_t page, std::byte* into,
                                                  Priority priority, Done) {
  std::list<UnderWay> made;  // before the device is asked, since it may throw
  UnderWay& upload = made.emplace_back(&run, page, nullptr, pin(run, page, Access::read, priority), nullptr);
  const DeviceMemory::Event event = device_.upload(into, upload.host_page.data(), run.bytes_of(page));
  upload.event = event;
  if (!has_just_ended(made)) {
    std::lock_guard lock(mutex_);
    uploads_.splice(uploads_.end(), made);
  }
  return Outcome{nullptr, event};
}

std::optional<Home::Outcome> LowerCacheHome::write(const Run& run, std::size_t page, const std::byte* from,
                                                   const DeviceMemory::Event& after, Priority priority, Done done) {
  std::list<UnderWay> made;
  UnderWay& download =
      made.emplace_back(&run, page, nullptr, pin(run, page, Access::overwrite, priority), std::move(done));
  download.event = device_.download(download.host_page.data(), from, run.bytes_of(page), after);
  if (has_just_ended(made)) return Outcome{};
  std::lock_guard lock(mutex_);
  downloads_.splice(downloads_.end(), made);
  return std::nullopt;
}

bool LowerCacheHome::tidy(bool wait) {
  std::list<UnderWay> ended;
  DeviceMemory::Event oldest;
  {
    std::lock_guard lock(mutex_);
    for (auto* queue : {&downloads_, &uploads_}) {
      while (!queue->empty() && has_ended(queue->front())) {
        ended.splice(ended.end(), *queue, queue->begin());
      }
    }
    if (ended.empty() && wait) {
      if (auto& queue = downloads_.empty() ? uploads_ : downloads_; !queue.empty()) oldest = queue.front().event;
    }
  }
  if (oldest) {
    wait_for(oldest);
    tidy(/*wait=*/false);
    return true;  // also if another thread ended it: that thread may not wait for the next one
  }
  if (ended.empty() && wait) {  // pages ready for transfers that have not started count too
    // The cache above starts a transfer under its lock, right after it has found the page ready.
    std::map<Key, PagePin> dropped;
    const std::lock_guard no_start(upper_.mutex());
    const std::lock_guard lock(mutex_);
    dropped.swap(ready_);
    return !dropped.empty();
  }
  const bool any = !ended.empty();
  while (!ended.empty()) {
    UnderWay& transfer = ended.front();
    transfer.host_page.written();  // also while an exception passes through this thread
    std::list<UnderWay> last;
    if (transfer.error) {  // the device may still use the memory
      const std::lock_guard lock(mutex_);
      lost_.splice(lost_.end(), ended, ended.begin());
    } else {
      transfer.host_page = {};
      last.splice(last.end(), ended, ended.begin());
    }
    if (transfer.done) transfer.done({transfer.error, nullptr});
  }
  return any;
}

void LowerCacheHome::finish_reads(const Run& run, std::size_t page) {
  DeviceMemory::Event latest;
  {
    std::lock_guard lock(mutex_);
    for (const UnderWay& upload : uploads_) {
      if (upload.run == &run && upload.page == page) latest = upload.event;
    }
  }
  device_.wait(latest);
}

void LowerCacheHome::forget(const Run& run) noexcept {
  std::map<Key, PagePin> ready;  // destroyed without this lock
  std::lock_guard lock(mutex_);
  for (auto at = ready_.begin(); at != ready_.end();) {
    const auto next = std::next(at);
    if (std::get<0>(at->first) == &run) ready.insert(ready_.extract(at));
    at = next;
  }
  for (const Access access : {Access::read, Access::overwrite}) passes_.erase({&run, access});
}

}  // namespace zeropage
