"""The wheel holds what the checkout holds, and runs away from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_built_wheel_runs_away_from_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        packed.extractall(tmp_path / "installed")
    shipped = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    assert shipped <= names
    assert "modulelens/py.typed" in names
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    found = subprocess.run(
        [sys.executable, "-m", "modulelens", "doctor", "--json"],
        check=True,
        capture_output=True,
        env=environment,
        cwd=tmp_path,
    )
    assert json.loads(found.stdout)["ok"]
    where = [sys.executable, "-c", "import modulelens; print(modulelens.__file__)"]
    place = subprocess.run(where, check=True, capture_output=True, env=environment, cwd=tmp_path)
    assert str(tmp_path) in place.stdout.decode()
