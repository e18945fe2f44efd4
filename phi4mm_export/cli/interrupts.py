"""Ctrl-C and SIGTERM end a command once: what comes right after does not cut its clean-up short."""

from __future__ import annotations

import signal
import time

SIGNALS = (signal.SIGINT, signal.SIGTERM)
QUIET_S = 5.0
"""Signals in this time after one that was heard are taken for the same wish; later ones interrupt again."""


def install() -> None:
    """Make SIGINT and SIGTERM raise KeyboardInterrupt, at most once in `QUIET_S`. For the command line only."""
    heard = -QUIET_S

    def interrupt(signum: int, frame: object) -> None:
        nonlocal heard
        del signum, frame
        now = time.monotonic()
        if now - heard < QUIET_S:
            return
        heard = now
        raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt)


def ignore() -> None:
    """Hear no more: the exit code is decided. Python would set the defaults again, and a late Ctrl-C end by signal."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
