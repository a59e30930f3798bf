"""The texts of the GraphQL operations that the stand-in answers, as the installed SDK sends them.

Python's are constants of two generated modules; those of the SDK's core are strings in its binary.
`operations.json` lists them by side, with digests. After the server was fitted to a new SDK, or a
name was added there with "" as its digest, `python -m tests.wandb_server.drift` writes it anew.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from pathlib import Path

RECORD = Path(__file__).with_name("operations.json")
# Put together at run time: only their replies can be checked, by the flows.
ASSEMBLED = ["Run", "Runs"]
Digests = dict[str, dict[str, str]]
MODULES = ("wandb.sdk.artifacts._generated.operations", "wandb.apis._generated.operations")


def recorded() -> Digests:
    """Side -> operation name -> digest, as last written."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def of_python() -> dict[str, str]:
    """Operation name -> text, of the generated modules."""
    found = {}
    for module in MODULES:
        for constant, text in vars(importlib.import_module(module)).items():
            if constant.endswith("_GQL"):
                found[re.search(r"(?:query|mutation) (\w+)", text)[1]] = text  # type: ignore[index]
    return found


def of_core() -> dict[str, str]:
    """Operation name -> text, of the binary, with the fragments that it uses."""
    import wandb

    binary = (Path(wandb.__file__).parent / "bin" / "wandb-core").read_bytes()
    names = "|".join(recorded()["core"]).encode()
    found = {}
    for match in re.finditer(rb"(?:query|mutation) (%s) ?[({]" % names, binary):
        text = block_at(binary, match.start())
        for name in re.findall(r"\.\.\. ?([A-Z]\w+)", text):
            text += block_at(binary, binary.find(b"fragment %s on " % name.encode()))
        found[match[1].decode()] = text
    return found


def block_at(binary: bytes, start: int) -> str:
    """The operation or fragment that starts there, up to the brace that closes its selection."""
    text = binary[start : start + 8192].decode("utf-8", "replace")
    depth, inside = 0, 0
    for place, letter in enumerate(text):
        inside += (letter == "(") - (letter == ")")
        if inside == 0:
            depth += (letter == "{") - (letter == "}")
            if letter == "}" and depth == 0:
                return text[: place + 1]
    raise ValueError(f"no end of the block: {text[:60]!r}")


def digests() -> Digests:
    """Those of the installed SDK; '' where an operation is gone."""
    texts = {"python": of_python(), "core": of_core()}
    return {
        side: {name: digest(texts[side].get(name, "")) for name in sorted(names)}
        for side, names in recorded().items()
    }


def digest(text: str) -> str:
    """Of a text without its layout."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16] if text else ""


def changes(before: Digests, after: Digests) -> list[str]:
    """One line for each operation whose text isn't what it was."""
    return [
        f"{side}: {name} {'has another text' if after[side].get(name) else 'is gone'}"
        for side in before
        for name, value in before[side].items()
        if after[side].get(name) != value
    ]


if __name__ == "__main__":
    RECORD.write_text(json.dumps(digests(), indent=1) + "\n", encoding="utf-8")
