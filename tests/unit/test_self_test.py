"""The arithmetic of the process is judged before anything is written."""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from phi4mm_export.cli.app import app
from phi4mm_export.errors import SystemLimitError
from phi4mm_export.weights import self_test
from phi4mm_export.weights.self_test import RULES, check_arithmetic

LDMXCSR, STMXCSR = b"\x0f\xae\x17\xc3", b"\x0f\xae\x1f\xc3"
"""ldmxcsr [rdi]; ret   and   stmxcsr [rdi]; ret"""
FLUSH_RESULTS, FLUSH_INPUTS, TOWARDS_ZERO = 0x8000, 0x0040, 0x6000
needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="sets the control register of x86-64"
)


@contextmanager
def control_bits(bits: int) -> Iterator[None]:
    """This thread's floating-point control register with more bits set, as a fast-math library leaves it."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(LDMXCSR.ljust(16) + STMXCSR)
        held = (ctypes.c_char * len(page)).from_buffer(page)
        start = ctypes.addressof(held)
        load, store = (ctypes.CFUNCTYPE(None, ctypes.c_void_p)(start + offset) for offset in (0, 16))
        saved, changed = ctypes.create_string_buffer(4), ctypes.create_string_buffer(4)
        store(ctypes.addressof(saved))
        struct.pack_into("<I", changed, 0, struct.unpack("<I", saved.raw)[0] | bits)
        load(ctypes.addressof(changed))
        try:
            yield
        finally:
            load(ctypes.addressof(saved))
            del held, load, store


def test_this_machine_computes_as_it_should() -> None:
    check_arithmetic()


@needs_x86
@pytest.mark.parametrize("bits", [FLUSH_RESULTS, FLUSH_INPUTS, FLUSH_RESULTS | FLUSH_INPUTS])
def test_a_processor_that_flushes_small_numbers_to_zero_is_refused(bits: int) -> None:
    with control_bits(bits), pytest.raises(SystemLimitError) as caught:
        check_arithmetic()
    assert "numbers below the normal range become zero" in str(caught.value)
    check_arithmetic()


@needs_x86
def test_another_rounding_mode_is_refused() -> None:
    with control_bits(TOWARDS_ZERO), pytest.raises(SystemLimitError, match=r"0\.1 \+ 0\.2"):
        check_arithmetic()


@pytest.mark.parametrize("number", range(len(RULES)))
def test_each_broken_rule_is_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    said, _ = RULES[number]
    rules = [(text, (lambda: False) if text == said else holds) for text, holds in RULES]
    monkeypatch.setattr(self_test, "RULES", tuple(rules))
    with pytest.raises(SystemLimitError) as caught:
        check_arithmetic()
    assert str(caught.value).startswith(f"this process: expected arithmetic as in IEEE 754, found that {said};")
    assert "a process of its own" in caught.value.fix


def test_all_broken_rules_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "RULES", tuple((said, lambda: False) for said, _ in RULES))
    with pytest.raises(SystemLimitError) as caught:
        check_arithmetic()
    assert all(said in caught.value.what for said, _ in RULES)


def test_a_product_that_is_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_test.exact_product
    monkeypatch.setattr(self_test, "exact_product", lambda a, b: np.nextafter(right(a, b), np.inf))
    with pytest.raises(SystemLimitError, match="a product of integers is not exact"):
        check_arithmetic()


@pytest.mark.parametrize(
    "words",
    [
        lambda model, out: ["export", model, "-o", out],
        lambda model, out: ["quantize", model, "-o", out, "--method", "rtn"],
    ],
    ids=["export", "quantize"],
)
def test_commands_that_write_weights_stop_before_any_work_with_exit_6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Callable[[str, str], list[str]]
) -> None:
    monkeypatch.setattr(self_test, "RULES", (("nothing is right", lambda: False),))
    result = CliRunner().invoke(app, words(str(tmp_path / "model"), str(tmp_path / "out")))
    assert result.exit_code == 6
    assert "found that nothing is right" in result.stderr
    assert list(tmp_path.iterdir()) == []
