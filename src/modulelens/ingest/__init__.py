"""A finished trace -> stored bytes, nodes and records."""

from modulelens.ingest.entries import Ingest

__all__ = ["Ingest"]
