"""The whole record of one entry: what `metadata.json` holds."""

from __future__ import annotations

import hashlib

import msgspec

from modulelens.records.call import Call
from modulelens.records.check import Grade
from modulelens.records.environment import Environment
from modulelens.records.measurement import Measurement
from modulelens.records.profile import Profile
from modulelens.records.source import InitCall, SourceRef
from modulelens.records.tensor import Structure


class Metadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One version of one module of one model.

    `node` is the digest of the module's node at its first call. `blobs` maps every blob that the
    entry needs, directly or through nodes, to its size. `wrapped_fqn` is its path in the wrapped
    model, where wrappers were around it. `step` counts the steps that were seen before the first
    traced one, `moment` the collectives that the process had begun. `sources` maps every class of
    the subtree that is not torch's own to the digest of its source; `beside` maps what these
    classes reach of the user's own, as `module:name` (helpers, constants, bases), to that of its
    code. `packages` are the top-level packages whose classes may be decoded for this entry, `roots`
    the folder on `sys.path` that each was found in, `main_file` the script that was `__main__`.
    `own_bytes` are the bytes of the tensors of this module (shared ones included, each storage
    once). `table_rows` says of which embedding tables so many rows were kept, of so many: those
    that were looked up. `merged` are the ranks whose parts were put together.
    """

    schema: int
    model: str
    fqn: str
    cls: str
    wrapped_fqn: str = ""
    version: int = 0
    created: str = ""
    trace_id: str = ""
    step: int = 0
    moment: int = 0
    node: str = ""
    depth: int = 0
    params: int = 0
    own_bytes: int = 0
    init: InitCall | None = None
    source: SourceRef | None = None
    sources: dict[str, str] = {}
    beside: dict[str, str] = {}
    environment: Environment = Environment()
    calls: tuple[Call, ...] = ()
    dropped_calls: int = 0
    recomputes: int = 0
    param_grads: dict[str, Structure] = {}
    ties: dict[str, tuple[str, ...]] = {}
    table_rows: dict[str, tuple[int, int]] = {}
    packages: tuple[str, ...] = ()
    roots: dict[str, str] = {}
    main_file: str = ""
    blobs: dict[str, int] = {}
    state_digest: str = ""
    tags: tuple[str, ...] = ()
    grade: Grade | None = None
    measurement: Measurement | None = None
    profile: Profile | None = None
    warnings: tuple[str, ...] = ()
    merged: tuple[int, ...] = ()

    @property
    def collection(self) -> str:
        """Id of the collection: all versions of this module of this model."""
        return collection_id(self.model, self.fqn)

    @property
    def id(self) -> str:
        """Id of the entry: `<collection id>/<version>`."""
        return f"{self.collection}/{self.version}"

    @property
    def name(self) -> str:
        """What people call it: `model/fqn`, or `model` for the root module."""
        return f"{self.model}/{self.fqn}" if self.fqn else self.model


def collection_id(model: str, fqn: str) -> str:
    """md5 hex digest of `model/fqn`: the same on every machine, safe as a folder name."""
    text = f"{model}/{fqn}".encode(errors="surrogatepass")
    return hashlib.md5(text, usedforsecurity=False).hexdigest()
