"""Downloads a checkpoint from the Hugging Face hub, with one line for each way that can fail.

huggingface_hub does the work and keeps its own rules: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Code and pickled weights
are never downloaded. Go on to `read_safetensors.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from jaxserve.convert.read_safetensors import PICKLED, SMALL_FILES, pickle_message
from jaxserve.convert.source import listed
from jaxserve.convert.tokenizer_files import SOURCES
from jaxserve.errors import CheckpointError

_HUB_ID = re.compile(r"(?=.{1,96}$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PATTERNS = ["config.json", *SMALL_FILES, *SOURCES, "*.safetensors", "*.safetensors.index.json"]
# Copies of the weights for other programs.
_OTHER_COPIES = ["*/*", "consolidated*"]


def is_hub_id(name: str) -> bool:
    """Whether a name that is no path may be a hub id, such as `org/name`."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith((".gguf", ".safetensors", *PICKLED))


def download(repo_id: str, revision: str | None) -> tuple[Path, str]:
    """The directory of a hub checkpoint (downloaded if need be) and its commit. No path has its name: callers look there first.

    Raises:
        CheckpointError: Gated, missing, or not reachable and not in the local cache; the message is one line.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repo_id} (revision {revision})" if revision else repo_id
    try:
        if not constants.is_offline_mode():
            _check_files(repo_id, revision)
        path = snapshot_download(repo_id, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=_OTHER_COPIES)
    except GatedRepoError:
        raise CheckpointError(
            f"{at} is gated: accept its terms at {constants.ENDPOINT}/{repo_id}, then give a token of that account in HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{repo_id} has no revision {revision!r} on {constants.ENDPOINT}.") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{at} is neither a path nor a model on {constants.ENDPOINT} (if it is private, set HF_TOKEN).") from None
    except (LocalEntryNotFoundError, OSError) as error:
        # What the hub answered is the error itself, or the reason why its files are looked for in the cache only.
        for answer in (error, error.__cause__):
            if isinstance(answer, HfHubHTTPError):
                raise CheckpointError(f"{at} cannot be downloaded: {constants.ENDPOINT} answered: {_first_line(answer)}") from None
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"
        raise CheckpointError(
            f"{at} is neither a file or directory here nor in the hub's local cache ({constants.HF_HUB_CACHE}), and {why}."
        ) from None
    return Path(path), os.path.basename(path)


def _check_files(repo_id: str, revision: str | None) -> None:
    """A repository without safetensors is refused before anything is downloaded."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repo_id, revision=revision, timeout=10)
    except Exception:
        # Whatever is wrong, the download itself meets it too, and may still have the files in its cache.
        return
    names = [sibling.rfilename for sibling in info.siblings or []]
    if any(name.endswith(".safetensors") for name in names):
        return
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        raise CheckpointError(pickle_message(f"{repo_id} holds only pickled weights ({listed(pickled, 3)})"))
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        raise CheckpointError(f"{repo_id} holds GGUF files ({listed(gguf, 3)}); download one and name it.")
    raise CheckpointError(f"{repo_id} holds no safetensors weights.")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
