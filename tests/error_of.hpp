// What a test asks of an Error.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "treemla/error.hpp"

namespace treemla {

// The text of the kInvalidArgument that `call` throws, one line, after the argument's name.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(std::string(e.what()), testing::Not(testing::HasSubstr("\n")));
    return e.argument() + ": " + e.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return "";
}

}  // namespace treemla
