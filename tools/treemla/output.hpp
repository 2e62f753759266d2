// Standard output and standard error of the command.
#pragma once

#include <string_view>

namespace treemla::cli {

// Makes writes to a closed pipe fail instead of killing the process. Call once, first.
void init_output();

// To standard output, at once: rows of a long run are seen as they come.
void print(std::string_view text);

// The reader of standard output went away (`treemla bench | head`): what only prints may stop.
bool reader_gone();

// "treemla: MESSAGE" on standard error, one line whatever the message holds.
void complain(std::string_view message);

// The exit code of a run that would end with `code`: 2, with a message, if standard output could not be
// written.
int finish_output(int code);

}  // namespace treemla::cli
