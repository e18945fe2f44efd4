"""Positioned reads of one file over HTTP: range requests, retried, and checked against the file that was opened.

Plain urllib from the standard library: it honours proxy settings, and needs neither a session nor a pool. Every
answer must be 206 for exactly the range asked, of a file of the size and ETag seen first.
"""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from phi4mm_export.errors import CheckpointError, SystemLimitError

PARTIAL, WHOLE = 206, 200
EXPIRED = frozenset({401, 403, 404, 410})
"""What a signed address answers when its time is over: it is asked for again."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
LONGEST_DELAY_S = 30.0
NO_STREAM = "fetch the checkpoint to disk instead: --no-stream"


@dataclass(frozen=True)
class Patience:
    """How often a request is tried, how long the first pause is (each next one twice that), when one try gives up."""

    tries: int = 6
    first_delay_s: float = 0.5
    timeout_s: float = 30.0

    def delay(self, tried: int, stated: str | None) -> float:
        """Seconds to wait after `tried` tries; `stated` is the server's Retry-After."""
        wish = float(stated) if stated is not None and stated.isdecimal() else self.first_delay_s * 2.0 ** (tried - 1)
        return min(LONGEST_DELAY_S, wish if self.first_delay_s else 0.0)


@dataclass(frozen=True)
class Address:
    """Where a file's bytes are: its address for now, the headers for it, and the file's ETag and size there."""

    url: str
    headers: Mapping[str, str]
    etag: str
    nbytes: int


class RemoteFile:
    """One file of a server, read in ranges from any thread.

    resolve: gives the file's address; asked again when an address has expired. label: the name errors show.
    """

    def __init__(self, label: str, resolve: Callable[[], Address], patience: Patience | None = None) -> None:
        self.label, self._resolve, self._patience = label, resolve, patience or Patience()
        self._lock = threading.Lock()
        self._address = resolve()
        self.etag, self.nbytes = self._address.etag, self._address.nbytes
        self._answered: str | None = None
        self.requests = 0

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start .. stop-1.

        Raises CheckpointError when the file is no longer the one that was opened, SystemLimitError when the server
        knows no ranges or stays out of reach.
        """
        tried, trouble = 0, ""
        while tried < self._patience.tries:
            tried += 1
            wait: str | None = None
            try:
                return self._ask(start, stop)
            except urllib.error.HTTPError as err:
                wait, trouble = err.headers.get("Retry-After"), f"HTTP {err.code}"
                err.close()
                if err.code in EXPIRED and tried < self._patience.tries:
                    self._renew()
                elif err.code not in PASSING:
                    raise self._unreachable(start, stop, trouble, tried) from err
            except (http.client.HTTPException, OSError) as err:
                trouble = str(err) or type(err).__name__
            if tried < self._patience.tries:
                time.sleep(self._patience.delay(tried, wait))
        raise self._unreachable(start, stop, trouble, tried)

    def _ask(self, start: int, stop: int) -> bytes:
        address = self._address
        request = urllib.request.Request(address.url, headers={**address.headers, "Range": f"bytes={start}-{stop - 1}"})
        if urlsplit(address.url).scheme not in ("http", "https"):
            raise SystemLimitError(f"expected an http address, found {address.url}", where=self.label, fix=NO_STREAM)
        with urllib.request.urlopen(request, timeout=self._patience.timeout_s) as answer:
            self.requests += 1
            self._check(answer, start, stop)
            data: bytes = answer.read(stop - start)
        if len(data) != stop - start:
            raise http.client.IncompleteRead(data, stop - start - len(data))
        return data

    def _check(self, answer: http.client.HTTPResponse, start: int, stop: int) -> None:
        """The answer is the range asked for, of the file that was opened."""
        if answer.status != PARTIAL:
            raise SystemLimitError(
                f"the server answered a request for bytes {start} to {stop - 1} with {answer.status}, expected 206: "
                "it gives whole files only",
                where=self.label,
                fix=NO_STREAM,
            )
        expected = f"bytes {start}-{stop - 1}/{self.nbytes}"
        found = answer.headers.get("Content-Range", "")
        if found != expected:
            raise self._changed(f"expected {expected}, found {found or 'no Content-Range'}")
        etag = answer.headers.get("ETag")
        with self._lock:
            if etag is not None and self._answered not in (None, etag):
                raise self._changed(f"its ETag was {self._answered}, now it is {etag}")
            self._answered = etag or self._answered

    def _renew(self) -> None:
        address = self._resolve()
        if (address.etag, address.nbytes) != (self.etag, self.nbytes):
            raise self._changed(f"ETag and size were {self.etag}, {self.nbytes}; now {address.etag}, {address.nbytes}")
        with self._lock:
            self._address, self._answered = address, None

    def _changed(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the remote file changed while it was read: {what}",
            where=self.label,
            fix="run again; name the commit with --revision, so that it cannot change",
        )

    def _unreachable(self, start: int, stop: int, trouble: str, tried: int) -> SystemLimitError:
        times = "once" if tried == 1 else f"{tried} times"
        return SystemLimitError(
            f"bytes {start} to {stop - 1} could not be read, tried {times}: {trouble}",
            where=self.label,
            fix="check the network and run again; with --work-dir finished tensors are kept",
        )
