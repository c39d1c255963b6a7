from __future__ import annotations

from pathlib import Path

import pytest

from truetap.harness.errors import UsageError
from truetap.pipeline import config, verifiers

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2-cpu.toml"
SMALLEST = 'output = "out"\n[verifier]\nbuiltin = "smollm2-135m-instruct"\n'


def refusal(tmp_path: Path, toml: str) -> UsageError:
    path = tmp_path / "run.toml"
    path.write_text(toml)
    with pytest.raises(UsageError) as caught:
        config.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_example_loads() -> None:
    loaded = config.load(EXAMPLE)
    assert loaded.output == Path("runs/smollm2-cpu")
    assert loaded.verifier.builtin == "smollm2-135m-instruct"
    assert loaded.capture.boundaries == (2, 15, 27, 30)
    assert 200 <= loaded.data.train + loaded.data.validation <= 400
    assert 0.0 in loaded.evaluate.temperatures
    assert 0.7 in loaded.evaluate.temperatures


def test_a_missing_file_is_refused_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no configuration at .*/none\.toml") as caught:
        config.load(tmp_path / "none.toml")
    assert EXAMPLE.name in caught.value.remedy


@pytest.mark.parametrize("content", [b"output = \n", b"[verifier\n", b'output = "\xff"'])
def test_what_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"run\.toml is not readable TOML: "):
        config.load(path)


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ("[train]\nepoch = 1", "train.epoch: Extra inputs"),
        ("[trian]\nepochs = 1", "trian: Extra inputs"),
        ('[train]\nepochs = "many"', "train.epochs: "),
        ("[train]\nepochs = 1.5", "train.epochs: "),
        ("[data]\ntrain = -1", "data.train: Input should be greater than 0"),
        ("[data]\nvalidation = 0", "data.validation: Input should be greater than 0"),
        ("[data]\ntemperature = -0.1", "data.temperature: "),
        ("[train]\nlearning_rate = 0.0", "train.learning_rate: "),
        ("[train]\ncheckpoint_every = -5", "train.checkpoint_every: "),
        (
            "[audit]\nsamples = 32\nmax_tokens = 128",
            "audit: Value error, max_tokens must be at least 8",
        ),
        ("[extract]\nrequests_per_shard = 0", "extract.requests_per_shard: "),
        ("[evaluate]\ntemperatures = [0.0, -1.0]", "evaluate.temperatures.1: "),
        ('[capture]\ndtype = "int8"', "capture.dtype: "),
        ('[capture]\nboundaries = ["a", 2]', "capture.boundaries.0: "),
        ("[capture]\nboundaries = [30]", "capture.boundaries: "),
        (
            "[capture]\npipeline_parallel_size = 2",
            "capture: Value error, pipeline_parallel_size must be 1: vLLM keeps the states",
        ),
        (
            "[capture]\ndata_parallel_size = 2",
            "capture: Value error, data_parallel_size must be 1: replicas share nothing",
        ),
        ("[capture]\nexpert_parallel = true", "capture.expert_parallel: Extra inputs"),
        ('[gate]\nprofile = "none"', "gate.profile: "),
        ('[data]\nserver = "localhost:8000"', "data.server: Value error, write it as"),
        ('[data]\nserver = "http://u:s3cret@host/v1"', "data.server: Value error, a key does not"),
        ('[data]\nserver = "http://host/v1?key=s3cret"', "data.server: Value error, a key does"),
        ('[data]\nserver = "http://host/v1"\nserver_key = "sk-s3cret"', "data.server_key: "),
        ('[data]\nserver = "http://host:s3cret/v1"', "data.server: Value error, write it as"),
        ('[data]\nserver = "http://host:99999/v1"', "data.server: Value error, write it as"),
        ('[data]\nserver = "http://host:0/v1"', "data.server: Value error, write it as"),
        ('[data]\nserver = "http://[::1/v1"', "data.server: Value error, write it as"),
        ('[data]\nserver = "http://ho\\tst/v1"', "data.server: Value error, write it as"),
        ('[data]\nserver = "http://my host/v1"', "data.server: Value error, write it as"),
        ("[data]\nserver_requests = 3", "data: Value error, server_requests without data.server"),
        (
            '[data]\nquestions = "q"\nanswers = "given"\nserver = "http://host/v1"',
            'data: Value error, answers = "given" asks no server',
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_table(tmp_path: Path, added: str, named: str) -> None:
    error = refusal(tmp_path, SMALLEST + added)
    assert f": {named}" in str(error)
    assert "s3cret" not in str(error), "a key is repeated where anybody may read it"
    assert "pipeline/config.py" in error.remedy


def test_one_stage_and_one_replica_may_be_said(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SMALLEST + "[capture]\npipeline_parallel_size = 1\ndata_parallel_size = 1")
    assert config.load(path).capture == config.Capture()


def test_a_run_is_bound_to_a_server_but_not_to_its_address(tmp_path: Path) -> None:
    def facts(settings: str) -> dict[str, object]:
        path = tmp_path / "run.toml"
        path.write_text(f"{SMALLEST}[data]\n{settings}")
        return config.load(path).data.facts()

    here, there = facts('server = "http://a:1/v1/"'), facts('server = "https://b/v1"')
    assert here == there
    assert here == facts("") | {"answered_by": "a server"}


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_some_generator_refuses_is_refused_at_once(tmp_path: Path, seed: int) -> None:
    """numpy takes no negative seed and would say so in evaluation, hours later."""
    assert ": seed: " in str(refusal(tmp_path, f"seed = {seed}\n{SMALLEST}"))


@pytest.mark.parametrize(
    "verifier", ["", 'builtin = "smollm2-135m-instruct"\ndirectory = "somewhere"']
)
def test_exactly_one_verifier_is_given(tmp_path: Path, verifier: str) -> None:
    error = refusal(tmp_path, f'output = "out"\n[verifier]\n{verifier}')
    assert "verifier: " in str(error)
    assert "give either builtin or directory" in str(error)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    error = str(refusal(tmp_path, "[verifier]\n[train]\nepochs = 0\nepoch = 1"))
    for key in ("output: ", "verifier: ", "train.epochs: ", "train.epoch: "):
        assert key in error


def load_with(tmp_path: Path, verifier: Path, capture: str) -> config.RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(f'output = "out"\n[verifier]\ndirectory = "{verifier}"\n[capture]\n{capture}')
    return config.load(path)


def test_boundaries_default_to_those_of_eagle3(tmp_path: Path, paper_verifier: Path) -> None:
    loaded = load_with(tmp_path, paper_verifier, "max_num_seqs = 5")
    spec = verifiers.spec_of(loaded, paper_verifier)
    assert (spec.boundaries, spec.max_num_seqs, spec.dtype) == ((2, 6, 9, 12), 5, "bfloat16")


@pytest.mark.parametrize(
    ("capture", "sentence"),
    [
        ("max_model_len = 1025", "capture.max_model_len is 1025, but paper has 1024 positions"),
        ("boundaries = [2, 13]", "boundary 13 is out of range"),
        ("boundaries = [6, 2, 12]", r"\[6, 2, 12\] are not strictly ascending"),
        # The targets would be made from a state that the verifier's head was never meant for.
        ("boundaries = [2, 6, 9]", "ends with 9; the training targets need the state after"),
    ],
)
def test_what_the_verifier_cannot_give_is_refused(
    tmp_path: Path, paper_verifier: Path, capture: str, sentence: str
) -> None:
    loaded = load_with(tmp_path, paper_verifier, capture)
    with pytest.raises(UsageError, match=sentence) as caught:
        verifiers.spec_of(loaded, paper_verifier)
    assert caught.value.remedy
