#include "options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "core/file_io.hpp"
#include "treemla/error.hpp"
#include "treemla/verify.hpp"

namespace treemla::cli {
namespace {

// The whole text as a number, or nothing.
template <typename T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

[[noreturn]] void reject(const std::string& name, const std::string& given, const std::string& allowed) {
  throw CLI::ValidationError(
      fmt::format("{} {}: must be {}", name, given.empty() ? "\"\"" : one_line(given, 80), allowed));
}

// `given` is what the user typed, of which `text` is one element.
int64_t to_int(const std::string& name, const std::string& given, std::string_view text, int64_t low,
               int64_t high, std::string_view what) {
  const auto value = parse_number<int64_t>(text);
  if (!value || *value < low || *value > high)
    reject(name, given, fmt::format("{} from {} to {}", what, low, high));
  return *value;
}

std::string one_of(const std::vector<std::string>& allowed, std::string_view what) {
  return fmt::format("{}{}", what, fmt::join(allowed, ", "));
}

std::string choice_help(const std::string& help, const std::vector<std::string>& allowed, Listed listed) {
  return listed == Listed::kYes ? fmt::format("{}: {}", help, fmt::join(allowed, ", ")) : help;
}

bool contains(const std::vector<std::string>& all, std::string_view x) {
  return std::find(all.begin(), all.end(), x) != all.end();
}

// Empty elements are kept, so that "1,,2" and "" are refused by whoever parses them.
std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

CLI::Option* add(CLI::App& app, const std::string& name, const std::string& type, const std::string& standard,
                 const std::string& help, const std::function<void(const std::string&)>& parse) {
  return app.add_option_function<std::string>(name, parse, help)->type_name(type)->default_str(standard);
}

}  // namespace

CLI::Option* add_int(CLI::App& app, const std::string& name, int64_t& value, int64_t low, int64_t high,
                     const std::string& help) {
  return add(app, name, "N", std::to_string(value), help, [&value, name, low, high](const std::string& text) {
    value = to_int(name, text, text, low, high, "an integer");
  });
}

CLI::Option* add_real(CLI::App& app, const std::string& name, double& value, double low, double high,
                      const std::string& help) {
  return add(app, name, "X", fmt::format("{}", value), help,
             [&value, name, low, high](const std::string& text) {
               const auto x = parse_number<double>(text);
               if (!x || !(*x >= low && *x <= high))  // NaN fails both
                 reject(name, text, fmt::format("a number from {:g} to {:g}", low, high));
               value = *x;
             });
}

CLI::Option* add_choice(CLI::App& app, const std::string& name, std::string& value,
                        const std::vector<std::string>& allowed, const std::string& help, Listed listed) {
  return add(app, name, "NAME", value, choice_help(help, allowed, listed),
             [&value, name, allowed](const std::string& text) {
               if (!contains(allowed, text)) reject(name, text, one_of(allowed, "one of "));
               value = text;
             });
}

CLI::Option* add_file(CLI::App& app, const std::string& name, std::string& path, const std::string& help) {
  return add(app, name, "FILE", "", help, [&path, name](const std::string& text) {
    if (text.empty()) reject(name, text, "the path of a file");
    path = text;
  });
}

CLI::Option* add_int_list(CLI::App& app, const std::string& name, std::vector<int64_t>& values, int64_t low,
                          int64_t high, const std::string& help) {
  return add(app, name, "N,N..", fmt::format("{}", fmt::join(values, ",")), help,
             [&values, name, low, high](const std::string& text) {
               values.clear();
               for (const std::string& part : split(text, ','))
                 values.push_back(to_int(name, text, part, low, high, "a comma list of integers"));
             });
}

CLI::Option* add_choice_list(CLI::App& app, const std::string& name, std::vector<std::string>& values,
                             const std::vector<std::string>& allowed, const std::string& help,
                             Listed listed) {
  return add(app, name, "NAME,..", fmt::format("{}", fmt::join(values, ",")),
             choice_help(help, allowed, listed), [&values, name, allowed](const std::string& text) {
               values = split(text, ',');
               for (const std::string& part : values)
                 if (!contains(allowed, part)) reject(name, text, one_of(allowed, "a comma list of "));
             });
}

CLI::Option* add_requests(CLI::App& app, std::vector<RequestSpec>& requests) {
  return add(
      app, "--requests", "P:Q,P:Q..", "",
      "a ragged batch: cached prefix and tree nodes (root included) of each request",
      [&requests](const std::string& text) {
        const auto refuse = [&] {
          reject("--requests", text,
                 fmt::format("a comma list of at most {} PREFIX:NODES pairs, e.g. 300:9,63:1, PREFIX from 0 "
                             "to {}, NODES from 0 to {}",
                             kMaxRequests, kMaxPrefix, kMaxNodes));
        };
        requests.clear();
        for (const std::string& part : split(text, ',')) {
          const std::vector<std::string> pair = split(part, ':');
          if (pair.size() != 2) refuse();
          const auto prefix = parse_number<int64_t>(pair[0]), nodes = parse_number<int64_t>(pair[1]);
          if (!prefix || !nodes || *prefix < 0 || *prefix > kMaxPrefix || *nodes < 0 || *nodes > kMaxNodes)
            refuse();
          requests.push_back({*prefix, static_cast<int>(*nodes)});
          if (std::ssize(requests) > kMaxRequests) refuse();
        }
      });
}

CLI::Option* add_threads(CLI::App& app, int64_t& threads) {
  return add_int(app, "--threads", threads, 0, kMaxThreads, "threads of the CPU backends; 0 is one per core");
}

CLI::Option* add_mask(CLI::App& app, std::string& mask) {
  return add_choice(app, "--mask", mask, {"tree", "causal", "none"}, "which nodes a node sees");
}

CLI::Option* add_tree(CLI::App& app, std::string& tree) {
  return add_choice(app, "--tree", tree, {"chain", "star", "binary", "random", "ddtree"},
                    "shape of the draft trees");
}

std::vector<std::string> query_dtypes() { return {"fp32", "fp16", "bf16"}; }

std::vector<std::string> cache_dtypes() {
  std::vector<std::string> names = query_dtypes();
  names.insert(names.end(), {"e4m3", "e4m3_packed", "q8_0"});
  return names;
}

MaskKind parse_mask(std::string_view name) {
  return name == "tree" ? MaskKind::kTree : name == "causal" ? MaskKind::kCausal : MaskKind::kNone;
}

std::string_view mask_name(MaskKind kind) {
  return kind == MaskKind::kTree ? "tree" : kind == MaskKind::kCausal ? "causal" : "none";
}

std::vector<std::string> backend_names(const std::vector<std::string>& extra) {
  std::vector<std::string> names = extra;
  for (const BackendInfo& info : list_backends()) names.push_back(info.name);
  return names;
}

void check_excludes(const CLI::Option* option, const std::vector<const CLI::Option*>& others) {
  for (const CLI::Option* other : others) {
    if (option->count() > 0 && other->count() > 0) {
      throw Error(ErrorCode::kInvalidArgument, option->get_name(),
                  fmt::format("{} {}: can't be given together with {}", option->get_name(),
                              one_line(option->results().front(), 80), other->get_name()));
    }
  }
}

std::string footer(const std::vector<std::string>& examples, std::string_view exit_1) {
  std::string s = examples.size() == 1 ? "Example:\n" : "Examples:\n";
  for (const std::string& e : examples) s += "  " + e + "\n";
  s += "\nExit codes: 0 success";
  if (!exit_1.empty()) s += fmt::format(", 1 {}", exit_1);
  return s + ", 2 unusable options or input";
}

}  // namespace treemla::cli
