"""Who and what the stand-in server knows from the start, and what a test may set."""

from __future__ import annotations

from dataclasses import dataclass, field

# What the server has; an SDK asks a newer server for nothing that it does not announce.
FEATURES = {
    "ARTIFACT_REGISTRY_SEARCH": True,
    "INCLUDE_ARTIFACT_TYPES_IN_REGISTRY_CREATION": True,
    "ARTIFACT_MEMBERSHIP_IN_LINK_ARTIFACT_RESPONSE": True,
    "ARTIFACT_COLLECTIONS_FILTERING_SORTING": True,
    "ARTIFACT_V2_DOWNLOAD_HANDLER_SUPPORTS_ARTIFACT_ID": True,
    "USE_ARTIFACT_WITH_ENTITY_AND_PROJECT_INFORMATION": True,
    "TOTAL_COUNT_IN_FILE_CONNECTION": True,
    "ARTIFACT_DIGEST_ALGORITHM": True,
    "ARTIFACT_TAGS": True,
    "CLIENT_IDS": True,
    "LARGE_FILENAMES": True,
    "PROJECT_ARTIFACT_COLLECTION_MEMBERSHIP": True,
    "ARTIFACT_COLLECTION_MEMBERSHIP_FILES": True,
    "ARTIFACT_COLLECTION_MEMBERSHIP_FILE_DOWNLOAD_HANDLER": True,
}
WRITE_KEY = "w" * 40
READ_KEY = "r" * 40
USER = "tester"
TEAM = "team"
LONER = "loner"
ORG = "Test Org"
ORG_ENTITY = "test-org"


@dataclass
class Options:
    """What a test may set, at the start or while the server runs."""

    latency_s: float = 0.0
    search_lag_s: float = 0.0
    advanced_search: bool = False
    features: dict[str, bool] = field(default_factory=dict)
    read_only: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=lambda: {WRITE_KEY: "write", READ_KEY: "read"})
