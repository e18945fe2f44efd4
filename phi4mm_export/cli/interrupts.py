"""Ctrl-C and SIGTERM end a command once: what comes right after does not cut its clean-up short."""

from __future__ import annotations

import signal
import time
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
QUIET_S = 5.0
"""Signals in this time after one that was heard are taken for the same wish; later ones interrupt again."""
RETRY_S = 0.02
_IMPORT_MACHINERY = "<frozen importlib"


def install() -> None:
    """Make SIGINT and SIGTERM raise KeyboardInterrupt, at most once in `QUIET_S`. For the command line only.

    Libraries in C print a traceback of their own when their import is interrupted, so imports are let finish first.
    """
    heard = -QUIET_S

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal heard
        del signum
        now = time.monotonic()
        if now - heard < QUIET_S:
            return
        if _is_importing(frame) and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
            return
        heard = now
        raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, interrupt)


def ignore() -> None:
    """Hear no more: the exit code is decided. Python would set the defaults again, and a late Ctrl-C end by signal."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_MACHINERY):
            return True
        frame = frame.f_back
    return False
