"""Policies: production's where nothing is said, and one sentence where something wrong is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from truetap.harness import signing
from truetap.harness.errors import UsageError
from truetap.pipeline import policy

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
ID = "ed25519:" + "a" * 64
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "policy.toml"


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.toml"
    path.write_text(text)
    return path


def test_what_is_not_said_is_as_production_needs_it(tmp_path: Path) -> None:
    loaded = policy.load(written(tmp_path, f'signers = ["{ID}"]'))
    demands = loaded.demands("shapes", "5" * 64, NOW)
    assert (demands.profile, demands.unsigned) == ("core", False)
    assert demands.signers == {ID}
    assert demands.max_age == timedelta(days=30)
    assert demands.expectations == frozenset()
    assert (demands.suite_digest, demands.now, demands.binding) == ("5" * 64, NOW, None)


def test_without_a_file_it_is_that_of_development() -> None:
    demands = policy.load(None).demands("core", "5" * 64, NOW, {"engine": "vllm"})
    assert (demands.profile, demands.unsigned) == ("core", True)
    assert demands.signers is None
    assert demands.max_age is None
    assert demands.binding == {"engine": "vllm"}


def test_the_example_is_a_production_policy(tmp_path: Path) -> None:
    public = signing.new_key("release", tmp_path)[1]
    text = EXAMPLE.read_text().replace("keys/release.pub", public.name)
    assert text != EXAMPLE.read_text()
    loaded = policy.load(written(tmp_path, text))
    assert loaded.production
    assert loaded.signers == (signing.key_id(public),)
    assert set(policy.Policy.model_fields) == {
        line.removeprefix("# ").split(" = ")[0] for line in text.splitlines() if " = " in line
    }


def test_signers_are_files_beside_the_policy_or_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = signing.new_key("release", tmp_path / "keys")[1]
    path = written(tmp_path, f'signers = ["keys/release.pub", "{ID}"]')
    monkeypatch.chdir("/")
    assert policy.load(path).signers == (signing.key_id(public), ID)


@pytest.mark.parametrize(("own", "asked"), [("core", "full"), ("full", "core")])
def test_the_stronger_profile_of_policy_and_run_is_demanded(
    tmp_path: Path, own: str, asked: str
) -> None:
    loaded = policy.load(written(tmp_path, f'profile = "{own}"\nsigners = ["{ID}"]'))
    assert loaded.demands(asked, "", NOW).profile == "full"


def test_unsigned_ones_can_be_allowed_outside_production(tmp_path: Path) -> None:
    text = "production = false\nunsigned = true\n"
    demands = policy.load(written(tmp_path, text)).demands("core", "", NOW)
    assert (demands.unsigned, demands.signers) == (True, None)
    demands = policy.load(written(tmp_path, f'{text}signers = ["{ID}"]')).demands("core", "", NOW)
    assert (demands.unsigned, demands.signers) == (True, {ID})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "signers names no key"),
        ("production = false", "signers names no key"),
        ("unsigned = true", "a production policy cannot allow unsigned certificates"),
        ('profile = "shapes"', "profile shapes looks at no value"),
        ('profile = "best"', "profile: Input should be 'shapes', 'core' or 'full'"),
        ("max_age_days = 0", "max_age_days: Input should be greater than 0"),
        ("max_age_days = 1.5", "max_age_days: "),
        ('expectations = ["LAYERS-999"]', "expectations: there is no clause LAYERS-999"),
        ('production = "no"', "production: Input should be a valid boolean"),
        ("production = 0", "production: Input should be a valid boolean"),
        ('unsigned = "yes"', "unsigned: Input should be a valid boolean"),
        ("max_age_days = true", "max_age_days: Input should be a valid integer"),
        ("signer = 1", "signer: Extra inputs"),
        ("[gate]\nunsigned = true", "gate: Extra inputs"),
        ('signers = ["none.pub"]', "signers: there is no key at "),
        ('signers = ["../policy.toml"]', "signers: "),
        ('signers = ["ed25519:short"]', "signers: "),
        ("signers = [", "is not readable TOML"),
    ],
)
def test_a_wrong_policy_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = written(folder, text)
    with pytest.raises(UsageError) as caught:
        policy.load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_no_policy_where_one_is_named_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no policy at") as caught:
        policy.load(tmp_path / "none.toml")
    assert EXAMPLE.name in caught.value.remedy
    with pytest.raises(UsageError, match="is not readable TOML"):
        policy.load(tmp_path)
    (tmp_path / "policy.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not readable TOML"):
        policy.load(tmp_path / "policy.toml")
