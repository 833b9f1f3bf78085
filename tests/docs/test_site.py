"""The pages as a site: every page is in it, every link leads somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs._pages import PAGES, ROOT


def test_the_strict_build_has_all_pages(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    built = {path.stem for path in tmp_path.glob("*.html")} - {"404"}
    assert built == {Path(page).stem for page in PAGES if page.startswith("docs/")}
