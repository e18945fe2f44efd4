"""All checks that need neither onnxruntime nor the checkpoint, in the order a reader wants them."""

from __future__ import annotations

from collections.abc import Iterator

from phi4mm_export.checks.config_graphs import check_config_against_graphs
from phi4mm_export.checks.config_values import check_values
from phi4mm_export.checks.contract import check_contract
from phi4mm_export.checks.integrity import check_integrity
from phi4mm_export.checks.kernels import check_kernels
from phi4mm_export.checks.opened import OpenedPackage
from phi4mm_export.checks.processors import check_processors
from phi4mm_export.checks.report import Finding, Row
from phi4mm_export.checks.session_options import check_session_options, provider_names
from phi4mm_export.checks.tokenizer import check_tokenizer
from phi4mm_export.checks.wiring import check_wiring
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.contract_file import ContractFile


def check_package(
    package: OpenedPackage, contract: ContractFile, provider: Provider
) -> tuple[tuple[Row, ...], tuple[Finding, ...]]:
    """The contract's rows and the findings of every static check."""
    rows, findings = check_contract(package, contract)
    return tuple(rows), (*package.findings, *findings, *_others(package, provider))


def config_provider(package: OpenedPackage) -> Provider:
    """The provider that the config asks for: cuda if the decoder's session names it, else cpu."""
    return Provider.CUDA if "cuda" in provider_names(package) else Provider.CPU


def _others(package: OpenedPackage, provider: Provider) -> Iterator[Finding]:
    yield from check_integrity(package)
    yield from check_wiring(package)
    yield from check_values(package)
    yield from check_session_options(package)
    yield from check_config_against_graphs(package)
    yield from check_processors(package)
    yield from check_tokenizer(package)
    yield from check_kernels(package, provider)
