"""Refuse arithmetic whose bits depend on the machine in weights/, graphs/ and quant/.

    python scripts/check_exactness.py [ROOT]

ROOT: the package folder, default phi4mm_export. IEEE 754 rounds + - * / sqrt the same way everywhere; casts, rint, clip
and ldexp are exact; numpy adds in an order that depends on shapes alone. Everything else (exp, cos, pow, products of a
BLAS library, unstable sorts, random normals, hash) differs between processors, libraries or runs. Exit code 1 lists
every offender as path:line, and exceptions that nothing needs any more. docs/reproducibility.md says why.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("weights", "graphs", "quant")

IN_TORCH = "runs with --torch-device alone, whose files are of the class same-machine"
EXCEPTIONS: dict[tuple[str, str], str] = {
    # (file below the package, operation): the reason why it may stay
    ("weights/exact.py", "@"): "integers whose sums stay below 2**53: every order gives the same bits",
    ("quant/arithmetic.py", "@"): "integers whose sums stay below 2**53: every order gives the same bits",
    ("quant/arithmetic.py", "np.matmul"): "the plain solver, which nothing that is promised as exact or locked uses",
    ("quant/scales.py", "np.matmul"): "integers times one power of two a row, sums below 2**24: the same in any order",
    ("quant/hessian.py", "np.matmul"): "calibration: its result is the statistics, which are saved and locked",
    ("quant/sites.py", "np.prod"): "sizes, as int64",
    ("quant/torch_device.py", "import torch"): IN_TORCH,
    ("quant/torch_device.py", "@"): IN_TORCH,
    ("quant/torch_device.py", ".sum()"): IN_TORCH,
    ("quant/finished.py", "np.savez"): "work files, read back by value; no published byte",
}


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


TYPES = words(
    """
    bool_ dtype float16 float32 float64 generic int8 int16 int32 int64 integer intp ndarray uint8 uint16 uint32 uint64
    """
)
MADE = words(
    """
    arange array asarray ascontiguousarray broadcast_to concatenate copyto diag_indices diagonal empty empty_like eye
    full full_like frombuffer inf ix_ load nan ones ones_like pad repeat reshape save stack take take_along_axis tile
    tril tril_indices triu triu_indices where zeros zeros_like
    """
)
COMPUTED = words(
    """
    abs absolute add all any argmax argmin array_equal ceil clip count_nonzero divide equal floor floor_divide frexp
    isfinite isinf isnan ldexp maximum minimum multiply negative not_equal packbits rint sign signbit sqrt subtract
    trunc unpackbits
    """
)
ALLOWED = TYPES | MADE | COMPUTED | words("__version__ errstate finfo iinfo newaxis")
"""What may be taken from numpy. All are exact or rounded once, whatever the vector width."""
SORTS = words("argsort sort")
"""Allowed with kind="stable": the default orders equal values as the processor's vector instructions happen to."""
REDUCED = words("add maximum minimum")
"""Ufuncs that may be reduced. np.add.reduce adds pairwise, in an order that depends on shapes alone."""
RANDOM = words("Generator PCG64 SeedSequence")
BANNED_METHODS = words(
    """
    cumprod cumsum dot exponential gamma mean normal prod standard_exponential standard_gamma standard_normal std sum
    trace var
    """
)
"""Methods of arrays and generators; for `sum` there is np.add.reduce, for counts np.count_nonzero."""
ALLOWED_MATH = words(
    """
    ceil comb copysign fabs floor frexp fsum gcd inf isfinite isinf isnan isqrt lcm ldexp nan prod sqrt trunc
    """
)
BANNED_BUILTINS = words("hash pow")
BANNED_MODULES = words("cmath cupy numba numexpr random scipy sklearn statistics torch")


HINT = "use what docs/reproducibility.md allows, or list it in EXCEPTIONS with the reason"


