#!/usr/bin/env bash
# headers.sh INCLUDE_DIR: every public header compiles alone and twice, without a warning, with no dependency in sight;
# the C header as C99 and as C++.
set -euo pipefail
include=$1
failed=0

check() {  # check HEADER COMPILER FLAGS...
  local header=$1
  shift
  printf '#include "%s"\n#include "%s"\nint main(void) { return 0; }\n' "$header" "$header" |
    "$@" -Wall -Wextra -pedantic -Werror -fsyntax-only -I "$include" - || { echo "$header: $*"; failed=1; }
}

count=0
while IFS= read -r path; do
  header=${path#"$include"/}
  check "$header" "${CXX:-c++}" -std=c++20 -Wshadow -x c++
  [[ $header != *.h ]] || check "$header" "${CC:-cc}" -std=c99 -Wstrict-prototypes -x c
  count=$((count + 1))
done < <(find "$include" -type f | sort)
[ "$count" -gt 0 ] || { echo "no header below $include"; exit 1; }
[ "$failed" -eq 0 ] && echo "$count headers"
exit "$failed"
