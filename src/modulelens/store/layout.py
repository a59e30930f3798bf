"""Where things lie in a repo's folder, and which names may become paths. Reads format.json only.

format.json                          schema version; its presence says that this is a repo
blobs/ab/abcd...                     raw bytes, named by their blake3 digest
entries/<collection id>/aliases.json alias -> version, and the highest version ever removed
entries/<collection id>/<version>/   metadata.json and state.pt
index.sqlite                         a cache of the entries
outbox.sqlite                        what is to be pushed, and how far it is
tmp/                                 files that are being written
changes/                             a marker per change that the index may lack
*.lock                               empty files, for flock
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from modulelens.errors import Corrupted, EnvironmentLacks, NotARepo, NotFound, SchemaTooNew
from modulelens.records import from_json, to_json
from modulelens.store.files import read_regular, space_for, write_atomic

FORMAT = 1

COLLECTION = re.compile(r"[0-9a-f]{32}")
DIGEST = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


class _Format(msgspec.Struct):
    schema: int


class Layout:
    """Paths of one repo. Nothing but validated ids and digests is ever joined to the root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writable = os.access(root, os.W_OK)
        self.format = root / "format.json"
        self.blobs = root / "blobs"
        self.entries = root / "entries"
        self.tmp = root / "tmp"
        self.changes = root / "changes"
        self.index = root / "index.sqlite"
        self.gc_lock = root / "gc.lock"
        self.outbox = root / "outbox.sqlite"
        self.index_lock = root / "index.lock"
        self.writer_lock = root / "writer.lock"
        databases = (self.index, self.outbox)
        ends = ("", "-wal", "-shm", "-journal")
        tables = [path.with_name(path.name + end) for path in databases for end in ends]
        locks = (self.gc_lock, self.index_lock, self.writer_lock)
        self.files = (self.format, *locks, *tables)

    def check_writable(self) -> None:
        """Refuses what would change a repo that cannot be written.

        Raises:
            EnvironmentLacks: It cannot be written.
        """
        if not self.writable:
            raise EnvironmentLacks(
                f"{self.root} cannot be written", hint="copy it, or change its permissions"
            )

    def blob(self, digest: str) -> Path:
        """Path of a blob, which may not exist.

        Raises:
            NotFound: `digest` is no blake3 hex digest.
        """
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise NotFound(f"{digest!r:.100} is not the digest of a blob (64 hex digits)")
        return Path(f"{self.blobs}/{digest[:2]}/{digest}")

    def collection(self, collection: str) -> Path:
        """Folder of a collection, which may not exist.

        Raises:
            NotFound: `collection` is no collection id.
        """
        if not COLLECTION.fullmatch(collection):
            raise NotFound(f"{collection!r:.100} is not a collection id (32 hex digits)")
        return self.entries / collection

    def entry(self, entry_id: str) -> Path:
        """Folder of an entry, which may not exist.

        Raises:
            NotFound: `entry_id` is not `<collection id>/<version>`.
            Corrupted: One of the two folders is a symbolic link.
        """
        collection, _, version = entry_id.partition("/")
        if not _VERSION.fullmatch(version):
            raise NotFound(f"{entry_id!r:.100} is not an entry id (<collection id>/<version>)")
        folder = self.collection(collection) / version
        for part in (folder.parent, folder):
            if part.is_symlink():
                raise Corrupted(
                    f"{part} is a symbolic link; entry {entry_id} is refused",
                    hint="replace the link by the folder it points to",
                )
        return folder

    def existing(self, entry_id: str) -> tuple[str, int]:
        """Collection and version of an entry that is committed.

        Raises:
            NotFound: No such entry.
        """
        if not (self.entry(entry_id) / "metadata.json").exists():
            raise NotFound(f"no entry {entry_id} in {self.root}", hint="modulelens ls")
        collection, _, version = entry_id.partition("/")
        return collection, int(version)

    def collections(self) -> Iterator[str]:
        """Ids of all collections, in the order of the folder."""
        for folder in listing(self.entries):
            if COLLECTION.fullmatch(folder.name) and is_folder(folder):
                yield folder.name

    def entry_ids(self) -> Iterator[str]:
        """Ids of all entries, also of those that are unfinished."""
        for collection in self.collections():
            for version in self.version_folders(collection):
                if is_folder(self.collection(collection) / str(version)):
                    yield f"{collection}/{version}"

    def version_folders(self, collection: str) -> list[int]:
        """Numbers of all version folders, newest first, also of those that are unfinished."""
        names = [path.name for path in listing(self.collection(collection))]
        return sorted((int(name) for name in names if _VERSION.fullmatch(name)), reverse=True)

    def versions(self, collection: str) -> list[int]:
        """Numbers of the committed versions, newest first."""
        folder = self.collection(collection)
        return [
            number
            for number in self.version_folders(collection)
            if (folder / str(number) / "metadata.json").exists()
        ]


def listing(folder: Path) -> list[Path]:
    """What a folder holds; nothing where it is missing: copies of a repo lack empty folders."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_folder(path: Path) -> bool:
    """Whether it is a folder, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def open_layout(root: Path, *, create: bool = True) -> Layout:
    """The layout of the repo at `root`, which is created when it is missing or empty.

    Raises:
        NotARepo: `root` is a file, or a folder that holds something else.
        NotFound: There is no repo at `root` and `create` is False.
        SchemaTooNew: A newer ModuleLens made the repo.
        Corrupted: format.json cannot be read.
    """
    layout = Layout(root)
    if root.exists() and not root.is_dir():
        raise NotARepo(f"{root} is a file, not a repo", hint="give the path of a folder")
    folders = (layout.tmp, layout.blobs, layout.entries, layout.changes)
    for path in filter(os.path.lexists, (*folders, *layout.files)):
        # What is changed or removed through a link would not be the repo's.
        if path.is_symlink() or path.is_dir() != (path in folders) or path.is_fifo():
            raise NotARepo(
                f"{path} is a link, or no file or folder as it should be",
                hint="remove it, or put back what it was; only the repo's own folder may be a link",
            )
    if is_new := not layout.format.exists():
        # Another process may be creating it right now: our own folders are not foreign.
        foreign = {path.name for path in listing(root)} - {folder.name for folder in folders}
        if foreign and not layout.format.exists():
            raise NotARepo(
                f"{root} holds something else: {', '.join(sorted(foreign)[:3])}",
                hint="give a new or an empty folder",
            )
        if not create:
            raise NotFound(f"no repo at {root}", hint="add something to it first, or give --repo")
    else:
        layout.writable = os.access(root, os.W_OK)  # another process may just have made it
    if is_new or layout.writable:
        data = to_json(_Format(FORMAT))
        with space_for("a new repo", root, len(data)):
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            layout.writable = True
            if is_new:
                write_atomic(layout.format, data, tmp=layout.tmp)
    _check_format(layout)
    return layout


def _check_format(layout: Layout) -> None:
    schema = from_json(read_regular(layout.format), _Format, what=str(layout.format)).schema
    if schema > FORMAT:
        raise SchemaTooNew(
            f"{layout.root} has format {schema}, this ModuleLens reads up to {FORMAT}",
            hint="pip install --upgrade modulelens",
        )
