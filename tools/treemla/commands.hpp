// The subcommands: each adds its options to the command line and returns what runs it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

namespace treemla::cli {

// Exit codes of the command.
constexpr int kSuccess = 0;
constexpr int kCheckFailed = 1;
constexpr int kUnusable = 2;

// Returns the exit code. May throw treemla::Error.
using Run = std::function<int()>;

Run add_verify(CLI::App& app);
Run add_gen(CLI::App& app);
Run add_tree_command(CLI::App& app);
Run add_step(CLI::App& app);
Run add_bench(CLI::App& app, const std::string& command_line);
Run add_plan(CLI::App& app);
Run add_info(CLI::App& app);

}  // namespace treemla::cli
