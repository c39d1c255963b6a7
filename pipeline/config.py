"""The run's configuration: one TOML file, checked before anything runs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from truetap.harness.errors import UsageError

Positive = Annotated[int, Field(gt=0)]


class _Table(BaseModel):
    """A mistyped key is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Verifier(_Table):
    """The big model whose states are captured. Give exactly one of the two."""

    builtin: Literal["smollm2-135m-instruct"] | None = None
    directory: Path | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Verifier:
        if (self.builtin is None) == (self.directory is None):
            raise ValueError("give either builtin or directory")
        return self


_NOT_IN_ONE_ENGINE = {
    "pipeline_parallel_size": "vLLM keeps the states of a stage's blocks on that stage: model "
    "runner V1 gives those of the last stage alone, and V2, from 0.32 on, passes them on for a few "
    "families (read in its sources, not run); use tensor_parallel_size",
    "data_parallel_size": "replicas share nothing in an extraction, so each is an engine of its "
    "own: truetap extract --ray ADDRESS --engines N",
}


class Capture(_Table):
    """How hidden states are taken; a certificate is bound to all of it."""

    adapter: str = "vllm_native"
    boundaries: Annotated[tuple[int, ...], Field(min_length=2)] | None = None
    """Ascending; the last one gives the training targets. Default: EAGLE-3's set."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    tensor_parallel_size: Positive = 1
    executor: Literal["mp", "ray"] = "mp"
    """``ray``: vLLM spreads the ranks of its one engine over a Ray cluster's nodes (docs/scale.md);
    ``mp``: all are on this machine."""
    max_model_len: Positive = 512
    max_num_batched_tokens: Positive = 1024
    max_num_seqs: Positive = 32
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    call_deadline_s: Positive = 120
    """Longest silence of the engine before it is killed, a slow disk's included. It changes nothing
    in the captures, so it may change from one run to the next."""

    @model_validator(mode="before")
    @classmethod
    def _one_stage_one_replica(cls, given: Any) -> Any:
        """Say why, in place of "not permitted", of what vLLM has and truetap does not use."""
        if isinstance(given, dict):
            for name, why in _NOT_IN_ONE_ENGINE.items():
                if given.pop(name, 1) != 1:
                    raise ValueError(f"{name} must be 1: {why}")
        return given


class Gate(_Table):
    """What a run demands of its certificate; see docs/gate.md."""

    profile: Literal["shapes", "core", "full"] = "core"
    """What is run, and the least that is demanded; a policy may demand more."""
    reference_device: str = "cpu"
    """Where the suite computes what the states should be: ``cpu``, or block by block on a GPU that
    has room for one block beside the engine, as ``cuda:0``. A run's audits stay on the CPU."""
    policy: Path | None = None
    """Default: that of development, which anybody's certificate satisfies, signed or not."""
    key: Path | None = None
    """Private key to sign with, unless ``--key`` or TRUETAP_KEY names another. Default: none."""
    certificates: tuple[Path, ...] = ()
    """Use these in place of one of the run's own; one good one is enough."""


def _server_url(address: str) -> str:
    """Return a server's address without a final slash; never repeat one that may hold a key."""
    try:
        parts = urlsplit(address)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # it repeats what stands where the port should be
        whole = False
    if not whole or not address.isprintable() or " " in address:
        raise ValueError('write it as "http://host:port/v1"')
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a key does not belong into an address: name its variable in server_key")
    return address.rstrip("/")


_SERVER = {"server", "server_model", "server_key", "server_requests", "server_deadline_s"}


