"""Uploads of exported folders to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, get_token

from megabatch.errors import UsageError, one_line

_CARD = "README.md"


class UploadFailed(UsageError):
    """The hub could not be reached, or refused."""

    exit_code = 1


def check(repo: str) -> None:
    """Raise a UsageError if a repository's name has another form, or there is no token."""
    if repo.count("/") != 1:
        raise UsageError(f"--push-to-hub {repo}: expected NAME/REPO, a user's or organisation's")
    if get_token() is None:
        raise UsageError(
            f"--push-to-hub {repo}: no token of the hub; hf auth login, or set HF_TOKEN"
        )


def push_to_hub(folder: str | Path, repo: str, *, private: bool = False) -> list[str]:
    """Upload an exported folder into a repository of the hub, NAME/REPO, or a new one.

    A new commit replaces files of the same names, but no model card. Returns a sentence if the
    repository kept its own. With `private`, a new repository is private and a public one refused.

    Raises:
        UsageError: there is no token, or the repository is public; UploadFailed.
    """
    check(repo)
    api = HfApi()
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        found = api.model_info(repo)
        if private and not found.private:
            raise UsageError(f"--private: {repo} exists and is public; nothing was uploaded")
        keep = [_CARD] if _CARD in (file.rfilename for file in found.siblings or ()) else None
        api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=keep)
    except UsageError:
        raise
    except Exception as error:  # of the hub, or of whatever library reaches it
        reason = one_line(error, 400)
        raise UploadFailed(f"{folder} is complete, but was not uploaded: {reason}") from error
    return [f"{repo} keeps its {_CARD}; the new one is in {folder}"] if keep else []
