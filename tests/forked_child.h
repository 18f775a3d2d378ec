// Runs code in a forked child and gives its result to the parent.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

/// Runs `body` in a forked child and returns its result, 0 to 255; -1 if the child crashed, threw, or ran for 10 s.
template <class Body>
int in_forked_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    const auto guarded = [&]() noexcept { return body(); };
    ::_exit(guarded());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// Whether `body` throws an Error of this kind. A child cannot use CHECK.
template <class Error, class Body>
bool throws(Body body) {
  try {
    body();
  } catch (const Error&) {
    return true;
  }
  return false;
}
