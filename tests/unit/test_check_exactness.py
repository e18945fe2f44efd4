"""scripts/check_exactness.py: arithmetic that `make check` keeps out of weights/, graphs/ and quant/."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_exactness", ROOT / "scripts" / "check_exactness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("weights", "graphs", "quant"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "operation"),
    [
        ("y = np.exp(x)", "np.exp"),
        ("y = np.log2(x)", "np.log2"),
        ("y = np.power(x, 2)", "np.power"),
        ("y = np.tanh(x)", "np.tanh"),
        ("y = np.cos(x) + np.sin(x)", "np.cos"),
        ("y = np.einsum('ij,jk', x, y)", "np.einsum"),
        ("y = np.dot(x, x)", "np.dot"),
        ("y = np.matmul(x, x)", "np.matmul"),
        ("y = np.linalg.cholesky(x)", "np.linalg.cholesky"),
        ("y = np.tensordot(x, x)", "np.tensordot"),
        ("y = np.fft.fft(x)", "np.fft.fft"),
        ("y = np.sum(x)", "np.sum"),
        ("y = np.mean(x)", "np.mean"),
        ("y = np.multiply.reduce(x)", "np.multiply.reduce"),
        ("y = np.add.accumulate(x)", "np.add.accumulate"),
        ("y = np.add.reduceat(x, [0])", "np.add.reduceat"),
        ("y = np.random.default_rng(0)", "np.random.default_rng"),
        ("f = np.exp", "np.exp"),
        ("y = x @ x", "@"),
        ("x @= y", "@"),
        ("y = x ** 0.5", "**"),
        ("y = (x + 1) ** n", "**"),
        ("x **= 2", "**"),
        ("y = pow(x, 2)", "pow()"),
        ("y = hash(x)", "hash()"),
        ("y = x.sum()", ".sum()"),
        ("y = x.mean(axis=0)", ".mean()"),
        ("y = x.dot(x)", ".dot()"),
        ("y = (x + 1).std()", ".std()"),
        ("y = rng.standard_normal(3)", ".standard_normal()"),
        ("y = np.argsort(x)", 'argsort without kind="stable"'),
        ("y = np.argsort(x, kind='quicksort')", 'argsort without kind="stable"'),
        ("y = np.sort(x)", 'sort without kind="stable"'),
        ("y = x.argsort()", 'argsort without kind="stable"'),
        ("import math\ny = math.exp(x)", "math.exp"),
        ("import math as m\ny = m.pow(x, 2)", "math.pow"),
        ("from math import sin", "from math import sin"),
        ("from numpy import exp", "np.exp"),
        ("from numpy.linalg import inv", "from numpy.linalg import inv"),
        ("import numpy.linalg", "import numpy.linalg"),
        ("import numpy\ny = numpy.exp(x)", "np.exp"),
        ("import random", "import random"),
        ("from scipy.linalg import cholesky", "import scipy"),
        ("def f():\n    import torch", "import torch"),
    ],
)
def test_what_differs_between_machines_is_named_with_its_line(
    checker: ModuleType, package: Path, line: str, operation: str
) -> None:
    path = package / "quant" / "new.py"
    path.write_text(f"import numpy as np\n{line}\n")
    last = 1 + len(line.splitlines())
    assert any(found.startswith(f"{path}:{last}: {operation} may give") for found in checker.offences(package))


@pytest.mark.parametrize(
    "line",
    [
        "y = x + x - x * x / x",
        "y = np.sqrt(x) + np.rint(x) + np.clip(x, 0, 1)",
        "y = np.ldexp(x, 3).astype(np.float32)",
        "y = np.add.reduce(x * x, axis=0) + np.maximum.reduce(x)",
        "y = np.multiply.outer(x, x)",
        "y = np.argsort(-x, kind='stable')",
        "y = 2**bits - 1",
        "y = math.fine(x, x)",
        "import math\ny = math.sqrt(2) + math.prod([2, 3])",
        "y = seen.mean + x",
        "rng = np.random.Generator(np.random.PCG64(0))",
        "y = np.finfo(np.float16).max",
        "y = x.max() - x.min()",
        "from numpy.typing import NDArray",
        "y = sum(size for size in x)",
        "y = context.power(x, y)",
    ],
)
def test_what_ieee_754_and_numpy_fix_is_allowed(checker: ModuleType, package: Path, line: str) -> None:
    (package / "weights" / "new.py").write_text(f"import numpy as np\n{line}\n")
    assert list(checker.offences(package)) == []


def test_an_exception_holds_for_one_file_and_one_operation(checker: ModuleType, package: Path) -> None:
    for name in ("exact.py", "other.py"):
        (package / "weights" / name).write_text("y = x @ x\n")
    (found,) = checker.offences(package)
    assert found.startswith(f"{package / 'weights' / 'other.py'}:1: @ may give")


def test_an_exception_that_nothing_needs_is_an_offence(checker: ModuleType, package: Path) -> None:
    (package / "weights" / "exact.py").write_text("y = x + x\n")
    (found,) = checker.offences(package)
    assert found.endswith("the exception for @ is not needed any more")


def test_every_exception_says_why(checker: ModuleType) -> None:
    assert all(len(reason.split()) >= 3 for reason in checker.EXCEPTIONS.values())


def test_folders_that_only_judge_or_run_may_compute_as_they_like(checker: ModuleType, package: Path) -> None:
    (package / "checks").mkdir()
    (package / "checks" / "new.py").write_text("import numpy as np\ny = np.exp(x)\n")
    assert list(checker.offences(package)) == []


def test_the_exit_code_says_whether_something_was_found(
    checker: ModuleType, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checker.main([str(package)]) == 0
    (package / "graphs" / "new.py").write_text("y = x @ x\n")
    assert checker.main([str(package)]) == 1
    assert "new.py:1: @ may give other bits" in capsys.readouterr().out
