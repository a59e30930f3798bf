"""Whether a folder lies on a local disk. Knows nothing of repos."""

from __future__ import annotations

import re
from pathlib import Path

_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|afs|ceph|lustre|gpfs|beegfs|glusterfs|ocfs2|gfs2|pvfs2|fuse.*"
)
_MOUNTS = Path("/proc/self/mountinfo")


def is_local(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether `folder` is on a file system of this machine; False where that cannot be told."""
    if not mounts.exists():
        return False
    path = folder.resolve()
    best, kind = "", "unknown"
    for line in mounts.read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])
        # A later mount on the same point hides the earlier one.
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind != "unknown" and _NETWORK.fullmatch(kind) is None