class _Finder(ast.NodeVisitor):
    """Collects (line, operation) of one module."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._modules: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top in BANNED_MODULES or (top == "numpy" and "." in alias.name and alias.name != "numpy.typing"):
                self._note(node, f"import {alias.name}")
            self._modules[alias.asname or top] = top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        top = module.partition(".")[0]
        if top in BANNED_MODULES:
            self._note(node, f"import {top}")
        for alias in node.names:
            if module == "numpy":
                self._judge_numpy(node, (alias.name,))
            elif (top == "numpy" and module != "numpy.typing") or (module == "math" and alias.name not in ALLOWED_MATH):
                self._note(node, f"from {module} import {alias.name}")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.MatMult):
            self._note(node, "@")
        if isinstance(node.op, ast.Pow) and not _whole(node.left):
            self._note(node, "**")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.MatMult | ast.Pow):
            self._note(node, "@" if isinstance(node.op, ast.MatMult) else "**")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names = _dotted(node)
        module = self._modules.get(names[0]) if names else None
        if module == "numpy":
            self._judge_numpy(node, names[1:])
        elif module == "math":
            if names[1] not in ALLOWED_MATH:
                self._note(node, f"math.{names[1]}")
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name) and function.id in BANNED_BUILTINS:
            self._note(node, f"{function.id}()")
        names = _dotted(function)
        if isinstance(function, ast.Attribute) and function.attr in BANNED_METHODS and not self._is_module(names):
            self._note(node, f".{function.attr}()")
        sorts_numpy = len(names) == 2 and self._modules.get(names[0]) == "numpy" and names[1] in SORTS
        if sorts_numpy or (isinstance(function, ast.Attribute) and function.attr == "argsort"):
            if not any(_stable(keyword) for keyword in node.keywords):
                self._note(node, f'{names[-1] if names else function.attr} without kind="stable"')  # type: ignore[attr-defined]
            for child in (*node.args, *node.keywords):
                self.visit(child)
            return
        self.generic_visit(node)

    def _is_module(self, names: tuple[str, ...]) -> bool:
        return bool(names) and self._modules.get(names[0]) in ("numpy", "math")

    def _judge_numpy(self, node: ast.AST, names: tuple[str, ...]) -> None:
        first, rest = names[0], names[1:]
        if first == "random":
            allowed = bool(rest) and rest[0] in RANDOM
        elif rest and rest[0] in ("outer", "reduce"):
            allowed = first in (REDUCED if rest[0] == "reduce" else COMPUTED)
        elif first == "typing":
            allowed = True
        else:
            allowed = first in ALLOWED and (not rest or first in TYPES or first in ("inf", "nan", "finfo"))
        if not allowed:
            self._note(node, ".".join(("np", *names)))

    def _note(self, node: ast.AST, operation: str) -> None:
        self.found.append((getattr(node, "lineno", 0), operation))


def operations(source: str, name: str) -> list[tuple[int, str]]:
    """(line, operation) of everything in one module whose bits may depend on the machine."""
    finder = _Finder()
    finder.visit(ast.parse(source, filename=name))
    return sorted(set(finder.found))


def offences(root: Path) -> Iterator[str]:
    """Every violation below the package folder, as "path:line: sentence"; then stale exceptions."""
    used = set()
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for line, operation in operations(path.read_text(encoding="utf-8"), name):
            used.add((name, operation))
            if (name, operation) not in EXCEPTIONS:
                yield f"{path}:{line}: {operation} may give other bits on another machine: {HINT}"
    for name, operation in sorted(EXCEPTIONS.keys() - used):
        if (root / name).exists():
            yield f"{root / name}:1: the exception for {operation} is not needed any more"


def _whole(node: ast.expr) -> bool:
    """Whether a base of ** is a whole number written out: 2**n is exact."""
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _stable(keyword: ast.keyword) -> bool:
    value = keyword.value
    return keyword.arg == "kind" and isinstance(value, ast.Constant) and value.value == "stable"


def _dotted(node: ast.expr) -> tuple[str, ...]:
    """("np", "add", "reduce") of np.add.reduce; nothing for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def main(arguments: list[str]) -> int:
    """Check one package folder; the exit code."""
    root = Path(arguments[0]) if arguments else Path("phi4mm_export")
    files = sum(1 for folder in FOLDERS for _ in (root / folder).rglob("*.py"))
    found = list(offences(root))
    print(
        "\n".join(
            found or [f"{files} files compute the same bits everywhere, {len(EXCEPTIONS)} exceptions with a reason"]
        )
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
