"""Uploads of exported folders to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import quote

from huggingface_hub import HfApi, get_token

from megabatch import __version__
from megabatch.errors import UsageError, one_line

_CARD = "README.md"


class UploadFailed(UsageError):
    """The hub could not be reached, or refused."""

    exit_code = 1


def check(repo: str) -> None:
    """Raise a UsageError if a repository's name has another form, or there is no token."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"--push-to-hub {repo}: expected NAME/REPO, a user's or organisation's")
    if get_token() is None:
        raise UsageError(
            f"--push-to-hub {repo}: no token of the hub; hf auth login, or set HF_TOKEN"
        )


def push_to_hub(folder: str | Path, repo: str, *, private: bool = False) -> list[str]:
    """Upload a folder into a repository of the hub, which is created if there is none.

    Files of the same names are replaced by a new commit, but not a model card that is there.

    Args:
        folder: as `export_run` wrote it.
        repo: "NAME/REPO".
        private: whether a new repository is private. A public one is refused.

    Returns:
        A sentence if the repository kept its model card.

    Raises:
        UsageError: there is no token, or the repository is public; UploadFailed.
    """
    check(repo)
    api = HfApi(library_name="megabatch", library_version=__version__)
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        found = api.model_info(repo)
        if private and not found.private:
            raise UsageError(f"--private: {repo} exists and is public; nothing was uploaded")
        keep = _CARD in (file.rfilename for file in found.siblings or ())
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            ignore_patterns=[_CARD] if keep else None,
            commit_message="Model exported by megabatch",
        )
    except UsageError:
        raise
    except Exception as error:  # of the hub, or of whatever library reaches it
        reason = one_line(error, 400)
        raise UploadFailed(f"{folder} is complete, but was not uploaded: {reason}") from error
    if not keep:
        return []
    return [
        f"{repo} keeps its model card; to replace it: "
        f"hf upload {repo} {quote(str(Path(folder, _CARD)))} {_CARD}"
    ]
