#include <doctest/doctest.h>
#include <torch/torch.h>

#include <fstream>
#include <sstream>

#include "temporary_directory.h"
#include "zeropage/rules/windows.h"
#include "zeropage/zeropage.h"

using namespace zeropage;

namespace {

std::shared_ptr<Space> make_small_space(const TemporaryDirectory& directory) {
  return Space::make({.disk_path = directory.path(), .device_memory = "4MB", .host_memory = "4MB", .device = "cpu"});
}

}  // namespace

TEST_CASE("raw data may be read inside a pin and only there") {
  TemporaryDirectory directory;
  auto space = make_small_space(directory);
  torch::Tensor tensor = torch::full({200, 200}, 3.0f);
  const torch::Tensor outside = tensor.view({-1});
  REQUIRE(space->page(tensor));
  CHECK(is_paged(tensor));
  CHECK(outside[0].item<float>() == 3.0f);  // like Module::to: what shared its memory keeps its own
  {
    const RawPin held = pin(tensor);
    CHECK(tensor.data_ptr<float>()[77] == 3.0f);
    tensor.data_ptr<float>()[77] = 5.0f;
  }
  CHECK_THROWS_WITH(tensor.data_ptr<float>(), doctest::Contains("zeropage::pin"));
  evict(tensor);
  CHECK(tensor.view({-1})[77].item<float>() == 5.0f);
  CHECK_FALSE(is_paged(plain_copy(tensor)));
}

TEST_CASE("settings are checked by name and by value") {
  Config config;
  CHECK_THROWS_WITH_AS(config.set("colour", "blue"), doctest::Contains("the settings are"), ConfigError);
  config.set("parameters", "cloud");
  CHECK_THROWS_WITH_AS(Space::make(config), doctest::Contains("parameters = \"cloud\""), ConfigError);
}

TEST_CASE("settings that need hooks of Python are errors in C++") {
  TemporaryDirectory directory;
  const std::tuple<const char*, const char*, const char*> refused[] = {
      {"activations", "disk", "write \"device\""},
      {"activations", "host", "write \"device\""},
      {"optimizer_dtype", "8bit", "write \"auto\""},
      {"optimizer_dtype", "bfloat16", "write \"auto\""}};
  for (const auto& [setting, value, remedy] : refused) {
    Config config;
    config.device = "cpu", config.states = "disk", config.disk_path = directory.path();
    config.device_memory = config.host_memory = "4MB";
    config.set(setting, value);
    const std::string names = std::string(setting) + " = \"" + value + "\"";
    CHECK_THROWS_WITH_AS(Space::make(config), doctest::Contains(names.c_str()), ConfigError);
    CHECK_THROWS_WITH_AS(Space::make(config), doctest::Contains(remedy), ConfigError);
    CHECK_NOTHROW(Space::make(config, Frontend::python));
  }
}

TEST_CASE("async_step = false leaves no pending update behind a step of libtorch's") {
  TemporaryDirectory directory;
  const auto space = Space::make({.states = "disk",
                                  .disk_path = directory.path(),
                                  .device_memory = "4MB",
                                  .host_memory = "4MB",
                                  .device = "cpu",
                                  .async_step = "false"});
  torch::Tensor weight;
  {
    const auto scope = space->enter();
    weight = torch::ones({500, 400}).requires_grad_();
  }
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.5));
  weight.sum().backward();
  optimizer.step();
  CHECK_FALSE(segment_of(weight)->is_deferred());
  CHECK(weight.mean().item<float>() == 0.5f);
}

TEST_CASE("a space outlives its owner as long as a tensor of it lives") {
  TemporaryDirectory directory;
  torch::Tensor tensor;
  {
    auto space = make_small_space(directory);
    auto scope = space->enter();
    tensor = torch::ones({300, 300});
  }
  CHECK(tensor.sum().item<float>() == 90000.0f);
}

TEST_CASE("a page whose first window was overwritten has its old content if the next window throws") {
  TemporaryDirectory directory;
  auto space = Space::make({.disk_path = directory.path(),
                            .device_memory = "4MB",
                            .host_memory = "4MB",
                            .device = "cpu",
                            .parameters = "disk",
                            .min_page_bytes = "0",
                            .page_size = "16KiB"});
  torch::Tensor tensor = torch::full({300, 256}, 3.0f), wide = torch::full({300, 256}, 3.0, at::kDouble);
  for (torch::Tensor each : {tensor, wide}) {
    REQUIRE(space->page(each));
    evict(each);
  }
  int windows = 0;
  const auto write = [&](c10::ArrayRef<at::Tensor> slices) {
    if (++windows == 2) throw std::runtime_error("the second window");
    for (at::Tensor slice : slices) slice.fill_(5.0f);
  };
  // A page has half as many elements of the wide one: windows end there, in the middle of the other's page.
  const Operand operands[] = {{tensor, segment_of(tensor), Access::overwrite},
                              {wide, segment_of(wide), Access::overwrite}};
  const auto all_are = [&](float value) { return plain_copy(tensor).eq(value).all().item<bool>(); };
  SUBCASE("for a caller that does not go on") {
    CHECK_THROWS_WITH(for_each_window(operands, Chunking::vectors, write), "the second window");
    CHECK(all_are(3.0f));
  }
  SUBCASE("but not for one that does") {
    Progress progress;
    CHECK_THROWS_WITH(for_each_window(operands, Chunking::vectors, write, &progress), "the second window");
    CHECK(progress.done == segment_of(wide)->page_bytes() / sizeof(double));
    for_each_window(operands, Chunking::vectors, write, &progress);
    CHECK(all_are(5.0f));
  }
}

TEST_CASE("settings come from a file of JSON") {
  TemporaryDirectory directory;
  const std::string path = directory.path() + "/settings.json";
  const auto read = [&](const std::string& text) {
    std::ofstream(path) << text;
    return Config::from_file(path);
  };
  const Config config =
      read(R"({"states": "disk", "device_memory": 4000000, "lazy_load": false, "disk_path": ["/a", "/b"]})");
  CHECK(config.states == "disk");
  CHECK(config.device_memory == "4000000");
  CHECK(config.lazy_load == "false");
  CHECK(config.disk_path == "/a:/b");
  CHECK_THROWS_WITH_AS(read("{\n \"states\" \"disk\"}"),
                       doctest::Contains("settings.json' is not JSON: ':' is missing at line 2"), ConfigError);
  CHECK_THROWS_WITH_AS(read("[]"), doctest::Contains("must hold one JSON object"), ConfigError);
  CHECK_THROWS_WITH_AS(read(R"({"colour": 1})"), doctest::Contains("settings.json', \"colour\": "), ConfigError);
  CHECK_THROWS_WITH_AS(read(R"({"states": {}})"), doctest::Contains("\"states\": a setting is"), ConfigError);
  CHECK_THROWS_WITH_AS(Config::from_file(directory.path() + "/none"), doctest::Contains("No such file"), ConfigError);
  CHECK_THROWS_WITH_AS(Config::from_file(directory.path()), doctest::Contains("Is a directory"), ConfigError);
}

TEST_CASE("a report prints tables and advice") {
  TemporaryDirectory directory;
  const auto space = make_small_space(directory);
  torch::nn::Linear module(200, 200);
  space->page(module);
  CHECK(is_paged(module->weight));
  std::ostringstream text;
  text << space->report();
  CHECK(text.str().find("parameter  host") != std::string::npos);
  CHECK(text.str().find("bound by ") != std::string::npos);
}
