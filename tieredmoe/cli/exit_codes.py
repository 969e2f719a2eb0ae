"""What the command's exit codes mean, in one place; ``tieredmoe --help`` shows ``EXPLAINED``."""

from __future__ import annotations

from typing import Final

DONE: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2
INTERRUPTED: Final = 130

EXPLAINED: Final = (
    "Exit codes: 0 done; 1 an error that the message explains, damage that was found, or a check "
    "that was not passed; 2 wrong usage, or a question that was answered with no; 130 interrupted "
    "(Ctrl-C). Results go to stdout, messages and progress to stderr."
)
