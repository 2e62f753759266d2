// Command line options that check themselves: a bad value gives one line with the option, the value and what
// is allowed.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/generate.hpp"
#include "treemla/dtype.hpp"
#include "treemla/problem.hpp"

namespace treemla::cli {

// Shared limits; the library checks the rest (sums and products) where it knows them.
constexpr int64_t kMaxPrefix = int64_t{1} << 30;
constexpr int64_t kMaxNodes = 16384;  // of one tree
constexpr int64_t kMaxRequests = 65536;
constexpr int64_t kMaxHeads = 1024;
constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxPageSize = 1 << 20;

// Does the help text of a choice list what is allowed? Errors always do.
enum class Listed { kYes, kNo };

// The value given to the option is parsed into `value`, which holds the default until then.
CLI::Option* add_int(CLI::App& app, const std::string& name, int64_t& value, int64_t low, int64_t high,
                     const std::string& help);
CLI::Option* add_real(CLI::App& app, const std::string& name, double& value, double low, double high,
                      const std::string& help);
CLI::Option* add_choice(CLI::App& app, const std::string& name, std::string& value,
                        const std::vector<std::string>& allowed, const std::string& help,
                        Listed listed = Listed::kYes);

CLI::Option* add_file(CLI::App& app, const std::string& name, std::string& path, const std::string& help);

// Comma lists: at least one element, each checked like a single value.
CLI::Option* add_int_list(CLI::App& app, const std::string& name, std::vector<int64_t>& values, int64_t low,
                          int64_t high, const std::string& help);
CLI::Option* add_choice_list(CLI::App& app, const std::string& name, std::vector<std::string>& values,
                             const std::vector<std::string>& allowed, const std::string& help,
                             Listed listed = Listed::kYes);

// PREFIX:NODES pairs in a comma list, e.g. 300:9,63:1. NODES counts the root; 0 makes a padded request.
CLI::Option* add_requests(CLI::App& app, std::vector<RequestSpec>& requests);
CLI::Option* add_threads(CLI::App& app, int64_t& threads);
CLI::Option* add_mask(CLI::App& app, std::string& mask);
CLI::Option* add_tree(CLI::App& app, std::string& tree);

// Names of the dtypes of caches, and of queries and outputs.
std::vector<std::string> cache_dtypes();
std::vector<std::string> query_dtypes();

MaskKind parse_mask(std::string_view name);
std::string_view mask_name(MaskKind kind);

// Names of every backend of this build, in order of preference, with `extra` ("best", "all") before them.
std::vector<std::string> backend_names(const std::vector<std::string>& extra);

// Refuses `option` together with any of `others`.
void check_excludes(const CLI::Option* option, const std::vector<const CLI::Option*>& others);

// Examples and exit codes, below the options of a command.
std::string footer(const std::vector<std::string>& examples, std::string_view exit_1);

}  // namespace treemla::cli
