#include "zeropage/base/trace.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>

#include "zeropage/base/errors.h"
#include "zeropage/base/process.h"

namespace zeropage {
namespace {

constexpr std::size_t kBufferBytes = 1 << 20;

struct Close {
  void operator()(std::FILE* file) const { (void)std::fclose(file); }
};

/// The file, and the text not written yet.
struct Writer {
  std::mutex mutex;
  std::unique_ptr<std::FILE, Close> file;
  std::string path;
  fmt::memory_buffer text;
  Trace::Time start;
  std::atomic<std::uint64_t> process = 0;
  int error = 0;

  void flush() {
    if (error == 0 && std::fwrite(text.data(), 1, text.size(), file.get()) != text.size()) error = errno;
    text.clear();
  }
  double microseconds(Trace::Time time) const {
    return std::chrono::duration<double, std::micro>(time - start).count();
  }
};

Writer& writer() {
  static Writer* const kept = new Writer;  // threads may record until the process ends
  return *kept;
}

/// Adds one event, unless recording has ended meanwhile. If memory is full, the event is lost.
template <class Add>
void record(Add add) noexcept {
  Writer& w = writer();
  if (w.process != process_generation()) return;
  try {
    const std::lock_guard lock(w.mutex);
    if (!w.file) return;
    add(w, std::back_inserter(w.text));
    if (w.text.size() >= kBufferBytes) w.flush();
  } catch (const std::bad_alloc&) {
  }
}

}  // namespace

void Trace::start(const std::string& path) {
  Writer& w = writer();
  if (w.process != process_generation()) {  // the parent's: its lock and file must stay untouched
    new (&w.mutex) std::mutex;
    (void)w.file.release();
    w.text.clear();
  }
  const std::lock_guard lock(w.mutex);
  if (w.file) throw ConfigError(fmt::format("a trace is being recorded to \"{}\": stop it first", w.path));
  w.file.reset(std::fopen(path.c_str(), "wbe"));
  if (!w.file) {
    throw DiskError(fmt::format("\"{}\" cannot be written: {}", path, std::strerror(errno)), errno, path);
  }
  // w.text is the only buffer. With stdio's, a forked child that exits would write the buffer into the file again.
  (void)std::setvbuf(w.file.get(), nullptr, _IONBF, 0);
  w.path = path;
  w.error = 0;
  w.start = Clock::now();
  w.process = process_generation();
  fmt::format_to(std::back_inserter(w.text),
                 "{{\"displayTimeUnit\": \"ms\", \"otherData\": {{\"zeropage\": \"1\"}}, \"traceEvents\": [\n"
                 "{{\"ph\": \"M\", \"pid\": {}, \"name\": \"process_name\", \"args\": {{\"name\": \"zeropage\"}}}}",
                 ::getpid());
  on_ = true;
}

void Trace::stop() {
  on_ = false;
  Writer& w = writer();
  if (w.process != process_generation()) return;
  const std::lock_guard lock(w.mutex);
  if (!w.file) return;
  fmt::format_to(std::back_inserter(w.text), "\n]}}\n");
  w.flush();
  if (std::fclose(w.file.release()) != 0 && w.error == 0) w.error = errno;
  if (w.error != 0) {
    throw DiskError(fmt::format("the trace in \"{}\" is not whole: {}; make room on its disk, or write it elsewhere",
                                w.path, std::strerror(w.error)),
                    w.error, w.path);
  }
}

void Trace::span(std::string_view category, std::string_view name, Time begin, Time end, std::string_view args) {
  record([&](Writer& w, auto out) {
    if (begin < w.start) begin = w.start;
    fmt::format_to(out,
                   ",\n{{\"ph\": \"X\", \"pid\": {}, \"tid\": {}, \"cat\": \"{}\", \"name\": \"{}\", \"ts\": {:.3f}, "
                   "\"dur\": {:.3f}, \"args\": {{{}}}}}",
                   ::getpid(), ::gettid(), category, name, w.microseconds(begin),
                   std::chrono::duration<double, std::micro>(end - begin).count(), args);
  });
}

void Trace::begin(std::string_view category, std::uint64_t id, std::string_view args) {
  record([&](Writer& w, auto out) {
    fmt::format_to(
        out,
        ",\n{{\"ph\": \"b\", \"pid\": {}, \"tid\": {}, \"cat\": \"{}\", \"name\": \"{}\", \"id\": \"{:#x}\", "
        "\"ts\": {:.3f}, \"args\": {{{}}}}}",
        ::getpid(), ::gettid(), category, category, id, w.microseconds(Clock::now()), args);
  });
}

void Trace::end(std::string_view category, std::uint64_t id) {
  record([&](Writer& w, auto out) {
    fmt::format_to(
        out,
        ",\n{{\"ph\": \"e\", \"pid\": {}, \"tid\": {}, \"cat\": \"{}\", \"name\": \"{}\", \"id\": \"{:#x}\", "
        "\"ts\": {:.3f}}}",
        ::getpid(), ::gettid(), category, category, id, w.microseconds(Clock::now()));
  });
}

void Trace::counter(std::string_view name, std::uint64_t value) {
  record([&](Writer& w, auto out) {
    fmt::format_to(out,
                   ",\n{{\"ph\": \"C\", \"pid\": {}, \"name\": \"{}\", \"ts\": {:.3f}, \"args\": {{\"bytes\": {}}}}}",
                   ::getpid(), name, w.microseconds(Clock::now()), value);
  });
}

std::string Trace::arg(std::string_view name, std::string_view text) {
  std::string out = fmt::format("\"{}\": \"", name);
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

}  // namespace zeropage
