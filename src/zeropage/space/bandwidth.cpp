#include "zeropage/space/bandwidth.h"

#include <ATen/Parallel.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "zeropage/base/units.h"
#include "zeropage/kernels/update.h"

namespace zeropage {
namespace {

constexpr std::size_t kElements = std::size_t{1} << 21;  // larger than most caches

double seconds_of(c10::function_ref<void()> what) {
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    const auto start = std::chrono::steady_clock::now();
    what();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

bool updates_are_faster_in_host(DeviceMemory& device) {
  std::vector<float> arrays[4];
  for (auto& array : arrays) array.assign(kElements, 1.0f);
  const auto float32 = [](std::vector<float>& array) {
    return kernels::Array{kernels::Format::float32, array.data(), nullptr};
  };
  const kernels::Update update;
  const kernels::Arrays states{float32(arrays[0]), float32(arrays[1]), {}, {float32(arrays[2]), float32(arrays[3])}};
  const double in_host = seconds_of([&] {
    at::parallel_for(0, kElements, 1 << 15,
                     [&](std::int64_t begin, std::int64_t end) { kernels::update(update, states, begin, end); });
  });
  const std::span<std::byte> host(reinterpret_cast<std::byte*>(arrays[0].data()),
                                  std::min(kElements * sizeof(float), device.region().size()));
  const auto registered = device.register_host(host);
  const double one_array =
      seconds_of([&] { device.wait(device.upload(device.region().data(), host.data(), host.size())); });
  const double over_link = 3 * one_array * static_cast<double>(kElements * sizeof(float)) / host.size();
  return in_host < over_link;
}

}  // namespace zeropage
