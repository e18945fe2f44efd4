"""A plain ONNX model and calibration samples for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.plain_models import write_feeds, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "in" / "model.onnx")


@pytest.fixture
def feeds(tmp_path: Path) -> Path:
    return write_feeds(tmp_path / "feeds", 9)
