"""Work is shared among our own threads, so each of them multiplies matrices alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS libraries of this process use one thread each inside, as many as before afterwards.

    Threads of ours times threads of theirs would wait for each other: seven times the processor time on two cores.
    """
    with threadpool_limits(limits=1, user_api="blas"):
        yield
