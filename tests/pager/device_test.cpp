// A device with memory of its own: two pagers, and work that runs as late as it may.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "device_fixture.h"
#include "memory_shortage.h"
#include "random_program.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

TEST_CASE_FIXTURE(DeviceFixture, "a frame for which other threads' pins leave no hole is refused, and later had") {
  memory_timeout = std::chrono::milliseconds(50);
  make_apart(20 * kPage, 60 * kPage);
  std::vector<std::unique_ptr<TestSegment>> segments;  // of 4 pages and of 1, in turns
  for (unsigned i = 0; i < 7; ++i) {
    segments.push_back(segment((i % 2 == 0 ? 4 : 1) * kPage));
    write_later(*segments[i], i);
  }
  auto large = segment(6 * kPage);
  const PinRequest held[] = {
      {segments[1].get(), Access::read}, {segments[3].get(), Access::read}, {segments[5].get(), Access::read}};
  const PinOptions lasting{.lasting = true};
  cache->pin(held, lasting);
  bool refused = false;
  std::thread([&] {
    const PinRequest wanted{large.get(), Access::overwrite};
    try {
      cache->pin({&wanted, 1});
      cache->unpin({&wanted, 1});
    } catch (const BudgetError&) {
      refused = true;
    }
  }).join();
  cache->unpin(held, lasting);
  CHECK(refused);
  write_later(*large, 7);
  check_later(*large, 7);
  for (unsigned i = 0; i < 7; ++i) check_later(*segments[i], i);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "what operators wrote late is what later operators read, through every tier") {
  make_apart(8 * kPage, 6 * kPage);
  std::vector<std::unique_ptr<TestSegment>> segments;
  for (int i = 0; i < 8; ++i) segments.push_back(segment(3 * kPage + 100 * i));
  for (unsigned i = 0; i < 8; ++i) write_later(*segments[i], i);
  std::mt19937 random(1);
  std::vector<unsigned> seeds{0, 1, 2, 3, 4, 5, 6, 7};
  for (unsigned step = 0; step < 200; ++step) {
    const unsigned i = random() % 8;
    check_later(*segments[i], seeds[i]);
    if (step % 3 == 0) write_later(*segments[i], seeds[i] = 100 + step);
    if (step % 17 == 0) cache->evict(*segments[random() % 8]);
  }
  device->finish_all();
  CHECK(wrong == 0);
  const CacheStats stats = cache->stats();
  CHECK(stats.uploaded_bytes > 0);
  CHECK(stats.downloaded_bytes > 0);
  CHECK(stats.read_bytes > 0);
  CHECK(stats.written_bytes > 0);
  for (const Pool pool : {Pool::device, Pool::host}) {
    CHECK(cache->usage(pool).peak <= cache->usage(pool).limit);
  }
}

