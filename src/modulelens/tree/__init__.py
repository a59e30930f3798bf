"""Live args, outputs and attributes <-> structure + leaves: the one place that flattens."""

from modulelens.tree.decode import Decoder, Opaque
from modulelens.tree.encode import Encoder
from modulelens.tree.flat import Flat, flatten, tensors_of
from modulelens.tree.names import ALLOWED_PACKAGES, Importer, display_path, path_of
from modulelens.tree.tensors import as_non_leaf, distinct, dtype_name, dtype_of, is_plain, spec_of

__all__ = [
    "ALLOWED_PACKAGES",
    "Decoder",
    "Encoder",
    "Flat",
    "Importer",
    "Opaque",
    "as_non_leaf",
    "display_path",
    "distinct",
    "dtype_name",
    "dtype_of",
    "flatten",
    "is_plain",
    "path_of",
    "spec_of",
    "tensors_of",
]
