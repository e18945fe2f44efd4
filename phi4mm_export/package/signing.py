"""Signatures over a whole package through the `model-signing` library (OpenSSF model signing), with keys from files.

Optional: extra `sign`. The signature is a Sigstore bundle that `model_signing verify` reads as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phi4mm_export.errors import MissingExtraError, UsageError
from phi4mm_export.spec.on_disk import is_file


class SignatureMismatchError(Exception):
    """The signature is not that of this package under this key; the text is the library's."""


def check_signing_key(private_key: Path) -> None:
    """Raise MissingExtraError without the library, UsageError without a file: before gigabytes are hashed."""
    _library("signing a package")
    _readable(private_key, "--sign")


def check_signature_files(signature: Path, public_key: Path) -> None:
    """As `check_signing_key`, for the two files that a signature is checked with."""
    _library("checking a signature")
    _readable(signature, "--signature")
    _readable(public_key, "--public-key")


def sign_package(package: Path, signature: Path, private_key: Path) -> None:
    """Write a signature over every file of the package (its own file left out).

    Raises as `check_signing_key`, and UsageError for a key that cannot be used.
    """
    check_signing_key(private_key)
    library = _library("signing a package")
    beside = signature.with_name(f".{signature.name}.tmp")
    beside.unlink(missing_ok=True)  # nothing is written through a link that lies there
    try:
        config = library.signing.Config().use_elliptic_key_signer(private_key=private_key)
        config.set_hashing_config(_hashing(library, package, signature, beside)).sign(package, beside)
        beside.replace(signature)
    except (ValueError, TypeError) as err:
        raise UsageError(
            f"the package could not be signed with this key: {_first_line(err)}",
            where=private_key.name,
            fix="give an elliptic curve key in PEM, such as one of: openssl ecparam -name prime256v1 -genkey -noout",
        ) from err
    finally:
        beside.unlink(missing_ok=True)


def check_signature(package: Path, signature: Path, public_key: Path) -> None:
    """Verify a signature over every file of the package.

    Raises as `check_signature_files`, and SignatureMismatchError.
    """
    check_signature_files(signature, public_key)
    library = _library("checking a signature")
    try:
        config = library.verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except (ValueError, TypeError) as err:
        raise UsageError(f"not a public key: {_first_line(err)}", where=public_key.name) from err
    try:
        config.set_hashing_config(_hashing(library, package, signature)).verify(package, signature)
    except Exception as err:
        if isinstance(err, OSError | MemoryError):
            raise
        # ValueError, the key library's InvalidSignature, and parsers' own errors: all mean that nothing was proven
        raise SignatureMismatchError(_first_line(err)) from err


def _hashing(library: Any, package: Path, *own: Path) -> Any:
    inside = [path.absolute().relative_to(package.absolute()) for path in own if _is_inside(path, package)]
    return library.hashing.Config().set_ignored_paths(paths=inside, ignore_git_paths=True)


def _is_inside(path: Path, package: Path) -> bool:
    return path.absolute().is_relative_to(package.absolute())


def _library(purpose: str) -> Any:
    try:
        import model_signing
        from model_signing import hashing, signing, verifying  # noqa: F401 - loads the modules used through the package
    except ImportError as err:
        raise MissingExtraError("model-signing", "sign", purpose) from err
    return model_signing


def _readable(path: Path, where: str) -> None:
    if not is_file(path):
        raise UsageError(f"expected a file, found nothing at {path}", where=where, fix="check the path")


def _first_line(err: Exception) -> str:
    return (str(err).strip() or type(err).__name__).splitlines()[0]
