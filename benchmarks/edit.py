"""From a save to the verdict: `python benchmarks/edit.py [--json FILE] [--edits N]`.

A block of 20 MB from a package of eleven files (`rankers/`). Its files are edited while
`entry.watch` runs, as `modulelens check --watch` does; the clock runs from just before the file is
written to when the verdict is there. The forward alone is measured in the same run, on the same
number of threads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from table import Row, report

import modulelens as ml

HERE = Path(__file__).parent
PAUSE_S = 0.3
#: File, text, and what stands there after the edit; `{}` is another number each time.
Edits = tuple[tuple[str, str, str], ...]
EDITS: Edits = (
    (
        "block.py",
        "constants.RESIDUAL * self.attention",
        "constants.RESIDUAL * 1.{} * self.attention",
    ),
    ("constants.py", "TEMPERATURE = 1.0", "TEMPERATURE = 1.{}"),
    ("norms.py", "torch.rsqrt(", "1.{} * torch.rsqrt("),
    ("activations.py", "F.silu(gate) * value", "F.silu(gate) * value  # {}"),
    ("attention.py", "masks.causal(length)", "masks.causal(length + {})[{}:, {}:]"),
    ("experts.py", "self.mixing = mixing", "self.mixing, self.number = mixing, {}"),
)
CANDIDATE = """from rankers import RankingBlock, constants

class Mine(RankingBlock):
    def forward(self, events):
        events = self.attention(self.norm1(events)) * constants.RESIDUAL + events
        return self.experts(self.cross(self.norm2(events))) + events
"""
CANDIDATE_EDITS: Edits = (("mine.py", ") + events\n", ") + events  # {}\n"),)


def capture(folder: Path) -> ml.Entry:
    code = folder / "code"
    shutil.copytree(HERE / "rankers", code / "rankers", ignore=shutil.ignore_patterns("__*__"))
    shutil.copy(HERE / "rankers" / "__init__.py", code / "rankers")
    (code / "rankers" / "mine.py").write_text(CANDIDATE)
    sys.path.insert(0, str(code))
    from rankers import RankingBlock, Settings

    torch.manual_seed(0)
    settings = Settings()
    with ml.track_init():
        block = RankingBlock(settings)
    events = torch.randn(2, 64, settings.width, requires_grad=True)
    with ml.trace(block, name="block", modules="") as trace:
        block(events).sum().backward()
    (entry,) = ml.Repo(folder / "repo").add(trace)
    return entry


def save_to_verdict(
    entry: ml.Entry, package: Path, edits: int, planned: Edits, candidate: str | None
) -> tuple[list[float], list[str]]:
    """Seconds from each save to its verdict, and the verdicts."""
    times, statuses = [], []
    texts = {name: (package / name).read_text() for name, _, _ in planned}
    with contextlib.closing(entry.watch(candidate)) as verdicts:
        first = next(verdicts)
        assert first, first
        for number in range(edits + 1):  # the first one shows what has to be imported
            name, old, new = planned[number // 2 % len(planned)]
            assert old in texts[name]
            text = texts[name]  # each edit is put back by the next one
            if number % 2 == 0:
                text = text.replace(old, new.replace("{}", str(number + 1)))
            start: list[float] = []

            def save(path: Path = package / name, text: str = text, start: list[float] = start):
                start.append(time.perf_counter())
                path.write_text(text)

            timer = threading.Timer(PAUSE_S, save)
            timer.start()
            check = next(verdicts)
            spent = time.perf_counter() - start[0]
            timer.join()
            assert [Path(changed).name for changed in check.changed] == [name]
            if number:
                times.append(spent)
                statuses.append(check.status.value)
    return times, statuses


def rows_of(entry: ml.Entry, package: Path, edits: int, *, candidate: bool) -> list[Row]:
    forward_s = entry.benchmark(backward=False, budget_s=2.0).median_s
    name = f"{package / 'mine.py'}:Mine" if candidate else None
    planned = CANDIDATE_EDITS if candidate else EDITS
    times, statuses = save_to_verdict(entry, package, edits, planned, name)
    own = [1e3 * (spent - forward_s) for spent in times]
    kinds = ", ".join(f"{statuses.count(s)} {s}" for s in sorted(set(statuses)))
    size = f"{entry.metadata.own_bytes / 1e6:.0f} MB, forward {1e3 * forward_s:.0f} ms"
    what = f"save to verdict without the forward, {edits} edits of "
    what += "a candidate, which is run on other values too" if candidate else "the package"
    target = "-" if candidate else "<= 150 ms"
    return [
        (f"{what}: median", f"{statistics.median(own):.0f} ms", target, size),
        (f"{what}: largest", f"{max(own):.0f} ms", target, kinds),
        (f"{what}: smallest", f"{min(own):.0f} ms", "-", f"load {os.getloadavg()[0]:.1f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--edits", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        entry = capture(Path(name))
        package = Path(name) / "code" / "rankers"
        rows = rows_of(entry, package, options.edits, candidate=False)
        rows += rows_of(entry, package, max(2, options.edits // 4), candidate=True)
    report("Edit loop", rows, options.json)


if __name__ == "__main__":
    main()
