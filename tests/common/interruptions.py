"""
Raises an exception in the place of any line that the package runs, to see what an error or Ctrl-C there leaves.

    counting = Interruption()
    counting.run(action)                      # counts the lines of the package
    for line in range(counting.lines):
        prepare()
        Interruption(OSError, line).run(action)   # as if that line had failed
        check()                               # what was there is whole
"""

import dis
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hf_hybrid_cache

from common.lazy_streams import Job

_PACKAGE = str(Path(hf_hybrid_cache.__file__).parent)
# Errors that are raised while memory is freed are lost: Python only prints them.
_FINALIZERS = {"__del__", "_unlock"}
# A copy that runs late would fail with its device, and not where it is waited for.
_LATE_COPY = Job.run.__code__


class Interruption:
    """
    Runs an action and counts the lines of the package that it runs; raises `error` in place of one of them.

    Args:
        error: what to raise.
        at_line: how many lines run before; `None` lets all run.
        folder: of the package, the only one whose lines count; none for all.
    """

    def __init__(self, error: type[BaseException] = KeyboardInterrupt, at_line: int | None = None, folder: str = ""):
        self.error, self.at_line = error, at_line
        self._files = f"{_PACKAGE}/{folder}"
        self.lines = 0
        self.place: str | None = None

    def run(self, action: Callable[[], object]) -> bool:
        """Whether `error` ended the action."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            action()
        except BaseException:  # it may have become another one
            if self.place is None:
                raise
            return True
        finally:
            sys.settrace(before)
        # Raised where it may be handled: the action went on.
        return False

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "call":
            return self._trace if code.co_filename.startswith(self._files) and not _is_out_of_reach(frame) else None
        if event == "line" and self.place is None and frame.f_lasti not in _ends_of_with(code):
            if self.lines == self.at_line:
                self.place = f"{code.co_filename}:{frame.f_lineno}"
                raise self.error(f"injected at {self.place}")
            self.lines += 1
        return self._trace


def _is_out_of_reach(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in _FINALIZERS or frame.f_code is _LATE_COPY:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _ends_of_with(code: CodeType) -> frozenset[int]:
    """
    Return the start of lines that only call `__exit__`: Python reports these again with the line of the `with`.

    No signal comes between a block and the call, so what is raised there would leave a block as nothing else can.
    """
    ends: set[int] = set()
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        names = [each.opname for each in instructions[index : index + 4]]
        constants = {each.argval for each in instructions[index : index + 3]}
        is_exit = names[:3] == ["LOAD_CONST"] * 3 and names[3:] in (["CALL"], ["PRECALL"]) and constants == {None}
        if is_exit or instruction.opname == "WITH_EXCEPT_START":
            # Before it stands at most what makes room on the stack.
            ends |= {instruction.offset, instructions[index - 1].offset}
    return frozenset(ends)
