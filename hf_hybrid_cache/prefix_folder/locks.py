"""
Locks of the system on open files, which end with the process that holds them, or when the file is closed.

They are those of `flock`: between processes of one machine, between threads that opened the file each for itself, and
on NFS between machines where the server has locks. Windows and some file systems have none; then a lock is never
refused, and processes must take turns by themselves.
"""

import errno
import sys
import time
from enum import Enum
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl

_NONE_HERE = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_FIRST_WAIT, _LONGEST_WAIT = 0.0005, 0.02


class Lock(Enum):
    """The result of asking for a lock."""

    HELD = "held"
    REFUSED = "held by another"
    NONE_HERE = "there are no locks here"


def try_lock(file: BinaryIO, exclusive: bool) -> Lock:
    """
    Ask for the lock of an open file, alone or beside others that share it.

    Raises:
        OSError: the system cannot tell.
    """
    if sys.platform == "win32":
        return Lock.NONE_HERE
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.REFUSED
    except OSError as error:
        if error.errno in _NONE_HERE:
            return Lock.NONE_HERE
        raise
    return Lock.HELD


def wait_for_lock(file: BinaryIO, exclusive: bool, seconds: float) -> bool:
    """
    Wait for the lock of an open file; false if another still holds it after so many seconds.

    `flock` itself would wait without end, for a stopped process too.
    """
    end, wait = time.monotonic() + seconds, _FIRST_WAIT
    while try_lock(file, exclusive) is Lock.REFUSED:
        if time.monotonic() > end:
            return False
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
    return True
