"""The wheel holds only loram/ and loram_stages/, and every module in it imports without the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree, built from a copy so that the checkout stays clean."""
    work = tmp_path_factory.mktemp("wheel")
    for name in ("loram", "stages"):
        shutil.copytree(ROOT / name, work / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work / "source" / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(work), str(work / "source")]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    return next(work.glob("*.whl"))


def modules(wheel: Path) -> list[str]:
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    return sorted(".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in names)


def test_only_the_two_packages_are_inside(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"loram", "loram_stages"}
    in_tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "loram").rglob("*.py")}
    in_tree |= {
        path.relative_to(ROOT).as_posix().replace("stages/", "loram_stages/") for path in (ROOT / "stages").glob("*.py")
    }
    assert {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")} == in_tree
    assert "loram/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_every_module_imports_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    names = [name for name in modules(wheel) if not name.endswith("__main__")]
    assert "loram_stages.cli" in names
    # -I: neither the current folder nor PYTHONPATH; the unpacked wheel goes first, so the checkout is not used.
    code = (
        f"import sys, importlib; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "import loram, loram_stages\n"
        f"assert loram.__file__.startswith({str(tmp_path)!r}) and loram_stages.__file__.startswith({str(tmp_path)!r})"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_versions_agree() -> None:
    import importlib.metadata

    import loram

    assert importlib.metadata.version("loram") == loram.__version__
