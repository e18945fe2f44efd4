"""Reading remote files in ranges: retries, changed files, and blocks fetched ahead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.hub_server import COMMIT, Hub, serving

from phi4mm_export.checkpoint.ranges import Address, Patience, RemoteFile
from phi4mm_export.checkpoint.read_ahead import ReadAhead
from phi4mm_export.errors import CheckpointError, SystemLimitError

MODEL, NAME, NBYTES = "someone/model", "model.safetensors", 100_000
AT_ONCE = Patience(tries=3, first_delay_s=0.0, timeout_s=20.0)


@contextmanager
def _remote(
    folder: Path, fault: Callable[[int], str] = lambda _number: "", *, ranges: bool = True
) -> Iterator[tuple[RemoteFile, bytes, Hub]]:
    folder.mkdir(exist_ok=True)
    content = os.urandom(NBYTES)
    (folder / NAME).write_bytes(content)
    with serving(Hub(MODEL, folder, fault=fault, ranges=ranges)) as hub:
        url = f"{hub.endpoint}/{MODEL}/resolve/{COMMIT}/{NAME}"
        yield RemoteFile(NAME, lambda: Address(url, {}, "pinned", NBYTES), AT_ONCE), content, hub


@pytest.mark.network
def test_a_range_is_read_exactly(tmp_path: Path) -> None:
    with _remote(tmp_path / "m") as (remote, content, hub):
        assert remote.read(10, 5000) == content[10:5000]
        assert hub.range_requests == [(NAME, 10, 5000)]


@pytest.mark.parametrize("fault", ["503", "reset", "short"])
@pytest.mark.network
def test_a_passing_fault_is_tried_again(tmp_path: Path, fault: str) -> None:
    with _remote(tmp_path / "m", lambda number: fault if number < 3 else "") as (remote, content, hub):
        assert remote.read(0, 1000) == content[:1000]
        assert len(hub.range_requests) == 3


@pytest.mark.parametrize(("fault", "trouble"), [("503", "HTTP 503"), ("short", "IncompleteRead")])
@pytest.mark.network
def test_a_lasting_fault_ends_with_the_range_and_the_cause(tmp_path: Path, fault: str, trouble: str) -> None:
    with (
        _remote(tmp_path / "m", lambda _number: fault) as (remote, _, _),
        pytest.raises(SystemLimitError, match=rf"bytes 7 to 99 .* tried 3 times: .*{trouble}"),
    ):
        remote.read(7, 100)


@pytest.mark.network
def test_another_etag_means_another_file(tmp_path: Path) -> None:
    with _remote(tmp_path / "m", lambda number: "etag" if number == 2 else "") as (remote, _, _):
        remote.read(0, 10)
        with pytest.raises(CheckpointError, match="changed while it was read: its ETag was"):
            remote.read(10, 20)


@pytest.mark.network
def test_another_size_means_another_file(tmp_path: Path) -> None:
    with _remote(tmp_path / "m") as (remote, _, hub):
        (hub.folder / NAME).write_bytes(b"x" * (NBYTES + 1))
        with pytest.raises(CheckpointError, match=f"bytes 0-9/{NBYTES}, found bytes 0-9/{NBYTES + 1}"):
            remote.read(0, 10)


@pytest.mark.network
def test_a_server_without_ranges_is_named_as_such(tmp_path: Path) -> None:
    with (
        _remote(tmp_path / "m", ranges=False) as (remote, _, _),
        pytest.raises(SystemLimitError, match=r"whole files only.*--no-stream"),
    ):
        remote.read(0, 10)


@pytest.mark.network
def test_an_expired_address_is_asked_for_again(tmp_path: Path) -> None:
    with _remote(tmp_path / "m") as (_, content, hub):
        good = f"{hub.endpoint}/{MODEL}/resolve/{COMMIT}/{NAME}"
        addresses = iter([f"{hub.endpoint}/expired", good])
        remote = RemoteFile(NAME, lambda: Address(next(addresses), {}, "pinned", NBYTES), AT_ONCE)
        assert remote.read(3, 9) == content[3:9]


@pytest.mark.network
def test_a_file_that_changed_while_its_address_expired_is_refused(tmp_path: Path) -> None:
    with _remote(tmp_path / "m") as (_, _, hub):
        etags = iter(["first", "second"])
        remote = RemoteFile(NAME, lambda: Address(f"{hub.endpoint}/expired", {}, next(etags), NBYTES), AT_ONCE)
        with pytest.raises(CheckpointError, match="were first, 100000; now second, 100000"):
            remote.read(0, 9)


@pytest.mark.network
def test_many_small_reads_become_few_requests(tmp_path: Path) -> None:
    with _remote(tmp_path / "m") as (remote, content, hub), ReadAhead(block_nbytes=30_000, kept=4) as blocks:
        got = bytearray(NBYTES)
        for start in range(0, NBYTES, 500):
            blocks.read_into(remote, memoryview(got)[start : start + 500], start)
        assert bytes(got) == content
        assert sorted(hub.range_requests) == [(NAME, i, min(i + 30_000, NBYTES)) for i in range(0, NBYTES, 30_000)]


@pytest.mark.network
def test_a_read_over_the_edges_of_blocks_is_put_together(tmp_path: Path) -> None:
    with _remote(tmp_path / "m") as (remote, content, _), ReadAhead(block_nbytes=1000) as blocks:
        got = bytearray(3500)
        blocks.read_into(remote, memoryview(got), 250)
        assert bytes(got) == content[250:3750]


@pytest.mark.network
def test_a_block_that_failed_is_fetched_again_when_it_is_next_read(tmp_path: Path) -> None:
    with (
        _remote(tmp_path / "m", lambda number: "503" if number <= 3 else "") as (remote, content, _),
        ReadAhead(block_nbytes=NBYTES, ahead=0) as blocks,
    ):
        got = bytearray(10)
        with pytest.raises(SystemLimitError):
            blocks.read_into(remote, memoryview(got), 0)
        blocks.read_into(remote, memoryview(got), 0)
        assert bytes(got) == content[:10]


@pytest.mark.parametrize(
    ("tried", "stated", "seconds"), [(1, None, 0.5), (2, None, 1.0), (3, None, 2.0), (9, None, 30.0), (1, "7", 7.0)]
)
def test_pauses_double_up_to_a_limit_and_follow_the_server(tried: int, stated: str | None, seconds: float) -> None:
    assert Patience().delay(tried, stated) == seconds
