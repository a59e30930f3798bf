"""A team's repo: what a remote is, which ones there are, and what goes there and comes back.

store (entries) -> packs -> outbox -> remote -> fetched, checked -> store
"""

from __future__ import annotations

from modulelens.errors import UsageError
from modulelens.store.remote.seam import Draft, Pack, Page, Remote, Version

__all__ = ["Draft", "Pack", "Page", "Remote", "Version", "checked", "open_remote"]


def open_remote(url: str, **options: str) -> Remote:
    """The remote of a URL.

    Args:
        url: `wandb://entity/registry` (or `wandb://registry`: the default entity), or a folder of
            any file system that fsspec knows: `file:///mnt/team`, `s3://bucket/folder`,
            `gs://bucket/folder`, `memory://name`.
        options: Passed to the file system, such as `endpoint_url`.

    Raises:
        UsageError: It is no such URL.
        EnvironmentLacks: The package that it takes is not installed.
        Unavailable: It does not answer.
    """
    url = checked(url)
    if url.startswith("wandb://"):
        from modulelens.store.remote.registry import RegistryRemote

        return RegistryRemote(url)
    from modulelens.store.remote.folder import FolderRemote

    return FolderRemote(url, **options)


def checked(url: str) -> str:
    """The URL as it is known by: that of a remote, as far as can be told without asking it.

    Raises:
        UsageError: It is no such URL.
    """
    scheme, found, rest = url.partition("://")
    if not (found and scheme and rest):
        raise UsageError(
            f"{url!r} is not the URL of a remote",
            hint="such as wandb://entity/registry, s3://bucket/folder or file:///mnt/team",
        )
    if scheme == "wandb":
        from modulelens.store.remote.registry import parts_of

        parts_of(url)
        return url
    return url if rest.strip("/") == "" else url.rstrip("/")
