"""Prints a benchmark's rows as a table and writes them as JSON. Knows no measurement."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

Row = tuple[str, str, str, str]


def report(title: str, rows: list[Row], json_file: str | None) -> None:
    """Prints `what | measured | target | note`; writes the rows where the user asked."""
    machine = (
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}"
    )
    print(f"\n{title} ({machine})\n")
    print("| what | measured | target | note |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    if json_file:
        names = ("what", "measured", "target", "note")
        data = {
            "title": title,
            "machine": machine,
            "rows": [dict(zip(names, r, strict=True)) for r in rows],
        }
        Path(json_file).write_text(json.dumps(data, indent=2) + "\n")
