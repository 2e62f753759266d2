// treemla: verify recorded cases, generate new ones, show and build trees, walk through a step, benchmark, and explain plans,
// from the command line.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/cpu/thread_pool.hpp"
#include "commands.hpp"
#include "output.hpp"
#include "treemla/error.hpp"
#include "treemla/version.hpp"

namespace treemla::cli {
namespace {

constexpr std::string_view kCommands = "verify, gen, tree, step, bench, plan, info";

// Quoted where a shell would need it, so that the line in a record can be pasted.
std::string command_line(int argc, char** argv) {
  std::string line;
  for (int i = 0; i < argc; ++i) {
    const std::string arg = argv[i];
    const bool plain = !arg.empty() && arg.find_first_of(" \t\n\"'\\$`*?[](){}<>|&;!~#") == std::string::npos;
    line += fmt::format("{}{}", i ? " " : "", plain ? arg : "'" + arg + "'");
  }
  return line;
}

int usage_error(const CLI::App& app, const std::string& message) {
  std::string name = "treemla";
  if (const auto commands = app.get_subcommands(); !commands.empty())
    name += " " + commands.front()->get_name();
  complain(fmt::format("{} (see {} --help)", message, name));
  return kUnusable;
}

int run(int argc, char** argv) {
  CLI::App app("TreeMLA: attention for draft-tree verification on MLA models.", "treemla");
  app.set_version_flag("--version", fmt::format("treemla {}", version()));
  app.footer(
      "Examples:\n"
      "  treemla verify cases/\n"
      "  treemla bench --h_q 64 --prefix 4096\n\n"
      "Exit codes: 0 success, 1 a check failed, 2 unusable options or input\n"
      "`treemla COMMAND --help` tells more.");
  app.get_formatter()->column_width(34);

  // In the order of the help text.
  std::vector<std::pair<std::string, Run>> commands;
  commands.emplace_back("verify", add_verify(app));
  commands.emplace_back("gen", add_gen(app));
  commands.emplace_back("tree", add_tree_command(app));
  commands.emplace_back("step", add_step(app));
  commands.emplace_back("bench", add_bench(app, command_line(argc, argv)));
  commands.emplace_back("plan", add_plan(app));
  commands.emplace_back("info", add_info(app));

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    const auto chosen = app.get_subcommands();
    print(chosen.empty() ? app.help() : chosen.front()->help("treemla"));
    return kSuccess;
  } catch (const CLI::CallForVersion& e) {
    print(fmt::format("{}\n", e.what()));
    return kSuccess;
  } catch (const CLI::ExtrasError& e) {
    if (app.get_subcommands().empty() && argc > 1 && argv[1][0] != '-')
      return usage_error(app,
                         fmt::format("{}: there is no such command: must be one of {}", argv[1], kCommands));
    return usage_error(app, e.what());
  } catch (const CLI::ParseError& e) {
    return usage_error(app, e.what());
  }

  num_threads_of(0);  // an environment that says nonsense is unusable input, not a check that failed
  for (const auto& [name, command] : commands)
    if (app.got_subcommand(name)) return command();
  return usage_error(app, fmt::format("a command is missing: must be one of {}", kCommands));
}

int guarded_run(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Error& e) {
    complain(e.what());
  } catch (const std::bad_alloc&) {
    complain("out of memory");
  } catch (const std::exception& e) {
    complain(e.what());
  }
  return kUnusable;
}

}  // namespace
}  // namespace treemla::cli

int main(int argc, char** argv) {
  treemla::cli::init_output();
  return treemla::cli::finish_output(treemla::cli::guarded_run(argc, argv));
}
