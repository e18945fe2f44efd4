"""`phi4mm validate`: judge a package by a contract, its own config, the kernels of a provider, and the original model.

Nothing is written into the package. Without a reference neither onnxruntime nor torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from phi4mm_export.checks.contract import detect_contract
from phi4mm_export.checks.opened import OpenedPackage, open_package
from phi4mm_export.checks.report import Finding, Report, Severity, error, most_severe_first, note
from phi4mm_export.checks.static import check_package, config_provider
from phi4mm_export.errors import PackageError, UsageError, some
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.contract_file import load_contract
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import exists, found_at, is_folder, real_path

AUTO = "auto"
UNRUNNABLE = ("C1", "C2", "C30", "C34")
"""Codes (by their start) of errors after which the graphs cannot be run side by side with the original."""


def validate(
    package: str | os.PathLike[str],
    contract: str = AUTO,
    *,
    reference: str | os.PathLike[str] | None = None,
    provider: Provider | str | None = None,
    adapter_paths: Mapping[Role, Path] | None = None,
) -> Report:
    """Judge a package folder.

    `contract` is auto (the shipped one that the graphs come nearest to), official, gated, mobius or the path of a
    contract file; `provider` decides which kernels are looked for (default: what the config asks for); `reference`
    is the checkpoint (folder or hub id) whose numbers the package must give, mode by mode, with `adapter_paths` (PEFT
    folders) in place of its built-in adapters.
    Raises UsageError for a path that is no folder, an unknown contract or provider, and what opening the reference
    raises.
    """
    folder = Path(package)
    opened = open_folder(folder)
    refuse_empty(opened)
    asked = config_provider(opened) if provider is None else _provider(provider)
    wanted = load_contract(detect_contract(opened) if contract == AUTO else contract)
    rows, findings = check_package(opened, wanted, asked)
    facts = {"provider": asked.value, "reference": None if reference is None else Path(reference).name}
    if reference is not None:
        findings += tuple(_parity(folder, reference, adapter_paths, findings))
    return Report(real_path(folder).name, wanted.variant, most_severe_first(findings), rows, tuple(facts.items()))


def open_folder(folder: Path) -> OpenedPackage:
    """The package in a folder, as far as it can be read. Raises UsageError for a path that is no folder."""
    if not is_folder(folder):
        raise UsageError(
            f"expected a package folder, found {found_at(folder)}",
            where=str(folder),
            fix="give the folder that holds genai_config.json; phi4mm inspect reads single .onnx files",
        )
    return open_package(folder)


def refuse_empty(package: OpenedPackage) -> None:
    """Raise UsageError for a folder in which nothing of a package was found; a checkpoint is called one."""
    if not package.config and not package.graphs and not package.others and not package.findings[1:]:
        if any(package.folder.glob("*.safetensors")):
            raise UsageError(
                "found a checkpoint, expected a package",
                where=str(package.folder),
                fix="phi4mm export turns it into a package; phi4mm inspect describes it",
            )
        if not exists(package.folder / "genai_config.json"):
            raise UsageError(
                "found neither genai_config.json nor an .onnx file, expected a package",
                where=str(package.folder),
                fix="give the folder that phi4mm export wrote",
            )


def _provider(name: Provider | str) -> Provider:
    try:
        return Provider(name)
    except ValueError as err:
        raise UsageError(f"unknown provider {name!r}", where="--ep", fix=f"give one of {', '.join(Provider)}") from err


def _parity(
    package: Path,
    reference: str | os.PathLike[str],
    adapter_paths: Mapping[Role, Path] | None,
    findings: Iterable[Finding],
) -> list[Finding]:
    """Parity with the original, unless the graphs cannot be run at all."""
    from phi4mm_export.checkpoint.hub import fetch_checkpoint, resolve_model
    from phi4mm_export.checks.parity import parity_findings

    model = resolve_model(os.fspath(reference))
    blocking = [item.code for item in findings if item.severity is Severity.ERROR and item.code.startswith(UNRUNNABLE)]
    if blocking:
        text = f"parity was not measured: the graphs do not run as they are ({some(sorted(set(blocking)))})"
        return [note("C700", package.name, text, fix="repair the errors first")]
    folder = model if isinstance(model, Path) else fetch_checkpoint(model)
    try:
        return parity_findings(package, folder, adapter_paths=adapter_paths)
    except PackageError as err:
        return [error("C701", err.where or package.name, err.what, fix=err.fix)]
