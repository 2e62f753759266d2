# Fails unless README has EXAMPLE, byte for byte, as a code block.
file(READ ${README} readme)
file(READ ${EXAMPLE} example)
string(FIND "${readme}" "```cpp\n${example}```\n" at)
if(at EQUAL -1)
  message(FATAL_ERROR "${README} has no ```cpp block that equals ${EXAMPLE}")
endif()