class Data(_Table):
    """Questions, and how the verifier answers them."""

    questions: Path | None = None
    """JSON lines, a .json array, a .parquet file, a folder that ``datasets`` saved, or
    ``hub:NAME``; the shapes of a row are in docs/data.md. Default: docstrings of Python's standard
    library."""
    part: str = "train"
    """Which split of a ``datasets`` folder or of the hub's data set is read."""
    answers: Literal["regenerate", "given"] = "regenerate"
    """Whether the verifier answers each user's turn itself, or the data set's answers are kept."""
    loss_on: Literal["answers", "last_answer"] = "answers"
    """What of a dialogue of several turns is learnt."""
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    """What happens to a dialogue that max_model_len cannot hold; it is cut after a whole turn."""
    train: Positive = 280
    validation: Positive = 20
    heldout: Positive = 40
    """Questions kept out of everything, the draft vocabulary included, for evaluation."""
    max_answer_tokens: Positive = 96
    temperature: Annotated[float, Field(ge=0)] = 0.7
    server: Annotated[str, AfterValidator(_server_url)] | None = None
    """Address of an OpenAI-compatible server that answers in place of an engine of our own, such as
    ``http://host:8000/v1``. It must serve this verifier and tell token ids: docs/data.md."""
    server_model: str | None = None
    """What the server calls the verifier. Default: the only model that it has."""
    server_key: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")] | None = None
    """The environment variable that holds the server's API key, never the key itself."""
    server_requests: Positive = 64
    """How many requests the server is given at a time."""
    server_deadline_s: Positive = 600
    """Longest wait for one answer, all its attempts included."""

    @model_validator(mode="after")
    def _answers_of_something(self) -> Data:
        if self.answers == "given" and self.questions is None:
            raise ValueError('answers = "given" needs data.questions: docstrings have no answers')
        if self.answers == "given" and self.server is not None:
            raise ValueError('answers = "given" asks no server: leave data.server out')
        if self.server is None and (idle := self.model_fields_set & _SERVER - {"server"}):
            raise ValueError(f"{', '.join(sorted(idle))} without data.server does nothing")
        return self

    def facts(self) -> dict[str, object]:
        """Return what conversations depend on; of later settings only those that are in use.

        So a run folder that was made before they existed can be continued. Of a server only that
        one answers: it may move to another address before a run is finished.
        """
        later = ("part", "answers", "loss_on", "too_long")
        unused = {name for name in later if getattr(self, name) == Data.model_fields[name].default}
        served = {"answered_by": "a server"} if self.server else {}
        return self.model_dump(mode="json", exclude=unused | _SERVER) | served


class Extract(_Table):
    """How captures are stored."""

    requests_per_shard: Positive = 50
    staging_mib: Annotated[int, Field(ge=16)] = 512
    """Memory for rows on their way to the disk. When it is full, the engine waits."""
    writers: Positive = 4
    """Threads that write them, and as many that read back and hash; a core hashes 1 to 2 GB/s."""

    def facts(self) -> dict[str, object]:
        """Return what the shards depend on."""
        return self.model_dump(include={"requests_per_shard"})


class Audit(_Table):
    """Samples of the shards, captured again by the reference while extraction goes on.

    A setting here changes nothing in the captures, so it may change from one run to the next.
    """

    enabled: bool = True
    every_shards: Positive = 16
    """How many shards one audit answers for. The first and the last one are audited in any case."""
    samples: Positive = 1
    """Requests of the audited shard that are captured again, drawn at random."""
    max_tokens: Annotated[int, Field(ge=16)] = 1024
    """Tokens of one audit, in all; of a longer request the beginning is audited."""
    deadline_s: Positive = 600
    """Longest wait for one audit, loading the reference included."""

    @model_validator(mode="after")
    def _some_of_each(self) -> Audit:
        if self.max_tokens < 8 * self.samples:
            raise ValueError("max_tokens must be at least 8 for each of the samples")
        return self


class Train(_Table):
    """The EAGLE-3 draft head and its training."""

    draft_vocabulary: Positive = 4096
    epochs: Positive = 10
    tokens_per_step: Positive = 512
    """About how many tokens are packed into one step. On a CPU, attention is dense over a pack."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    mixed_precision: Literal["no", "bf16"] = "bf16"
    test_time_steps: Positive = 3
    """Draft steps unrolled in training (EAGLE-3's training-time test)."""
    checkpoint_every: Positive = 100
    """Steps between checkpoints, which is what an interruption can cost."""


class Evaluate(_Table):
    """Serving the head by speculative decoding."""

    num_speculative_tokens: Positive = 3
    max_tokens: Positive = 64
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = (0.0, 0.7)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"


class RunConfig(_Table):
    """A whole run."""

    output: Path
    """Folder of the run; a second run continues what is there."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    verifier: Verifier
    capture: Capture = Capture()
    gate: Gate = Gate()
    data: Data = Data()
    extract: Extract = Extract()
    audit: Audit = Audit()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()


def load(path: Path) -> RunConfig:
    """Read and check a configuration; one sentence per mistake."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(
            f"there is no configuration at {path}", remedy="see examples/smollm2-cpu.toml"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not readable TOML: {error}") from error
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        mistakes = [
            f"{'.'.join(map(str, mistake['loc'])) or 'the file'}: {mistake['msg']}"
            for mistake in error.errors()
        ]
        raise UsageError(
            f"{path}: {'; '.join(mistakes)}",
            remedy="the settings and their defaults are listed in pipeline/config.py",
        ) from None
