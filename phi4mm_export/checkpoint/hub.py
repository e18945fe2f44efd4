"""Checkpoints by hub id, through huggingface_hub (extra `hub`).

HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN act as that library documents them. A folder on
disk never comes here: it needs no network and no extra.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phi4mm_export.errors import CheckpointError, MissingExtraError, SystemLimitError, UsageError
from phi4mm_export.spec.on_disk import exists, home_expanded, is_folder

FETCHED_FILES: tuple[str, ...] = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "vision-lora/adapter_config.json",
    "vision-lora/adapter_model.safetensors",
    "speech-lora/adapter_config.json",
    "speech-lora/adapter_model.safetensors",
)
"""What an export reads; never code, pickles, pictures or other formats of the same weights."""

SKIPPED_FILES: tuple[str, ...] = ("onnx/*", "gguf/*", "original/*", "examples/*")

ByteProgress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_HUB_ID = re.compile(rf"{_PART}/{_PART}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_model(text: str, *, revision: str | None = None) -> Path | str:
    """What a CHECKPOINT argument means: an existing folder as a Path, else a hub id `OWNER/NAME` as text.

    A folder always wins. Raises UsageError, without looking at the network, for a file and for anything that
    reads like a path: absolute, starting with `.` or `~`, with a backslash, a trailing slash, more or fewer than one
    slash, or below a folder that exists; and for a `revision` of a folder, which has none.
    """
    for candidate in (Path(text), _home_expanded(text)):
        if text and is_folder(candidate):
            if revision is not None:
                where = f"--revision {revision}"
                raise UsageError("expected a hub id, found a folder", where=where, fix="leave --revision out")
            return candidate
    if text and exists(Path(text)):
        raise UsageError("expected a checkpoint folder or a hub id, found a file", where=text, fix="pass its folder")
    owner = text.partition("/")[0]
    if not _HUB_ID.fullmatch(text) or ".." in text or "--" in text or exists(Path(owner)):
        raise UsageError(
            "there is no such folder",
            where=text or "CHECKPOINT",
            fix="pass a checkpoint folder, or a hub id OWNER/NAME",
        )
    return text


def fetch_checkpoint(
    model_id: str,
    *,
    revision: str | None = None,
    progress: ByteProgress | None = None,
    patterns: tuple[str, ...] = FETCHED_FILES,
) -> Path:
    """The local snapshot folder of a hub model, fetched if it is not cached; only files an export reads.

    The folder's name is the commit hash (see `snapshot_commit`). Raises MissingExtraError without
    huggingface_hub, UsageError for an unknown model or revision or one that needs a token, SystemLimitError for
    network, offline mode and disk.
    """
    named = f"{model_id} at revision {revision}" if revision else model_id
    with hub_faults(named):
        import huggingface_hub

        folder = huggingface_hub.snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(SKIPPED_FILES),
            tqdm_class=_reporting_bar(progress),
        )
    path = Path(folder)
    if snapshot_commit(path) is None:
        raise CheckpointError(
            f"the snapshot's folder is not named by a commit: {path.name}", where=named, fix="clear the hub's cache"
        )
    return path


@contextlib.contextmanager
def hub_faults(named: str) -> Iterator[None]:
    """Turn what huggingface_hub raises in the block into our errors; `named` is the model and revision they show."""
    try:
        from huggingface_hub import errors as hub
    except ImportError as err:
        raise MissingExtraError("huggingface_hub", "hub", "fetching a model by its hub id") from err
    try:
        yield
    except hub.HFValidationError as err:
        raise UsageError(f"not a hub id: {err}", where=named, fix="pass OWNER/NAME") from err
    except hub.GatedRepoError as err:
        raise UsageError(
            "the model is gated",
            where=named,
            fix="accept its terms on the hub, and set HF_TOKEN or run `hf auth login`",
        ) from err
    except hub.RepositoryNotFoundError as err:
        raise UsageError(
            "the hub has no such model, or it is private",
            where=named,
            fix="check the id; set HF_TOKEN if it is private",
        ) from err
    except hub.RevisionNotFoundError as err:
        raise UsageError("the model has no such revision", where=named, fix="check --revision") from err
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as err:
        raise SystemLimitError(
            "the model is not in the local cache and the hub cannot be reached",
            where=named,
            fix="go online (unset HF_HUB_OFFLINE, check HF_ENDPOINT), or pass a checkpoint folder",
        ) from err
    except (hub.HfHubHTTPError, getattr(hub, "HTTPError", OSError), OSError) as err:
        raise SystemLimitError(
            f"fetching failed: {_first_line(err)}",
            where=named,
            fix="run again, finished files are kept; check network, HF_ENDPOINT and the disk of HF_HOME",
        ) from err


def _home_expanded(text: str) -> Path:
    try:
        return home_expanded(text)
    except RuntimeError:  # a user this machine does not know
        return Path(text)


def snapshot_commit(folder: Path) -> str | None:
    """The commit hash of a hub snapshot folder, `.../snapshots/HASH`; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None


def _first_line(err: Exception) -> str:
    return (str(err).strip() or type(err).__name__).splitlines()[0]


def _reporting_bar(progress: ByteProgress | None) -> type[Any]:
    """A progress bar class for huggingface_hub that draws nothing and reports bytes to `progress`."""
    from huggingface_hub.utils import tqdm

    most_done = 0

    class ReportingBar(tqdm):  # type: ignore[misc]  # huggingface_hub is optional and has no types here
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            """Draw nothing."""

        def update(self, n: float | None = 1) -> None:
            nonlocal most_done
            super().update(n)
            if progress is not None and self.unit == "B" and self.total and self.n > most_done:
                most_done = int(self.n)
                progress(most_done, int(self.total))

    return ReportingBar
