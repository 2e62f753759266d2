// The one exception type the library throws.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace treemla {

// The numeric values are the status codes of the C ABI (treemla.h); 0 there means success.
enum class ErrorCode : int {
  kInvalidArgument = 1,  // an argument breaks its documented contract
  kUnsupported = 2,      // valid, but no backend (or not the one asked for) can run it
  kBadFile = 3,          // a case file that lies, is truncated or is no case file at all
  kIo = 4,               // the operating system refused to open, read or write a file
  kOutOfMemory = 5,      // host or device memory ran out
  kDevice = 6,           // a device call failed
  kInternal = 7,         // a bug in the library
};

// what() is one line that names the argument or field, its value and what is allowed.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string argument, const std::string& message)
      : std::runtime_error(message), code_(code), argument_(std::move(argument)) {}

  ErrorCode code() const { return code_; }
  // The argument, tensor or file field at fault; empty where there is none.
  const std::string& argument() const { return argument_; }

 private:
  ErrorCode code_;
  std::string argument_;
};

}  // namespace treemla
