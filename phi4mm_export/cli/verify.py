"""Hold every file of a package against its manifest, a lock file and a signature; works offline.

Example: phi4mm verify ./package --expect phi4mm.lock
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phi4mm_export.cli import github, render
from phi4mm_export.cli.options import MANIFEST_NAMES, Format, JsonFlag, Quiet, ReportFormat, chosen_format
from phi4mm_export.errors import counted

if TYPE_CHECKING:
    from phi4mm_export.pipeline.verify import VerifyReport

MOST_DIGITS = 16
"""Digits of a digest in the one-line verdict."""


def command(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", help="Folder with phi4mm.json.")],
    expect: Annotated[
        Path | None, typer.Option(metavar="LOCK", help="Lock file that pins recipe, inputs and every file.")
    ] = None,
    write_lock: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the lock that this package fulfils, if it has no fault.")
    ] = None,
    signature: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Signature to check, or with --sign to write.")
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option(metavar="KEY", help="The signer's public key (PEM), for --signature.")
    ] = None,
    sign: Annotated[
        Path | None, typer.Option(metavar="KEY", help="Sign with this private key (PEM); needs the extra `sign`.")
    ] = None,
    quiet: Quiet = False,
    report_format: Format = None,
    json_output: JsonFlag = False,
) -> None:
    chosen = chosen_format(report_format, json=json_output)
    from phi4mm_export.pipeline.verify import verify

    with render.progress("verifying", quiet=quiet or chosen is not ReportFormat.TEXT) as progress:
        report = verify(
            package,
            expect=expect,
            write_lock=write_lock,
            signature=signature,
            public_key=public_key,
            sign=sign,
            progress=progress,
        )
    if chosen is ReportFormat.GITHUB:
        github.present(outcome(report, package))
    elif chosen is ReportFormat.JSON:
        render.document(report.as_json())
    elif not (quiet and report.ok):
        for line in report_lines(report):
            render.text(line)
    if not report.ok:
        for asked in (write_lock, sign and (signature or "the signature")):
            if asked:
                render.note(f"{asked} was not written: the package has faults")
        raise typer.Exit(int(report.exit_code))


def report_lines(report: VerifyReport) -> list[str]:
    """The report as text: one paragraph per fault, then the verdict."""
    lines = []
    for fault in report.faults:
        lines.append(f"{fault.kind} {fault.name}" + (f": {fault.what}" if fault.what != fault.kind else ""))
        for label, value in (("expected", fault.expected), ("found", fault.found), ("fix", fault.fix)):
            if value:
                lines.append(f"    {label}: {value}")
    if report.tolerated:
        lines.append(f"tolerated: {', '.join(report.tolerated)}")
    return [*lines, _verdict(report), *(f"wrote {name}" for name in report.written)]


def _verdict(report: VerifyReport) -> str:
    digest = f"package digest {report.package_digest[:MOST_DIGITS]}" if report.package_digest else "no digest"
    against = "".join([f", lock {report.lock}" if report.lock else "", ", signature" if report.signed else ""])
    count = len(report.faults)
    verdict = f"not ok, {counted(count, 'fault')}" if count else "ok"
    size = f"{report.files:,} files with {MANIFEST_NAMES}, {report.nbytes:,} bytes"
    return f"{verdict}: {size}, {digest}{against}"


def outcome(report: VerifyReport, package: Path) -> github.Outcome:
    """The report as annotations and a summary."""
    remarks = []
    for fault in report.faults:
        values = [f"{word} {value}" for word, value in (("expected", fault.expected), ("found", fault.found)) if value]
        detail = f" ({', '.join(values)})" if values else ""
        remarks.append(github.Remark(github.Level.ERROR, fault.kind, fault.name, fault.what + detail, fault.fix))
    facts = [("package digest", report.package_digest), ("recipe digest", report.recipe_digest), ("lock", report.lock)]
    facts += [("tolerated", ", ".join(report.tolerated)), ("wrote", ", ".join(report.written))]
    given = tuple((key, value) for key, value in facts if value)
    return github.Outcome("verify", package, report.ok, _verdict(report), tuple(remarks), given)