TEST_CASE_FIXTURE(DeviceFixture, "a thread waits for its download although another thread has ended the one before") {
  make_apart(8 * kPage, 20 * kPage);
  auto tensor = segment(3 * kPage);
  write_later(*tensor, 1);
  std::atomic<bool> looked = false, evicted = false;
  device->on_waited = [&] {
    if (!looked.exchange(true)) (void)cache->stats();  // ends the downloads that are done
  };
  std::thread waiting([&] {
    try {
      cache->evict(*tensor);
      evicted = true;
    } catch (const AccessError&) {  // closed below
    }
  });
  for (int i = 0; i < 1'000 && !evicted; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const bool woke = evicted;
  if (!woke) cache->close();
  waiting.join();
  device->on_waited = {};
  REQUIRE(woke);
  check_later(*tensor, 1);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "a download that ends while an exception passes through the thread is kept") {
  make_apart(8 * kPage, 20 * kPage);
  auto tensor = segment(3 * kPage);
  write_later(*tensor, 1);
  cache->evict(*tensor);
  write_later(*tensor, 2);
  const PinRequest last{tensor.get(), Access::read};
  cache->pin({&last, 1});
  cache->unpin({&last, 1});
  cache->bring_down(*tensor);
  device->finish_all();
  struct Looks {
    FrameCache& cache;
    ~Looks() { (void)cache.stats(); }
  };
  try {
    const Looks looks{*cache};
    throw std::runtime_error("of the program");
  } catch (const std::runtime_error&) {
  }
  cache->evict(*tensor);
  check_later(*tensor, 2);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "pages pinned one by one on the device become part of the whole") {
  make_apart(12 * kPage, 6 * kPage);
  auto tensor = segment(4 * kPage);
  write_later(*tensor, 1);
  cache->evict(*tensor);
  for (std::size_t page = 0; page < tensor->pages(); page += 2) {
    PagePin pin = cache->pin_page(*tensor, page, Access::write);
    pin.wait();
    device->run([at = pin.data(), page] {
      for (std::size_t i = 0; i < kPage; ++i) at[i] = pattern(2, page * kPage + i);
    });
  }
  run_later(*tensor, Access::read,
            [this](std::byte byte, std::size_t i) { wrong += byte != pattern(i / kPage % 2 == 0 ? 2 : 1, i); });
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "a tensor larger than the host's budget passes through it in parts") {
  make_apart(16 * kPage, 5 * kPage);
  auto tensor = segment(12 * kPage), other = segment(12 * kPage);
  write_later(*tensor, 1);
  write_later(*other, 2);
  check_later(*tensor, 1);
  check_later(*other, 2);
  device->finish_all();
  CHECK(wrong == 0);
  CHECK(cache->usage(Pool::host).peak <= 5 * kPage);
}

TEST_CASE_FIXTURE(DeviceFixture, "a frame filled for one stream is filled before another stream's operators") {
  make_apart(4 * kPage, 6 * kPage);
  auto tensor = segment(3 * kPage), other = segment(3 * kPage);
  write_later(*tensor, 1);
  write_later(*other, 2);
  check_later(*tensor, 1);  // where the other's bytes still are
  device->use_stream(1);
  device->wait(check_later(*tensor, 1));  // runs stream 1 alone, and what it comes after
  CHECK(wrong == 0);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "memory that one stream still reads is not cleared by another") {
  make_apart(4 * kPage, 6 * kPage);
  auto tensor = segment(3 * kPage), zeros = segment(3 * kPage);
  write_later(*tensor, 1);
  cache->evict(*tensor);
  check_later(*tensor, 1);
  device->finish_transfers();
  device->use_stream(1);
  device->wait(check_zeros_later(*zeros));  // takes the frame that stream 0 has yet to read
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "homes on the device and in the host need no disk") {
  make_apart(16 * kPage, 16 * kPage);
  auto on_device = segment(3 * kPage, Role::parameter, Tier::device);
  auto in_host = segment(3 * kPage, Role::optimizer, Tier::host);
  write_later(*on_device, 1);
  write_later(*in_host, 2);
  cache->evict(*in_host);
  check_later(*on_device, 1);
  check_later(*in_host, 2);
  device->finish_all();
  CHECK(wrong == 0);
  const CacheStats stats = cache->stats();
  CHECK(stats.read_bytes + stats.written_bytes == 0);
  CHECK(stats.home_bytes[static_cast<int>(Role::parameter)][static_cast<int>(Tier::device)] == 3 * kPage);
  CHECK(stats.home_bytes[static_cast<int>(Role::optimizer)][static_cast<int>(Tier::host)] == 3 * kPage);
}

TEST_CASE_FIXTURE(DeviceFixture, "zeroed pages reach neither the link nor the disk") {
  make_apart(8 * kPage, 6 * kPage);
  auto tensor = segment(3 * kPage);
  write_later(*tensor, 1);
  cache->evict(*tensor);
  const CacheStats before = cache->stats();
  cache->zero(*tensor);
  check_zeros_later(*tensor);
  device->finish_all();
  CHECK(wrong == 0);
  CHECK(cache->stats().uploaded_bytes == before.uploaded_bytes);
}

TEST_CASE_FIXTURE(DeviceFixture, "a page is not zeroed in the host under an upload that reads it") {
  make_apart(8 * kPage, 8 * kPage);
  auto tensor = segment(kPage);
  write_later(*tensor, 1);
  cache->evict(*tensor);
  std::byte* frame = nullptr;
  {
    PagePin pin = cache->pin_page(*tensor, 0, Access::read);
    pin.wait();
    frame = pin.data();
  }
  cache->zero(*tensor);
  device->finish_all();
  for (std::size_t i = 0; i < kPage; ++i) wrong += frame[i] != pattern(1, i);  // its memory was not used again
  check_zeros_later(*tensor);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture,
                  "a tensor that dies under its upload waits for nothing, and its page is free after it") {
  make_apart(8 * kPage, 8 * kPage);
  auto tensor = segment(2 * kPage);
  write_later(*tensor, 1);
  cache->evict(*tensor);
  device->finish_all();
  { const PagePin pin = cache->pin_page(*tensor, 0, Access::read); }
  int waits = 0;
  device->on_waited = [&] { ++waits; };
  tensor.reset();
  CHECK(waits == 0);
  device->on_waited = {};
  std::vector<std::unique_ptr<TestSegment>> others;
  for (unsigned i = 0; i < 3; ++i) {
    others.push_back(segment(2 * kPage));
    write_later(*others.back(), 2 + i);
    cache->evict(*others.back());
  }
  device->finish_transfers();
  for (unsigned i = 0; i < 3; ++i) check_later(*others[i], 2 + i);
  device->finish_all();
  CHECK(wrong == 0);
  others.clear();
  (void)cache->stats();  // ends the transfers that are done
  cache->wait();
  auto all = segment(8 * kPage, Role::parameter, Tier::host);
  CHECK(all != nullptr);
}

TEST_CASE_FIXTURE(DeviceFixture, "an error that only a wait for a download tells is the download's") {
  make_apart(8 * kPage, 16 * kPage);
  auto tensor = segment(2 * kPage);
  write_later(*tensor, 1);
  device->fails_wait = true;
  CHECK_THROWS_WITH(cache->evict(*tensor), "an operator on the device failed");
  check_later(*tensor, 1);
  cache->evict(*tensor);
  check_later(*tensor, 1);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "a device that is lost under transfers fails programs, not destructors") {
  make_apart(8 * kPage, 16 * kPage);
  auto read = segment(2 * kPage), written = segment(2 * kPage);
  write_later(*read, 1);
  cache->evict(*read);
  write_later(*written, 2);
  { const PagePin pin = cache->pin_page(*read, 0, Access::read); }  // an upload
  cache->bring_down(*written);                                      // a download
  device->is_lost = true;
  read.reset();
  CHECK_THROWS_WITH(cache->evict(*written), "the device is lost");
  written.reset();
  cache.reset();
}

TEST_CASE_FIXTURE(DeviceFixture, "a page that a lost device cannot give is an error, and nothing stays pinned") {
  make_apart(8 * kPage, 20 * kPage);
  auto tensor = segment(4 * kPage), zeros = segment(2 * kPage);
  write_later(*tensor, 1);
  cache->evict(*tensor);
  check_later(*tensor, 1);  // its frame waits for an upload
  device->is_lost = true;
  CHECK_THROWS_AS((void)cache->pin_page(*tensor, 0, Access::read), std::runtime_error);
  CHECK_THROWS_AS((void)cache->try_pin_page(*tensor, 0, Access::read), std::runtime_error);
  CHECK_THROWS_AS((void)cache->pin_page(*zeros, 0, Access::write), std::runtime_error);
  device->is_lost = false;
  cache->pin_page(*tensor, 0, Access::read).wait();
  cache->pin_page(*zeros, 0, Access::write).wait();
  auto large = segment(8 * kPage);
  write_later(*large, 2);
  check_later(*large, 2);
  check_later(*tensor, 1);
  check_zeros_later(*zeros);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "a cache that is closed while a download is being started waits for it") {
  make_apart(8 * kPage, 20 * kPage);
  auto tensor = segment(3 * kPage);
  write_later(*tensor, 1);
  device->on_download = [&] { cache->close(); };
  CHECK_THROWS_AS(cache->evict(*tensor), AccessError);
}

TEST_CASE_FIXTURE(DeviceFixture, "what was asked of the device for a tensor in use is part of what is frozen") {
  make_apart(12 * kPage, 20 * kPage);
  auto tensor = segment(3 * kPage), at_home = segment(3 * kPage, Role::parameter, Tier::device);
  for (TestSegment* one : {tensor.get(), at_home.get()}) {
    write_later(*one, 1);
    device->finish_all();
    const PinRequest request{one, Access::write};
    cache->pin({&request, 1});
    ask(*one, writes(2));
    FrozenSegment frozen = cache->freeze(*one);
    device->use_stream(1);
    if (one == tensor.get()) {
      CHECK(save(frozen, 2));
    } else {
      const PagePin pin = frozen.try_pin(0);
      device->finish_stream(1);
      CHECK(pin.data()[0] == pattern(2, 0));
    }
    device->use_stream(0);
    cache->unpin({&request, 1});
  }
}

TEST_CASE_FIXTURE(DeviceFixture, "what another stream freezes has been uploaded, and stays") {
  make_apart(12 * kPage, 20 * kPage);
  auto tensor = segment(3 * kPage);
  write_later(*tensor, 1);
  cache->evict(*tensor);
  device->finish_all();
  std::ranges::fill(device->region(), std::byte{9});
  const PinRequest request{tensor.get(), Access::write};
  cache->pin({&request, 1});
  device->use_stream(1);
  FrozenSegment frozen = cache->freeze(*tensor);
  device->finish_stream(1);
  CHECK(save(frozen, 1));
  device->use_stream(0);
  cache->unpin({&request, 1});
  check_later(*tensor, 1);
  cache->evict(*tensor);
  check_later(*tensor, 1);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "what an operator asked for counts although memory is short at its end") {
  make_apart(4 * kPage, 20 * kPage);
  auto tensor = segment(3 * kPage), other = segment(3 * kPage);
  for (unsigned number = 0; number < 12; ++number) {
    write_later(*tensor, 2 * number + 1);
    cache->evict(*tensor);
    const PinRequest request{tensor.get(), Access::write};
    cache->pin({&request, 1});
    ask(*tensor, writes(2 * number + 2));
    {
      const FailingAllocation failing(number);
      cache->unpin({&request, 1});
    }
    write_later(*other, 7);  // takes the tensor's place
    check_later(*tensor, 2 * number + 2);
    check_later(*other, 7);
  }
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "a home that a lost device cannot clear takes no room") {
  make_apart(8 * kPage, 20 * kPage);
  device->is_lost = true;
  CHECK_THROWS_AS((void)segment(3 * kPage, Role::parameter, Tier::device), std::runtime_error);
  device->is_lost = false;
  const auto home = segment(8 * kPage, Role::parameter, Tier::device);
  write_later(*home, 1);
  check_later(*home, 1);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "an overwrite that has not ended on the device is not part of what is frozen") {
  make_apart(12 * kPage, 20 * kPage);
  auto tensor = segment(3 * kPage);
  write_later(*tensor, 1);
  cache->evict(*tensor);
  FrozenSegment frozen;
  try {
    PagePin pin = cache->pin_page(*tensor, 0, Access::overwrite);
    pin.wait();
    device->run([at = pin.data()] { std::memset(at, 9, kPage); });
    frozen = cache->freeze(*tensor);
    throw std::runtime_error("of an operator");
  } catch (const std::runtime_error&) {
  }
  CHECK(save(frozen, 1));
  check_later(*tensor, 1);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "small tensors share a page on the device as in the host") {
  make_apart(8 * kPage, 6 * kPage);
  std::vector<std::unique_ptr<TestSegment>> small;
  for (unsigned i = 0; i < 40; ++i) small.push_back(segment(200 + i));
  for (unsigned i = 0; i < 40; ++i) write_later(*small[i], i);
  cache->evict(*small[0]);
  small[5].reset();
  for (unsigned i = 0; i < 40; ++i) {
    if (i != 5) check_later(*small[i], i);
  }
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "a disk that fails under an upload is an error, and the bytes are still there") {
  make_apart(8 * kPage, 5 * kPage, /*failing=*/true);
  auto tensor = segment(3 * kPage), other = segment(7 * kPage);
  write_later(*tensor, 1);
  write_later(*other, 2);
  cache->evict(*tensor);
  io->set_outcome([](const Transfer& t) { return t.direction == Direction::read ? -EIO : 1L; });
  const PinRequest request{tensor.get(), Access::read};
  CHECK_THROWS_AS(cache->pin({&request, 1}), DiskError);
  io->set_outcome([](const Transfer&) { return 1L; });
  check_later(*tensor, 1);
  check_later(*other, 2);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "a disk that cannot be written leaves dirty pages on the device") {
  make_apart(8 * kPage, 5 * kPage, /*failing=*/true);
  auto tensor = segment(7 * kPage), other = segment(7 * kPage);
  write_later(*tensor, 1);
  io->set_outcome([](const Transfer& t) { return t.direction == Direction::write ? -EIO : 1L; });
  const PinRequest request{other.get(), Access::overwrite};
  CHECK_THROWS_AS(cache->pin({&request, 1}), DiskError);
  check_later(*tensor, 1);
  io->set_outcome([](const Transfer&) { return 1L; });
  write_later(*other, 2);
  check_later(*tensor, 1);
  check_later(*other, 2);
  device->finish_all();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "host memory is registered as it is used and given back at the end") {
  make_apart(8 * kPage, 6 * kPage);
  auto tensor = segment(3 * kPage);
  write_later(*tensor, 1);
  cache->evict(*tensor);
  CHECK(device->registered >= 6 * kPage);
  cache->close();
  CHECK(device->registered == 0);
}

TEST_CASE_FIXTURE(DeviceFixture, "what passes from disk to device in rounds is read ahead, and once a round") {
  make_apart(8 * kPage, 10 * kPage);
  std::vector<std::unique_ptr<TestSegment>> segments;  // of one page, of two, and of three
  std::size_t bytes = 0;
  for (unsigned i = 0; i < 15; ++i) {
    segments.push_back(segment((1 + i % 3) * kPage));
    bytes += segments.back()->bytes();
    write_later(*segments[i], i);
    device->finish_all();
  }
  CacheStats before;
  for (unsigned round = 0; round < 8; ++round) {
    if (round == 4) before = cache->stats();
    for (unsigned i = 0; i < 15; ++i) {
      check_later(*segments[i], i);
      device->finish_all();
    }
  }
  CHECK(wrong == 0);
  const CacheStats after = cache->stats();
  CHECK(after.read_bytes - before.read_bytes <= 4 * bytes);
  CHECK(after.uploaded_bytes - before.uploaded_bytes <= 4 * bytes);
}

TEST_CASE_FIXTURE(DeviceFixture, "pages that are uploaded ahead do not take turns in leaving for each other") {
  std::size_t most = 0;
  for (const unsigned most_members : {3u, 24u, 150u}) {
    for (unsigned seed = 0; seed < 10; ++seed) {
      make_apart(48 * kPage, 400 * kPage);
      RandomProgram program(*cache, kPage, seed, most_members);
      for (int step = 0; step < 4; ++step) {
        for (const auto& group : program.groups()) {
          program.run(group);
          device->finish_all();
          const auto before = cache->stats();
          cache->wait();
          most = std::max(most, cache->stats().uploaded_bytes - before.uploaded_bytes);
        }
      }
    }
  }
  CHECK(most <= 24 * kPage);
}

TEST_CASE_FIXTURE(DeviceFixture, "a cache is closed while a thread freezes a segment of the one below") {
  for (int round = 0; round < 40; ++round) {
    make_apart(16 * kPage, 16 * kPage);
    auto s = segment(4 * kPage);
    write_later(*s, 1);
    std::atomic<bool> has_frozen = false;
    bool is_told = false;
    std::thread saver([&] {
      try {
        while (true) {
          const FrozenSegment frozen = cache->freeze(*s);
          has_frozen = true;
        }
      } catch (const AccessError&) {
        is_told = true;
      }
    });
    while (!has_frozen) std::this_thread::yield();
    cache->close();
    saver.join();
    CHECK(is_told);
  }
}
