// Code on the host that works on a device's tensors in the memory below.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "device_fixture.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

namespace {

struct LowerFixture : DeviceFixture {
  /// Writes a page from the host, as a rule does.
  bool write_below(TestSegment& segment, std::size_t page, unsigned seed, Access access = Access::overwrite) {
    PagePin pin = cache->pin_page_below(segment, page, access);
    if (!pin) return false;
    pin.wait();
    for (std::size_t i = 0; i < segment.bytes_of(page); ++i) pin.data()[i] = pattern(seed, page * kPage + i);
    return true;
  }
  bool holds_below(TestSegment& segment, std::size_t page, unsigned seed) {
    PagePin pin = cache->pin_page_below(segment, page, Access::read);
    pin.wait();
    for (std::size_t i = 0; i < segment.bytes_of(page); ++i) {
      if (pin.data()[i] != pattern(seed, page * kPage + i)) return false;
    }
    return true;
  }
};

}  // namespace

TEST_CASE_FIXTURE(LowerFixture, "what the device wrote late is read below, and what is written below is read above") {
  make_apart(8 * kPage, 12 * kPage);
  for (const Tier tier : {Tier::disk, Tier::host, Tier::device}) {
    CAPTURE(name_of(tier));
    auto tensor = segment(3 * kPage, Role::optimizer, tier);
    write_later(*tensor, 1);
    for (std::size_t page = 0; page < 3; ++page) CHECK(holds_below(*tensor, page, 1));
    check_later(*tensor, 1);
    for (std::size_t page = 0; page < 3; ++page) CHECK(write_below(*tensor, page, 2));
    check_later(*tensor, 2);
    for (std::size_t page = 0; page < 3; ++page) CHECK(write_below(*tensor, page, 3, Access::write));
    check_later(*tensor, 3);
    write_later(*tensor, 4);
    for (std::size_t page = 0; page < 3; ++page) CHECK(holds_below(*tensor, page, 4));
    device->finish_all();
    CHECK(wrong == 0);
  }
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(LowerFixture, "an update in the host moves what the device wrote down and what it reads up, once") {
  make_apart(16 * kPage, 16 * kPage);
  auto gradient = segment(2 * kPage, Role::gradient, Tier::host);
  auto state = segment(4 * kPage, Role::optimizer, Tier::host);
  auto parameter = segment(2 * kPage, Role::parameter, Tier::host);
  write_later(*parameter, 100);
  for (unsigned step = 1; step <= 4; ++step) {
    device->finish_all();
    const CacheStats before = cache->stats();
    check_later(*parameter, step + 99);
    write_later(*gradient, step);
    cache->bring_down(*gradient);
    for (std::size_t page = 0; page < 4; ++page) {
      CHECK(write_below(*state, page, step, Access::write));
      if (page >= 2) continue;
      CHECK(holds_below(*gradient, page, step));
      CHECK(write_below(*parameter, page, step + 100));
    }
    check_later(*parameter, step + 100);
    device->finish_all();
    const CacheStats after = cache->stats();
    if (step == 1) continue;  // the parameter was newer on the device
    CHECK(after.uploaded_bytes - before.uploaded_bytes == 2 * kPage);
    CHECK(after.downloaded_bytes - before.downloaded_bytes == 2 * kPage);
  }
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(LowerFixture, "a page that an operator holds on the device is refused below, and nothing changes") {
  make_apart(8 * kPage, 8 * kPage);
  for (const Tier tier : {Tier::disk, Tier::device}) {
    auto tensor = segment(2 * kPage, Role::parameter, tier);
    write_later(*tensor, 1);
    const PinRequest request{tensor.get(), Access::read};
    cache->pin({&request, 1});
    CHECK_FALSE(cache->pin_page_below(*tensor, 0, Access::write));
    cache->unpin({&request, 1});
    check_later(*tensor, 1);
    CHECK(write_below(*tensor, 0, 1));
    CHECK(holds_below(*tensor, 0, 1));
  }
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(LowerFixture, "a page that was to be overwritten below and was not waited for is what it was") {
  make_apart(8 * kPage, 8 * kPage);
  for (const Tier tier : {Tier::disk, Tier::device}) {
    auto tensor = segment(2 * kPage, Role::parameter, tier);
    write_later(*tensor, 1);
    { const PagePin pin = cache->pin_page_below(*tensor, 1, Access::overwrite); }
    check_later(*tensor, 1);
    { const PagePin pin = cache->pin_page_below(*tensor, 1, Access::write); }
    check_later(*tensor, 1);
  }
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(LowerFixture, "who wants a lent page on the device waits until it is back") {
  make_apart(8 * kPage, 8 * kPage);
  for (const Tier tier : {Tier::disk, Tier::host, Tier::device}) {
    for (const bool whole : {true, false}) {
      auto tensor = segment(2 * kPage, Role::parameter, tier);
      write_later(*tensor, 1);
      std::atomic<bool> has_it = false, written = false;
      std::thread operators;
      {
        PagePin pin = cache->pin_page_below(*tensor, 0, Access::overwrite);
        pin.wait();
        // Another page, which the device may have meanwhile.
        operators = std::thread([&] {
          if (whole) {
            check_later(*tensor, 2);
          } else {
            PagePin page = cache->pin_page(*tensor, 0, Access::read);
            page.wait();
            device->run([at = page.data(), this] {
              for (std::size_t i = 0; i < kPage; ++i) wrong += at[i] != pattern(2, i);
            });
          }
          if (!written) has_it = true;
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        CHECK_FALSE(has_it);
        CHECK_FALSE(cache->pin_page_below(*tensor, 0, Access::read));
        for (std::size_t i = 0; i < kPage; ++i) pin.data()[i] = pattern(2, i);
        // The second page has to be written too for who wants all.
        CHECK(write_below(*tensor, 1, 2));
        written = true;
      }
      operators.join();
      CHECK_FALSE(has_it);
      device->finish_all();
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(LowerFixture, "a host that cannot hold a page more says so, and the device goes on") {
  make_apart(8 * kPage, 4 * kPage);
  std::vector<std::unique_ptr<TestSegment>> segments;
  for (unsigned i = 0; i < 6; ++i) {
    segments.push_back(segment(kPage));
    write_later(*segments[i], i);
  }
  {
    std::vector<PagePin> pins;
    CHECK_THROWS_AS(
        [&] {
          for (auto& each : segments) pins.push_back(cache->pin_page_below(*each, 0, Access::write));
        }(),
        BudgetError);
    CHECK(pins.size() >= 3);
  }
  for (unsigned i = 0; i < 6; ++i) check_later(*segments[i], i);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(LowerFixture,
                  "a write to disk that fails under an update in the host is reported, and nothing is lost") {
  make_apart(6 * kPage, 4 * kPage, /*failing=*/true);
  std::vector<std::unique_ptr<TestSegment>> segments;
  for (unsigned i = 0; i < 8; ++i) segments.push_back(segment(kPage));
  for (unsigned i = 0; i < 8; ++i) CHECK(write_below(*segments[i], 0, i));
  io->set_outcome([](const Transfer& transfer) { return transfer.direction == Direction::write ? -EIO : 1; });
  bool told = false;
  for (unsigned i = 0; i < 8; ++i) {
    try {
      told = !write_below(*segments[i], 0, i, Access::write) || told;
    } catch (const DiskError&) {
      told = true;
    }
  }
  io->wait_all();
  io->set_outcome([](const Transfer&) { return 1; });
  for (unsigned i = 0; i < 8; ++i) {
    try {
      check_later(*segments[i], i);
    } catch (const DiskError&) {  // of a write that began after the last pin; once
      told = true;
      check_later(*segments[i], i);
    }
  }
  CHECK(told);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(LowerFixture, "closing while a page is lent leaves nothing behind") {
  make_apart(8 * kPage, 8 * kPage);
  for (const Tier tier : {Tier::disk, Tier::device}) {
    make_apart(8 * kPage, 8 * kPage);
    auto tensor = segment(2 * kPage, Role::parameter, tier);
    write_later(*tensor, 1);
    PagePin pin = cache->pin_page_below(*tensor, 0, Access::overwrite);
    pin.wait();
    cache->close();
    std::memset(pin.data(), 7, kPage);
    pin = {};
    CHECK_THROWS_AS(static_cast<void>(cache->pin_page_below(*tensor, 0, Access::read)), AccessError);
  }
}

TEST_CASE_FIXTURE(LowerFixture, "what is staged takes room in the host for as long as its upload") {
  make_apart(16 * kPage, 4 * kPage);
  std::vector<std::unique_ptr<TestSegment>> on_device;
  for (unsigned i = 0; i < 6; ++i) {
    on_device.push_back(segment(kPage, Role::parameter, Tier::device));
    CHECK(write_below(*on_device[i], 0, i));
  }
  auto on_disk = segment(kPage);
  write_later(*on_disk, 10);
  cache->evict(*on_disk);
  std::vector<std::unique_ptr<TestSegment>> in_host;
  for (unsigned i = 0; i < 3; ++i) in_host.push_back(segment(kPage, Role::gradient, Tier::host));
  for (unsigned i = 0; i < 6; ++i) check_later(*on_device[i], i);
  check_later(*on_disk, 10);
  device->finish_all();
  CHECK(wrong == 0);
  CHECK(cache->usage(Pool::host).peak <= cache->usage(Pool::host).limit);
}

TEST_CASE_FIXTURE(LowerFixture,
                  "a thread that pins a page whose staged content could not be uploaded gets the device's error") {
  make_apart(16 * kPage, 8 * kPage);
  auto tensor = segment(kPage, Role::parameter, Tier::device);
  write_later(*tensor, 1);
  device->fail_uploads = true;
  CHECK(write_below(*tensor, 0, 2));
  device->fail_uploads = false;
  const PinRequest request{tensor.get(), Access::read};
  CHECK_THROWS_AS(cache->pin({&request, 1}), std::runtime_error);
  PagePin page = cache->pin_page(*tensor, 0, Access::read);
  CHECK_THROWS_AS(page.wait(), std::runtime_error);
}

TEST_CASE_FIXTURE(LowerFixture,
                  "what is at home on the device counts where it is asked whether that holds everything") {
  make_apart(8 * kPage, 8 * kPage);
  auto small = segment(2 * kPage);
  CHECK(cache->holds_everything());
  auto home = segment(5 * kPage, Role::parameter, Tier::device);
  CHECK(cache->holds_everything());
  auto more = segment(2 * kPage);
  CHECK_FALSE(cache->holds_everything());
}

TEST_CASE_FIXTURE(LowerFixture, "threads that work below and above on pages of one tensor find each its own") {
  make_apart(24 * kPage, 12 * kPage);
  for (const Tier tier : {Tier::disk, Tier::device}) {
    auto tensor = segment(4 * kPage, Role::parameter, tier);
    write_later(*tensor, 0);
    device->finish_all();
    std::vector<std::thread> threads;
    std::atomic<int> bad = 0;
    for (std::size_t page = 0; page < 4; ++page) {
      threads.emplace_back([&, page] {
        for (unsigned round = 0; round < 50; ++round) {
          PagePin pin;
          while (!(pin = cache->pin_page_below(*tensor, page, round % 2 ? Access::write : Access::read))) {
          }
          pin.wait();
          bad += pin.data()[5] != pattern(0, page * kPage + 5);
          pin = {};
          PagePin above = cache->pin_page(*tensor, page, Access::read);
          above.wait();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(bad == 0);
    check_later(*tensor, 0);
    device->finish_all();
  }
  CHECK(wrong == 0);
}
