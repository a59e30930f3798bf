"""What is remembered: frozen structs, one noun per file. Knows no torch, no disk."""

from modulelens.records.call import Call
from modulelens.records.check import Check, Grade, GradeLevel, LeafCheck, Reason, Status
from modulelens.records.coverage import Coverage, CoverageList, Fate
from modulelens.records.environment import Ambient, Autocast, Context, Environment, Rng
from modulelens.records.measurement import Comparison, Measurement
from modulelens.records.metadata import Metadata, collection_id
from modulelens.records.module import Hook, ModuleNode
from modulelens.records.profile import OpRow, Profile
from modulelens.records.schema import SCHEMA, from_json, read_metadata, to_json
from modulelens.records.source import InitCall, SourceRef
from modulelens.records.tensor import (
    QUANTILE_LEVELS,
    Structure,
    TensorRef,
    TensorSpec,
    ValueStats,
    all_kept,
    as_ref,
    bodies_of,
    tensor_refs,
)

__all__ = [
    "QUANTILE_LEVELS",
    "SCHEMA",
    "Ambient",
    "Autocast",
    "Call",
    "Check",
    "Comparison",
    "Context",
    "Coverage",
    "CoverageList",
    "Environment",
    "Fate",
    "Grade",
    "GradeLevel",
    "Hook",
    "InitCall",
    "LeafCheck",
    "Measurement",
    "Metadata",
    "ModuleNode",
    "OpRow",
    "Profile",
    "Reason",
    "Rng",
    "SourceRef",
    "Status",
    "Structure",
    "TensorRef",
    "TensorSpec",
    "ValueStats",
    "all_kept",
    "as_ref",
    "bodies_of",
    "collection_id",
    "from_json",
    "read_metadata",
    "tensor_refs",
    "to_json",
]
